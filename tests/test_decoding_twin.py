"""What writes in place of the model: a twin with the same forward methods, made for one call of `generate`.

It must say what the model says (1e-12), be made of the weights of the moment, leave no trace on the model, and build no table of T × T.
"""
import itertools
import pickle

import pytest
import torch
from test_model_references import build, llama
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tinylm.kv_cache import KVCache
from tinylm.layers import RMSNorm
from tinylm.sampling import decoding_twin, generate, one_row_linear, one_row_rms_norm, token_probabilities
from tinylm.transformer import ModelConfig, TransformerLM

V, MANY = 23, 60  # of every model that build() makes; words for which the matrices are laid out anew
KINDS = [dict(), dict(n_kv_heads=1), dict(position="learned"), dict(position="sinusoidal"), dict(position="none"), dict(norm="layernorm", ffn="gelu", bias=True),
         dict(bias=True, dropout=0.5), dict(backend="fused", n_kv_heads=2), dict(tie_embeddings=False, d_ff=8)]
by_kind = pytest.mark.parametrize("fields", KINDS, ids=str)


def ids_of(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_loop(model, ids, n):
    "The model's own words: no cache, no twin."
    for _ in range(n):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(dim=-1)), dim=1)
    return ids


def twin_of(model, steps=MANY):
    with torch.inference_mode():
        return decoding_twin(model, steps)


# --- the same numbers -----------------------------------------------------------------------------------------------------------------


@by_kind
@pytest.mark.parametrize("steps", [1, MANY])
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (5, 1, 3)], ids=str)
def test_the_twin_says_what_the_model_says_with_a_cache_and_pads(fields, steps, chunks):
    model, ids = build(**fields), ids_of(3, 9)
    real = torch.arange(9) >= torch.tensor([[0], [2], [8]])
    with torch.inference_mode():
        for pad_mask in (None, real):
            expected, twin, cache = model(ids, pad_mask=pad_mask), decoding_twin(model, steps), KVCache.for_model(model, 3, 9)
            torch.testing.assert_close(twin(ids, pad_mask=pad_mask), expected, atol=1e-12, rtol=0)
            pieces = [twin(piece, cache=cache, pad_mask=pad_mask if pad_mask is None else pad_mask[:, : cache.length + piece.shape[1]]) for piece in ids.split(chunks, dim=1)]
            torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [dict(), dict(bias=True, norm="layernorm", ffn="gelu")], ids=str)
def test_the_twin_of_a_narrow_model_errs_no_more_than_the_model(dtype, fields):
    "Both against the rounded weights in float64; roundings differ, their size does not."
    model, ids = build(**fields).to(dtype), ids_of(4, 16)
    with torch.inference_mode():
        logits, own = decoding_twin(model, MANY)(ids), model(ids)
        exact = model.double()(ids)
    assert logits.dtype == own.dtype == dtype and exact.std() > 0.5
    error, own_error = ((y.double() - exact).square().mean().sqrt() for y in (logits, own))
    assert error < 1.5 * own_error and (dtype != torch.float32 or error < 1e-5)


