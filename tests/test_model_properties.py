"""What must hold for every model of the course, whatever its weights: causality, gradients, initialisation, tying, padding, errors."""
import copy
import itertools
import math
import shutil

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from tinylm.kv_cache import KVCache
from tinylm.positions import apply_rope, rope_table
from tinylm.transformer import Block, ModelConfig, TransformerLM

POSITIONS, NORMS, FFNS, BACKENDS = ("rope", "learned", "sinusoidal", "none"), ("rmsnorm", "layernorm"), ("swiglu", "gelu"), ("math", "fused")
every_position = pytest.mark.parametrize("position", POSITIONS)
every_norm = pytest.mark.parametrize("norm", NORMS)
every_ffn = pytest.mark.parametrize("ffn", FFNS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def tiny(**fields):
    return ModelConfig(**{**dict(vocab_size=13, context_length=12, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24), **fields})


def build(seed=0, dtype=torch.float64, **fields):
    "A model in eval mode whose every parameter is random and large enough to matter."
    generator = torch.Generator().manual_seed(seed)
    model = TransformerLM(tiny(**fields)).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.4 * noise)
    return model


def random_ids(batch, length, seed=0, vocab_size=13):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- causality, bit for bit -------------------------------------------------------------------------------------------------------------


@every_position
@every_norm
@every_ffn
@every_backend
def test_changing_a_token_changes_no_earlier_logit(position, norm, ffn, backend):
    model = build(dtype=torch.float32, position=position, norm=norm, ffn=ffn, backend=backend, bias=True)
    ids = random_ids(2, 9)
    with torch.no_grad():
        before = model(ids)
        for t in range(9):
            changed = ids.clone()
            changed[:, t] = (changed[:, t] + 1) % 13
            after = model(changed)
            assert torch.equal(after[:, :t], before[:, :t]), f"token {t} was seen from before it"
            assert not torch.equal(after[:, t], before[:, t]), "a token must see itself"
            assert t == 8 or not torch.equal(after[:, 8], before[:, 8]), "the last token must see the past"


@pytest.mark.parametrize("rotary", [True, False])
@every_norm
@every_ffn
@every_backend
def test_changing_a_vector_changes_no_earlier_output_of_a_block(rotary, norm, ffn, backend):
    block, x = build(norm=norm, ffn=ffn, backend=backend).blocks[0], randn(2, 7, 16)
    cos, sin = rope_table(7, 4, dtype=torch.float64)
    rope = (lambda heads: apply_rope(heads, cos, sin)) if rotary else None
    with torch.no_grad():
        before = block(x, rope=rope)
        for t in range(7):
            changed = x.clone()
            changed[:, t] += randn(16, seed=t + 1)
            after = block(changed, rope=rope)
            assert torch.equal(after[:, :t], before[:, :t])
            assert (after[:, t:] != before[:, t:]).any(dim=-1).all(), "every later row sees the change"


# --- gradients --------------------------------------------------------------------------------------------------------------------------


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@every_position
@every_norm
@every_ffn
@every_backend
def test_gradients_equal_finite_differences(position, norm, ffn, backend):
    "For every parameter, the slope along one random direction: (loss(w + hd) − loss(w − hd)) / 2h."
    model = build(position=position, norm=norm, ffn=ffn, backend=backend, bias=True, tie_embeddings=ffn == "gelu")
    ids, targets, h = random_ids(2, 6), random_ids(2, 6, seed=1), 1e-6
    loss_of(model, ids, targets).backward()
    with torch.no_grad():
        for seed, (name, weight) in enumerate(model.named_parameters()):
            direction = randn(*weight.shape, seed=seed)
            weight += h * direction
            above = loss_of(model, ids, targets)
            weight -= 2 * h * direction
            below = loss_of(model, ids, targets)
            weight += h * direction
            slope = (weight.grad * direction).sum()
            torch.testing.assert_close(slope, (above - below) / (2 * h), atol=1e-7, rtol=1e-7, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.attention.qkv_proj.weight", "blocks.0.ffn.gate_up_proj.weight", "norm.weight"])
def test_gradcheck_through_the_whole_stack(name):
    model = build(vocab_size=3, d_model=4, n_heads=2, n_kv_heads=1, d_ff=2, n_layers=1)
    ids = random_ids(1, 4, vocab_size=3)
    weight = model.get_parameter(name).detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: functional_call(model, {name: w}, (ids,)), weight)