@pytest.mark.parametrize("fields", [dict(seed=0), dict(seed=2, n_kv_heads=1, tie_embeddings=False)], ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_long_text_equals_that_of_transformers(fields, use_cache):
    model, ids = build(context_length=80, **fields), ids_of(2, 7)
    theirs = llama(model).generate(ids, max_new_tokens=MANY, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, do_sample=False)
    assert generate(model, ids, MANY, use_cache=use_cache).equal(theirs)


@by_kind
def test_a_long_text_is_that_of_the_model_without_a_twin(fields):
    model, ids = build(context_length=80, **fields), ids_of(2, 7)
    expected = plain_loop(model, ids, MANY)
    for use_cache in (True, False):
        assert generate(model, ids, MANY, use_cache=use_cache).equal(expected)


def test_poison_past_the_cursor_changes_nothing_for_the_twin():
    model, ids = build(context_length=80), ids_of(2, 7)
    cache = KVCache.for_model(model, 2, 80)
    cache.update(0, *torch.full((2, 2, model.config.kv_heads, 80, model.config.head_dim), torch.nan, dtype=torch.float64))
    assert generate(model, ids, MANY, cache=cache).equal(plain_loop(model, ids, MANY))


@pytest.mark.parametrize("out, copied", [(40, True), (16, True), (8, False)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_row_linear_is_linear_in_another_layout(out, copied, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(16, out, bias=bias).double(), torch.randn(2, 3, 16, dtype=torch.float64)
    ours = one_row_linear(linear)
    torch.testing.assert_close(ours(x), F.linear(x, linear.weight, linear.bias), atol=1e-13, rtol=0)
    assert ours.weight.equal(linear.weight) and linear.weight.is_contiguous()
    assert ours.weight.stride() == ((1, out) if copied else (16, 1)) and (ours.weight.data_ptr() == linear.weight.data_ptr()) != copied


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_row_rms_norm_is_rms_norm(eps, size):
    torch.manual_seed(0)
    norm, x = RMSNorm(24, eps).double(), size * torch.randn(5, 24, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    x[0] = 0
    torch.testing.assert_close(one_row_rms_norm(norm)(x), F.rms_norm(x, (24,), norm.weight, eps), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_row_rms_norm_squares_no_half_precision(dtype):
    norm, x = RMSNorm(24), torch.linspace(-300, 300, 24).to(dtype)  # 300² overflows float16
    y = one_row_rms_norm(norm)(x)
    assert y.dtype == dtype and y.equal(norm(x)) and y.isfinite().all()


# --- never stale, never seen ----------------------------------------------------------------------------------------------------------


def train_a_step(model):
    model.train()(ids_of(2, 9)).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.3).step()
    return model.eval()


def load_others(model):
    model.load_state_dict(build(seed=5, context_length=80).state_dict())
    return model


def edit_data(model):
    for name, weight in model.named_parameters():  # no counter of autograd sees it
        weight.data.mul_(-1.5 if "proj" in name else 1.0)
    return model


def assign_others(model):
    model.load_state_dict(build(seed=6, context_length=80).state_dict(), assign=True)
    return model


CHANGES = dict(step=train_a_step, load=load_others, data=edit_data, assign=assign_others, norms=lambda model: nn.init.normal_(model.norm.weight) is None or model,
               float=lambda model: load_others(model).float(), there_and_back=lambda model: model.bfloat16().double())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_between_two_texts_is_honoured(change):
    model, ids = build(context_length=80), ids_of(2, 7)
    before = generate(model, ids, MANY)
    model = CHANGES[change](model)
    after = generate(model, ids, MANY)
    fresh = TransformerLM(model.config).to(model.embedding.weight.dtype).eval()
    fresh.load_state_dict(model.state_dict())
    assert after.equal(generate(fresh, ids, MANY)) and after.equal(plain_loop(model, ids, MANY))
    assert not after.equal(before) or change == "there_and_back"


@by_kind
def test_the_model_keeps_no_trace_of_its_twin(fields):
    model = build(context_length=80, **fields).train()
    model.blocks[0].eval()

    def trace():
        tensors = [(name, t.data_ptr(), t.stride(), t.dtype, t.requires_grad, t._version) for name, t in model.state_dict(keep_vars=True).items()]
        return tensors, [(list(vars(m)), m.training, getattr(m, "backend", None)) for m in model.modules()], len(pickle.dumps(model))

    before = trace()
    generate(model, ids_of(2, 7), MANY)
    assert trace() == before
    model(ids_of(2, 7)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_generate_calls_no_module_and_yet_the_methods_of_the_model(monkeypatch):
    model, calls, seen = build(), [], []
    hidden = TransformerLM.hidden
    monkeypatch.setattr(TransformerLM, "hidden", lambda self, *args, **options: seen.append(self) or hidden(self, *args, **options))
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: calls.append(module)):
        generate(model, ids_of(1, 3), 4)
        assert not calls and len(seen) == 4
        model(ids_of(1, 3))
        assert calls


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called_while_the_model_writes(register):
    model, calls = build(), []
    expected = generate(model, ids_of(1, 3), 4)
    handle = getattr(model.blocks[1].ffn, register)(lambda *_: calls.append(1))
    assert generate(model, ids_of(1, 3), 4).equal(expected) and len(calls) == 4
    handle.remove()
    assert generate(model, ids_of(1, 3), 4).equal(expected) and len(calls) == 4


def test_parts_of_other_kinds_run_their_own_forward():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Half(RMSNorm):
        def forward(self, x):
            return super().forward(x) / 2

    model = build(context_length=80)
    twice = Twice(model.config.d_model, model.config.d_model, bias=False).double()
    model.blocks[0].attention.out_proj = twice
    model.blocks[1].norm1, model.blocks[0].norm2 = nn.RMSNorm(model.config.d_model, 0.5).double(), Half(model.config.d_model).double()
    with torch.inference_mode():
        torch.testing.assert_close(decoding_twin(model, MANY)(ids_of(2, 9)), model(ids_of(2, 9)), atol=1e-12, rtol=0)
    assert generate(model, ids_of(2, 7), MANY).equal(plain_loop(model, ids_of(2, 7), MANY))


def test_on_an_accelerator_the_model_itself_runs():
    "The meta device stands for it."
    model = build().to("meta")
    assert decoding_twin(model, MANY) is model


# --- how much is made -----------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    "How many numbers the largest tensor had that any operation made."

    def __init__(self):
        super().__init__()
        self.numel = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] != (V,):
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("fields", [dict(), dict(position="learned"), dict(n_kv_heads=1), dict(position="none", norm="layernorm")], ids=str)
def test_a_fused_prefill_builds_no_table_of_T_by_T(fields):
    T, P = 400, 350
    model = build(context_length=T, d_model=16, n_heads=4, d_ff=16, backend="fused", **fields).float()
    ids, numbers = ids_of(1, T), 3 * 16 * T  # of queries, keys and values
    assert numbers < P * P / 6
    with torch.inference_mode():
        for cache in (None, KVCache.for_model(model, 1, T)):
            with Largest() as largest:
                model(ids, cache=cache)
            assert 0 < largest.numel < P * P / 6
        with Largest() as largest:
            generate(model, ids[:, :P], 3)
        assert largest.numel < P * P / 6
        cache.truncate(P)
        with Largest() as largest:  # T < S: a table of T × S at most, one truth value each
            model(ids[:, P:], cache=cache)
        assert largest.numel <= max(numbers, (T - P) * T)
        math = build(context_length=T, d_model=16, n_heads=4, d_ff=16, **fields).float()
        with Largest() as largest:
            math(ids)
        assert largest.numel >= T * T, "the meter must see the table where it is built"
        with Largest() as largest:
            generate(math, ids[:, :P], 3)
        assert largest.numel < P * P / 6, "in a text even a model that is not fused"


@pytest.mark.parametrize("fields, share", [(dict(), 0.75), (dict(position="learned", norm="layernorm", ffn="gelu", bias=True), 0.95)], ids=str)
def test_a_step_of_the_twin_has_fewer_operations(fields, share):
    model, calls = build(**fields), []
    with torch.inference_mode():
        for writer in (model, decoding_twin(model, MANY)):
            cache = KVCache.for_model(model, 1, 9)
            writer(ids_of(1, 6), cache=cache)
            with Largest() as counter:
                writer(ids_of(1, 1), cache=cache)
            calls.append(counter.calls)
    assert calls[1] < share * calls[0]


# --- greedy -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [dict(), dict(top_k=1), dict(top_k=3, top_p=0.2, min_p=0.9), dict(repetition_penalty=1.7), dict(repetition_penalty=0.9, top_p=0.3), dict(repetition_penalty=1.01)], ids=str)
def test_greedy_takes_the_token_that_has_all_the_probability(settings):
    from tinylm.sampling import next_token

    generator = torch.Generator().manual_seed(3)
    for dtype, ties in itertools.product((torch.float64, torch.float32, torch.bfloat16), (False, True)):
        logits = 3 + torch.randn(500, V, generator=generator) / 2
        logits, ids = (logits.round() if ties else logits).to(dtype), torch.randint(V, (500, 12), generator=generator)
        one_hot = token_probabilities(logits, ids=ids, temperature=0, **settings)
        assert next_token(logits, ids, temperature=0, **settings).equal(one_hot.argmax(dim=-1))


@pytest.mark.parametrize("dtype, copied", [(torch.float64, True), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)])
@pytest.mark.parametrize("steps", [47, 48])
def test_matrices_are_laid_out_anew_for_long_texts_in_wide_dtypes_only(dtype, copied, steps):
    "In bfloat16 the other layout is five times as slow, not faster."
    model = build().to(dtype)
    twin = twin_of(model, steps)
    for linear, light in ((model.blocks[1].ffn.gate_up_proj, list(twin.blocks)[1].ffn.gate_up_proj), (model.blocks[0].attention.qkv_proj, list(twin.blocks)[0].attention.qkv_proj)):
        assert (light.weight.data_ptr() != linear.weight.data_ptr()) == (copied and steps == 48) and light.weight.shape == linear.weight.shape