@every_position
@every_norm
@every_ffn
@pytest.mark.parametrize("bias, tied", list(itertools.product((False, True), repeat=2)))
def test_every_row_of_every_parameter_learns(position, norm, ffn, bias, tied):
    "As initialised, on ids that use the whole vocabulary and the whole context."
    torch.manual_seed(0)
    model = TransformerLM(tiny(position=position, norm=norm, ffn=ffn, bias=bias, tie_embeddings=tied)).double()
    ids = torch.arange(13).repeat(12)[: 3 * 12].view(3, 12)
    loss_of(model, ids, random_ids(3, 12)).backward()
    names = dict(model.named_parameters())
    assert ("head.weight" in names) == (not tied) and ("position_embedding.weight" in names) == (position == "learned")
    assert any(name.endswith("bias") for name in names) == bias
    for name, weight in names.items():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        rows = weight.grad.flatten(1).abs().sum(dim=1) if weight.ndim == 2 else weight.grad.abs()
        if name.endswith("qkv_proj.bias"):  # a constant added to all keys moves no score, unless positions turn it
            rows = rows.split((16, 8, 8))[0]
        assert (rows > 0).all(), f"{name}: rows without a gradient"


# --- initialisation ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size, d_model", [(5, 16), (256, 64), (8192, 256)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_a_uniform_guess(vocab_size, d_model, tied):
    "Targets are independent of the input: a tied model's first guess is the word it has just read."
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size, context_length=128, d_model=d_model, n_layers=2, n_heads=4, tie_embeddings=tied))
    with torch.no_grad():
        loss = loss_of(model, random_ids(4, 128, vocab_size=vocab_size), random_ids(4, 128, seed=1, vocab_size=vocab_size))
    assert loss.item() == pytest.approx(math.log(vocab_size), rel=0.05)


@pytest.mark.parametrize("n_layers", [2, 6])
@pytest.mark.parametrize("ffn, norm, position, bias", [("swiglu", "rmsnorm", "rope", False), ("gelu", "layernorm", "learned", True)])
def test_only_the_two_writers_of_a_layer_start_smaller(n_layers, ffn, norm, position, bias):
    torch.manual_seed(0)
    config = ModelConfig(256, d_model=128, n_layers=n_layers, n_heads=4, ffn=ffn, norm=norm, position=position, bias=bias, tie_embeddings=False)
    writers, seen = ("attention.out_proj.weight", "ffn.down_proj.weight"), 0
    for name, weight in TransformerLM(config).named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight) if "norm" in name and name.endswith("weight") else torch.zeros_like(weight)), name
            continue
        seen += name.endswith(writers)
        std = 0.02 / math.sqrt(2 * n_layers) if name.endswith(writers) else 0.02
        assert weight.std().item() == pytest.approx(std, rel=0.04), name  # 16,384 numbers at least: five standard errors are 3 %
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel()), name
    assert seen == 2 * n_layers


# --- tying ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [lambda m: m, copy.deepcopy, lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to("cpu", torch.float16), lambda m: m.float().train()],
    ids=["new", "deepcopy", "double", "bfloat16", "to", "train"],
)
def test_a_tied_head_is_the_embedding_itself(after):
    model = after(TransformerLM(tiny()))
    assert model.head.weight is model.embedding.weight
    assert sum(weight is model.embedding.weight for weight in model.parameters()) == 1
    assert sum(weight.shape == (13, 16) for weight in model.parameters()) == 1
    with torch.no_grad():
        model.embedding.weight.fill_(2.0)
    assert (model.head.weight == 2).all()


def test_an_untied_head_is_its_own_parameter():
    model = TransformerLM(tiny(tie_embeddings=False))
    assert model.head.weight is not model.embedding.weight and model.head.bias is None
    assert model.num_parameters() == TransformerLM(tiny()).num_parameters() + 13 * 16


# --- counting ---------------------------------------------------------------------------------------------------------------------------


def on_meta(config):
    "Only shapes, no memory."
    with torch.device("meta"):
        return TransformerLM(config)


@pytest.mark.parametrize(
    "fields, total, without_tables",
    [
        (dict(name="base"), 6_917_376, 4_820_224),
        (dict(name="base", n_kv_heads=4), 6_524_160, 6_524_160 - 8192 * 256),
        (dict(name="base", n_kv_heads=2), 6_327_552, 6_327_552 - 8192 * 256),
        (dict(name="base", n_kv_heads=1), 6_229_248, 6_229_248 - 8192 * 256),
        (dict(name="base", tie_embeddings=False), 9_014_528, 9_014_528 - 8192 * 256),
        (dict(name="large"), 15_735_168, 15_735_168 - 8192 * 384),
        (dict(name="reference"), 3_469_568, 3_469_568 - 1000 * 256),
        (dict(name="gpt2-mini"), 7_291_776, 4 * (12 * 128**2 + 13 * 128) + 2 * 128),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_parameter_counts_are_exact(fields, total, without_tables):
    model = on_meta(ModelConfig.preset(**fields))
    assert model.num_parameters() == total == sum({id(w): w.numel() for w in model.parameters()}.values())
    assert model.num_parameters(non_embedding=True) == without_tables


@pytest.mark.parametrize("tied", [True, False])
def test_the_untied_head_counts_and_both_tables_do_not(tied):
    model = TransformerLM(tiny(position="learned", tie_embeddings=tied))
    assert model.num_parameters() - model.num_parameters(non_embedding=True) == (13 + 12) * 16


# --- the residual stream ----------------------------------------------------------------------------------------------------------------


@every_norm
@every_ffn
@every_backend
def test_a_block_whose_branches_write_nothing_returns_its_input_bit_for_bit(norm, ffn, backend):
    block, x = Block(tiny(norm=norm, ffn=ffn, backend=backend, bias=True)), randn(2, 5, 16, dtype=torch.float32)
    with torch.no_grad():
        for writer in (block.attention.out_proj, block.ffn.down_proj):
            writer.weight.zero_(), writer.bias.zero_()
        assert torch.equal(block(x), x)
        block.ffn.down_proj.bias.fill_(1.0)
        torch.testing.assert_close(block(x), x + 1)
        block.ffn.down_proj.bias.zero_(), block.attention.out_proj.bias.fill_(2.0)
        torch.testing.assert_close(block(x), x + 2)


@every_norm
def test_each_branch_reads_a_normed_copy(norm):
    "Scaling the stream does not change what a branch reads, so it adds the same as before."
    block, x = build(norm=norm, norm_eps=1e-30).blocks[0], randn(2, 5, 16)
    with torch.no_grad():
        block.ffn.down_proj.weight.zero_()
        torch.testing.assert_close(block(8 * x) - 8 * x, block(x) - x, atol=1e-12, rtol=0)
        block.attention.out_proj.weight.zero_(), block.ffn.down_proj.weight.normal_()
        torch.testing.assert_close(block(8 * x) - 8 * x, block(x) - x, atol=1e-12, rtol=0)


def test_logits_are_the_head_of_the_hidden_state_which_is_normed():
    model, ids = build(), random_ids(2, 6)
    with torch.no_grad():
        hidden = model.hidden(ids)
        assert hidden.shape == (2, 6, 16) and torch.equal(model(ids), model.head(hidden))
        model.norm.weight.fill_(1.0)
        torch.testing.assert_close(model.hidden(ids).square().mean(dim=-1), torch.ones(2, 6, dtype=torch.float64), atol=1e-4, rtol=0)


# --- batches and padding ----------------------------------------------------------------------------------------------------------------


@every_position
@every_backend
def test_a_row_has_the_same_logits_in_any_batch(position, backend):
    model, ids = build(position=position, backend=backend, bias=True), random_ids(5, 8)
    with torch.no_grad():
        together = model(ids)
        alone = torch.cat([model(row[None]) for row in ids])
        shuffled = model(ids[[3, 0, 4, 1, 2]])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(shuffled, together[[3, 0, 4, 1, 2]], atol=1e-12, rtol=0)


def left_padded(prompts, length, pad_id):
    "Rows of different lengths, pads in front; and which tokens are real."
    ids = torch.full((len(prompts), length), pad_id)
    for row, prompt in zip(ids, prompts):
        row[length - len(prompt) :] = prompt
    return ids, torch.arange(length) >= torch.tensor([[length - len(prompt)] for prompt in prompts])


@every_position
@every_backend
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_a_left_padded_row_equals_its_unpadded_run(position, backend, n_kv_heads):
    model = build(position=position, backend=backend, n_kv_heads=n_kv_heads)
    prompts = [random_ids(1, n, seed=n)[0] for n in (7, 5, 1)]
    ids, pad_mask = left_padded(prompts, 7, pad_id=0)
    with torch.no_grad():
        padded = model(ids, pad_mask=pad_mask)
        assert padded.isfinite().all()
        for row, prompt in zip(padded, prompts):
            torch.testing.assert_close(row[7 - len(prompt) :], model(prompt[None])[0], atol=1e-12, rtol=0)
        other_pads = model(torch.where(pad_mask, ids, 12), pad_mask=pad_mask)
    torch.testing.assert_close(other_pads[pad_mask], padded[pad_mask], atol=1e-12, rtol=0)


@every_position
@every_backend
@pytest.mark.parametrize("chunks", [(7, 1, 1, 1), (3, 4, 3), (1,) * 10, (10,)], ids=str)
def test_a_left_padded_row_decodes_like_its_unpadded_run(position, backend, chunks):
    "Positions go on row by row; a shared counter would give the short rows the long row's positions."
    model = build(position=position, backend=backend)
    sequences = [random_ids(1, n, seed=n)[0] for n in (10, 8, 4)]  # the last three of each are decoded
    ids, pad_mask = left_padded(sequences, 10, pad_id=0)
    cache = KVCache.for_model(model, 3, 12)
    with torch.no_grad():
        pieces = [model(piece, cache=cache, pad_mask=pad_mask[:, : cache.length + piece.shape[1]]) for piece in ids.split(chunks, dim=1)]
        for row, sequence in zip(torch.cat(pieces, dim=1), sequences):
            torch.testing.assert_close(row[10 - len(sequence) :], model(sequence[None])[0], atol=1e-12, rtol=0)


@every_position
def test_a_mask_without_pads_changes_nothing(position):
    model, ids = build(position=position), random_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, pad_mask=torch.ones(2, 6, dtype=torch.bool)), model(ids), atol=1e-12, rtol=0)


def test_pads_leave_every_gradient_finite():
    "The first pad of a row may attend to nothing: 0/0 in a careless softmax."
    model = build(position="learned", bias=True)
    ids, pad_mask = left_padded([random_ids(1, n, seed=n)[0] for n in (6, 2)], 6, pad_id=0)
    model(ids, pad_mask=pad_mask)[pad_mask].square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


# --- bad input: the documented error, before any work ---------------------------------------------------------------------------------


def mask(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


BAD_PASSES = {  # after 3 tokens in the cache, 2 rows, context 12, vocabulary 13
    "one token beyond the context": (random_ids(2, 10), {}, ValueError, ("context_length=12", "10", "3")),
    "id = vocab_size": (torch.tensor([[0], [13]]), {}, ValueError, ("13", "12")),
    "negative id": (torch.tensor([[-1], [2]]), {}, ValueError, ("-1", "12")),
    "float ids": (torch.zeros(2, 1), {}, TypeError, ("ids", "int", "float32")),
    "bool ids": (mask(2, 1), {}, TypeError, ("ids", "int", "bool")),
    "one-dimensional ids": (torch.tensor([1, 2]), {}, ValueError, ("ids", "(2,)", "(B, T)")),
    "three-dimensional ids": (torch.zeros(2, 1, 1, dtype=torch.long), {}, ValueError, ("ids", "(2, 1, 1)", "(B, T)")),
    "no token": (torch.zeros(2, 0, dtype=torch.long), {}, ValueError, ("ids", "(2, 0)")),
    "no row": (torch.zeros(0, 2, dtype=torch.long), {}, ValueError, ("ids", "(0, 2)")),
    "more rows than the cache": (random_ids(3, 1), {}, ValueError, ("cache", "2", "3")),
    "fewer rows than the cache": (random_ids(1, 1), {}, ValueError, ("cache", "2", "1")),
    "pad_mask of the new tokens only": (random_ids(2, 1), dict(pad_mask=mask(2, 1)), ValueError, ("pad_mask", "(2, 4)", "(2, 1)")),
    "pad_mask for one row": (random_ids(2, 1), dict(pad_mask=mask(1, 4)), ValueError, ("pad_mask", "(2, 4)", "(1, 4)")),
    "pad_mask in four dimensions": (random_ids(2, 1), dict(pad_mask=mask(2, 1, 1, 4)), ValueError, ("pad_mask", "(2, 4)")),
    "pad_mask of integers": (random_ids(2, 1), dict(pad_mask=mask(2, 4, dtype=torch.long)), TypeError, ("pad_mask", "bool", "int64")),
    "pad_mask of floats": (random_ids(2, 1), dict(pad_mask=mask(2, 4, dtype=torch.float32)), TypeError, ("pad_mask", "bool", "float32")),
}


@pytest.mark.parametrize("case", BAD_PASSES)
@every_position
def test_a_bad_pass_raises_before_any_work(case, position):
    ids, arguments, error, fragments = BAD_PASSES[case]
    model, cache = build(position=position), KVCache.for_model(build(position=position), 2, 12)
    worked = []
    with torch.no_grad():
        model(random_ids(2, 3), cache=cache)
        handle = model.embedding.register_forward_hook(lambda *_: worked.append("embedding"))
        for call in (model, model.hidden):
            with pytest.raises(error) as caught:
                call(ids, cache=cache, **arguments)
            assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
        handle.remove()
        assert not worked and cache.length == 3
        expected = model(torch.cat((random_ids(2, 3), random_ids(2, 2, seed=1)), dim=1))[:, 3:]
        torch.testing.assert_close(model(random_ids(2, 2, seed=1), cache=cache), expected, atol=1e-12, rtol=0)


@every_position
def test_the_context_can_be_used_to_its_last_position(position):
    model = build(position=position)
    cache = KVCache.for_model(model, 1, 12)
    with torch.no_grad():
        model(random_ids(1, 12))
        model(random_ids(1, 11), cache=cache), model(random_ids(1, 1), cache=cache)
        assert cache.length == 12
        for arguments in (dict(), dict(cache=cache)):
            with pytest.raises(ValueError, match="context_length=12"):
                model(random_ids(1, 13 - cache.length if arguments else 13), **arguments)


@pytest.mark.parametrize("change", [dict(n_layers=3), dict(n_kv_heads=4), dict(d_model=32)], ids=str)
def test_a_cache_of_another_model_is_refused_and_left_alone(change):
    model = build()
    cache = KVCache.for_model(build(**change), 2, 12)
    with torch.no_grad(), pytest.raises(ValueError):
        model(random_ids(2, 3), cache=cache)
    assert cache.length == 0


def test_int32_ids_are_as_good_as_int64():
    model, ids = build(), random_ids(2, 5)
    with torch.no_grad():
        assert torch.equal(model(ids.int()), model(ids))


# --- dropout ----------------------------------------------------------------------------------------------------------------------------


@every_backend
def test_dropout_falls_in_training_only(backend):
    model, ids = build(dropout=0.5, backend=backend), random_ids(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
        without = build(dropout=0.0, backend=backend)(ids)
        assert torch.equal(model(ids), without), "in eval mode dropout is not there at all"
        torch.manual_seed(0)
        first, second = model.train()(ids), model(ids)
        assert not torch.equal(first, second) and not torch.equal(first, without)
        assert torch.equal(model.eval()(ids), without)


@pytest.mark.parametrize("place", ["embedding", "attention", "ffn"])
def test_dropout_falls_on_the_embedding_and_on_each_branch(place):
    "Half of the numbers are zero in training, none in eval."
    model, seen = build(dropout=0.5, n_layers=1), {}
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.update(embedding=args[0]))
    block.attention.register_forward_hook(lambda _, args, out: seen.update(attention=out))
    block.register_forward_hook(lambda _, args, out: seen.update(ffn=out - seen["embedding"] - seen["attention"]))
    for training, least, most in ((True, 0.35, 0.65), (False, 0.0, 0.0)):
        torch.manual_seed(0)
        with torch.no_grad():
            model.train(training)(random_ids(4, 12))
        zeros = (seen[place].abs() < 1e-12).double().mean().item()  # of 768 numbers; a difference of sums is zero up to rounding
        assert least <= zeros <= most


# --- tables, dtypes, files --------------------------------------------------------------------------------------------------------------


@every_position
def test_tables_are_made_anew_when_the_dtype_changes(position):
    "300 positions: in bfloat16 256 and 257 are the same number, so a table that was ever rounded would show."
    config = tiny(context_length=300, position=position, d_model=8, n_heads=2, n_kv_heads=None)
    model = TransformerLM(config).bfloat16().double().eval()
    fresh = TransformerLM(config).double().eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(random_ids(1, 300)), fresh(random_ids(1, 300)))
    for (name, table), (_, expected) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert table.dtype == expected.dtype and torch.equal(table, expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_rotation_of_a_narrow_model_is_not_narrow(dtype):
    "Angle 299·1 rad: the table is right to float32 even where the weights have eight bits."
    model, seen = build(dtype=dtype, context_length=300, n_layers=1), {}
    model.blocks[0].attention.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(random_ids(1, 300))
    hand = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(1, 1, 300, 4)
    turned = seen["rope"](hand)[0, 0, 299]
    expected = torch.tensor([math.cos(299), 0, math.sin(299), 0], dtype=torch.float64)
    torch.testing.assert_close(turned, expected, atol=1e-14 if dtype == torch.float64 else 1e-7, rtol=0)


@every_position
@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 0.25), (torch.float16, 0.03)], ids=str)
def test_half_precision_stays_near_float32_far_out(position, dtype, atol):
    "Logits of size about 1, at positions past 256. Angles in bfloat16 would miss by several units."
    model = build(dtype=torch.float32, position=position, context_length=300, d_model=8, n_heads=2, n_kv_heads=2, n_layers=1)
    ids = random_ids(1, 300)
    with torch.no_grad():
        wide = model.to(dtype).float()(ids)  # the rounded weights, computed in float32
        narrow = model.to(dtype)(ids)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), wide, atol=atol, rtol=0)


@every_position
@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_holds_the_documented_names_and_no_table(position, tied):
    layer = ["norm1.weight", "attention.qkv_proj.weight", "attention.out_proj.weight", "norm2.weight", "ffn.gate_up_proj.weight", "ffn.down_proj.weight"]
    names = ["embedding.weight", "norm.weight", "head.weight"] + [f"blocks.{i}.{name}" for i in range(2) for name in layer]
    names += ["position_embedding.weight"] * (position == "learned")
    assert sorted(TransformerLM(tiny(position=position, tie_embeddings=tied)).state_dict()) == sorted(names)


@every_position
@pytest.mark.parametrize("tied", [True, False])
def test_weights_saved_and_loaded_give_the_same_logits(position, tied, tmp_path):
    model, other = (build(seed, position=position, tie_embeddings=tied, bias=True, norm="layernorm", ffn="gelu") for seed in (0, 1))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        assert not torch.equal(other(random_ids(2, 6)), model(random_ids(2, 6)))
        assert other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True)) is not None
        assert torch.equal(other(random_ids(2, 6)), model(random_ids(2, 6)))
    assert (other.head.weight is other.embedding.weight) == tied


@every_position
def test_no_table_widens_a_narrow_stream(position):
    "A float32 table added to a bfloat16 stream would silently make all that follows float32."
    model, seen = build(dtype=torch.bfloat16, position=position), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.no_grad():
        assert model(random_ids(1, 4)).dtype == torch.bfloat16
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("backend, kernel_calls", [("math", 0), ("fused", 2)])
def test_the_backend_asked_for_is_the_one_that_runs(backend, kernel_calls, monkeypatch):
    "Both give the same numbers, so only the calls can tell: one per layer."
    calls, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    with torch.no_grad():
        build(backend=backend)(random_ids(1, 4))
    assert len(calls) == kernel_calls


def test_device_is_that_of_the_weights():
    assert TransformerLM(tiny()).device == torch.device("cpu")
    assert on_meta(tiny()).device == torch.device("meta")


@every_position
@pytest.mark.parametrize("move", [lambda model: model, lambda model: model.to("meta"), lambda model: model.bfloat16().to("meta")], ids=["new", "moved", "cast"])
def test_tables_lie_where_the_weights_lie(position, move):
    "The meta device stands for an accelerator."
    for model in (move(TransformerLM(tiny(position=position))), move(on_meta(tiny(position=position)))):
        assert {table.device for table in model.buffers()} <= {model.device}
        assert len(list(model.buffers())) == {"rope": 2, "sinusoidal": 1}.get(position, 0)


# --- compiling --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position, backend", list(zip(POSITIONS, BACKENDS * 2)))
def test_one_graph_without_breaks(position, backend):
    "torch.compile(fullgraph=True) traces the whole pass; the traced program gives the same logits."
    torch._dynamo.reset()
    model, ids = build(position=position, backend=backend, n_layers=1), random_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(ids), model(ids), atol=1e-12, rtol=0)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))), reason="torch.compile needs a C++ compiler: none found")
def test_the_compiled_model_gives_the_same_logits():
    torch._dynamo.reset()
    model, ids = build(n_layers=1), random_ids(2, 6)
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):  # no pool of compiler processes for one small model
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(ids), model(ids), atol=1e-12, rtol=0)
