"""One loop, many ways in: `generate` against `transformers`, against a plain loop written here, and against itself only where the promise is that two ways agree.

Cached and uncached are compared on the logits of every step first, on tokens second.
"""
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_references import build, llama
from torch import nn

import tinylm
from tinylm import sampling
from tinylm.corpus import KITE_WORDS
from tinylm.kv_cache import KVCache
from tinylm.sampling import evaluation_mode, generate, left_pad, token_probabilities
from tinylm.transformer import ModelConfig, TransformerLM, kite_model

V, LIMIT = 23, 16  # of every model that build() makes
POSITIONS = ("rope", "learned", "sinusoidal", "none")
SAMPLERS = {
    "greedy": dict(),
    "penalty": dict(repetition_penalty=1.4),
    "hot": dict(temperature=1.3),
    "all": dict(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
SAMPLER_AND_POSITION = [(name, "rope") for name in SAMPLERS] + [("all", position) for position in POSITIONS[1:]]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_ids(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=seeded(seed))


def random_prompts(*lengths, seed=0):
    return [random_ids(1, n, seed + n)[0] for n in lengths]


def dice(n, seed=10):
    return [seeded(seed + row) for row in range(n)]


def plain_loop(model, ids, n, *, generator=None, **sampler):
    "What generate must write for one row: no cache, no batch, no padding. ids (1, P)."
    limit, greedy = model.config.context_length, "temperature" not in sampler
    for _ in range(n):
        with torch.no_grad():
            logits = model(ids[:, -limit:])[:, -1]
        p = token_probabilities(logits, ids=ids, **{"temperature": 0, **sampler})
        token = p.argmax(dim=-1, keepdim=True) if greedy else torch.multinomial(p, 1, generator=generator)
        ids = torch.cat((ids, token), dim=1)
    return ids


@pytest.fixture
def passes(monkeypatch):
    "The shapes of the ids of every pass, and the logits that came of it."
    seen, real = [], TransformerLM.hidden

    def hidden(self, ids, **options):
        seen.append(tuple(ids.shape))
        return real(self, ids, **options)

    monkeypatch.setattr(TransformerLM, "hidden", hidden)
    return seen


@pytest.fixture
def all_logits(monkeypatch):
    "The logits of every step."
    seen, real = [], sampling.next_logits

    def next_logits(*arguments):
        seen.append(real(*arguments).clone())
        return seen[-1]

    monkeypatch.setattr(sampling, "next_logits", next_logits)
    return seen


# --- another library ----------------------------------------------------------------------------------------------------------------------


def theirs(model, ids, n, **options):
    reference = llama(model)
    options = {**dict(pad_token_id=0, eos_token_id=None, do_sample=False), **options}
    return reference.generate(ids, max_new_tokens=n, attention_mask=options.pop("attention_mask", torch.ones_like(ids)), **options)


@pytest.mark.parametrize("fields", [dict(seed=0), dict(seed=1, n_kv_heads=2), dict(seed=2, n_kv_heads=1, tie_embeddings=False)], ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_equal_those_of_transformers(fields, use_cache):
    model, ids = build(context_length=40, **fields), random_ids(3, 7)
    ours = generate(model, ids, 25, use_cache=use_cache)
    assert ours.equal(theirs(model, ids, 25)) and len(set(ours[:, 7:].flatten().tolist())) > 3


def test_greedy_tokens_with_a_penalty_equal_those_of_transformers():
    model, ids = build(context_length=40), random_ids(3, 7)
    ours = generate(model, ids, 25, repetition_penalty=1.5)
    assert ours.equal(theirs(model, ids, 25, repetition_penalty=1.5)) and not ours.equal(generate(model, ids, 25))


def test_rows_that_stop_equal_those_of_transformers():
    model, ids = build(context_length=40), random_ids(4, 7)
    free = generate(model, ids, 25)[:, 7:]
    stop = next(token for token in range(V) if 2 <= (free == token).any(dim=1).sum() and len({row.tolist().index(token) for row in free if token in row}) > 1)
    ours = generate(model, ids, 25, stop_ids=[stop], pad_id=0)
    assert ours.equal(theirs(model, ids, 25, eos_token_id=stop))


def test_unequal_prompts_equal_those_of_transformers():
    model, prompts = build(context_length=40), random_prompts(7, 3, 1)
    ids = torch.stack([torch.cat((torch.zeros(7 - len(prompt), dtype=torch.long), prompt)) for prompt in prompts])
    mask = torch.tensor([[0] * (7 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    expected = theirs(model, ids, 20, attention_mask=mask)
    for row, prompt, ours in zip(expected, prompts, generate(model, prompts, 20)):
        assert ours.equal(row[7 - len(prompt) :])


# --- a plain loop -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, position", SAMPLER_AND_POSITION)
def test_one_row_equals_the_plain_loop_also_past_the_limit(name, position):
    model, ids, sampler = build(position=position), random_ids(1, 5), SAMPLERS[name]
    expected = plain_loop(model, ids, 18, generator=seeded(10), **sampler)
    for use_cache in (True, False):
        assert generate(model, ids, 18, use_cache=use_cache, generator=seeded(10), overflow="slide", **sampler).equal(expected)


@pytest.mark.parametrize("name, position", SAMPLER_AND_POSITION)
def test_each_row_of_a_list_is_its_own_single_run(name, position):
    model, prompts, sampler = build(position=position, n_kv_heads=2), random_prompts(9, 4, 1), SAMPLERS[name]
    expected = [plain_loop(model, prompt[None], 16, generator=g, **sampler)[0] for prompt, g in zip(prompts, dice(3))]
    for use_cache in (True, False):
        together = generate(model, prompts, 16, use_cache=use_cache, generator=dice(3), overflow="slide", **sampler)
        assert all(row.equal(right) for row, right in zip(together, expected)) and len(together) == 3


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 18), min_size=1, max_size=4), st.integers(0, 14), st.integers(0, 99), st.booleans())
def test_any_list_of_prompts_equals_the_plain_loop(lengths, n, seed, use_cache):
    model, prompts = build(position="learned"), random_prompts(*lengths, seed=seed)
    together = generate(model, prompts, n, temperature=1.0, generator=dice(len(lengths), seed), use_cache=use_cache, overflow="slide")
    for row, prompt, generator in zip(together, prompts, dice(len(lengths), seed)):
        assert row.equal(plain_loop(model, prompt[None], n, generator=generator, temperature=1.0)[0])


def test_rows_of_a_tensor_may_share_a_generator():
    model, ids = build(), random_ids(3, 4)
    generator, expected = seeded(5), ids
    for _ in range(8):
        with torch.no_grad():
            expected = torch.cat((expected, torch.multinomial(model(expected)[:, -1].softmax(dim=-1), 1, generator=generator)), dim=1)
    assert generate(model, ids, 8, temperature=1.0, generator=seeded(5)).equal(expected)
    torch.manual_seed(5)
    assert generate(model, ids, 8, temperature=1.0).equal(expected), "without a generator, torch's own is used"


def test_the_kite_model_goes_round_in_a_circle():
    story = torch.tensor([[KITE_WORDS.index(word) for word in ". red kite blue boat red".split()]])
    words = [KITE_WORDS[i] for i in generate(kite_model(), story, 40)[0].tolist()]
    assert words == [".", *"red kite blue boat".split() * 11, "red"]


# --- cached and uncached --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [dict(position=p, n_kv_heads=k) for p, k in itertools.product(POSITIONS, (None, 1))], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_cached_logits_equal_uncached_ones_at_every_step(fields, kind, all_logits):
    model = build(**fields)
    prompts = random_ids(3, 6) if kind == "tensor" else random_prompts(6, 2, 5)
    texts = [generate(model, prompts, 14, temperature=1.0, generator=dice(3), use_cache=use, overflow="slide") for use in (True, False)]
    cached, uncached = torch.stack(all_logits).chunk(2)  # (14, 3, V) each
    assert cached.std() > 0.5
    torch.testing.assert_close(cached, uncached, atol=1e-12, rtol=0)
    assert all(a.equal(b) for a, b in zip(*texts))


def test_cached_logits_equal_uncached_ones_in_float32(all_logits):
    model = build().float()
    for use in (True, False):
        generate(model, random_prompts(6, 2, 5), 10, use_cache=use)
    cached, uncached = torch.stack(all_logits).chunk(2)
    torch.testing.assert_close(cached / uncached.std(), uncached / uncached.std(), atol=1e-5, rtol=1e-5)  # of the size of a logit, here about 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_write_too(dtype):
    model = build().to(dtype)
    ids = generate(model, random_ids(2, 4), 6, temperature=0.8, top_p=0.9, generator=seeded(0))
    assert ids.shape == (2, 10) and ids.dtype == torch.int64


def test_a_cached_step_reads_one_token_and_an_uncached_one_all(passes):
    model, ids = build(), random_ids(2, 5)
    generate(model, ids, 4)
    assert passes == [(2, 5), (2, 1), (2, 1), (2, 1)]
    passes.clear()
    generate(model, ids, 4, use_cache=False)
    assert passes == [(2, 5), (2, 6), (2, 7), (2, 8)]


def test_past_the_limit_each_step_is_a_fresh_pass_over_the_last_tokens(passes):
    model = build()
    generate(model, random_ids(2, 14), 5, overflow="slide")
    assert passes == [(2, 14), (2, 1), (2, 1), (2, LIMIT), (2, LIMIT)]
    passes.clear()
    generate(model, random_ids(1, 20), 2, overflow="slide")  # the prompt itself is too long
    assert passes == [(1, LIMIT)] * 2


def test_the_head_is_applied_to_the_last_position_only():
    model, shapes = build(), []
    model.head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    generate(model, random_ids(3, 6), 2)
    assert shapes == [(3, 24), (3, 24)]


def test_a_left_padded_row_has_the_logits_of_its_unpadded_run(all_logits):
    # With plain positions for the whole batch a row of learned positions is off by whole logits.
    model, prompts = build(position="learned"), random_prompts(8, 3, 1)
    generate(model, prompts, 8)
    batch = torch.stack(all_logits)
    for row, prompt in enumerate(prompts):
        all_logits.clear()
        generate(model, prompt[None], 8)
        torch.testing.assert_close(batch[:, row], torch.cat(all_logits), atol=1e-12, rtol=0)


# --- a cache that is given ------------------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_in_its_cache(passes):
    model, cache = build(), None
    cache = KVCache.for_model(model, 2, LIMIT)
    said = generate(model, random_ids(2, 4), 3, cache=cache)
    assert cache.length == 6
    said = torch.cat((said, random_ids(2, 2, seed=9)), dim=1)
    passes.clear()
    answer = generate(model, said, 4, cache=cache)
    assert passes == [(2, 3), (2, 1), (2, 1), (2, 1)]
    assert answer.equal(torch.cat([plain_loop(model, row[None], 4) for row in said]))


def test_the_same_prompt_again_must_rewind_its_cache():
    model, ids = build(), random_ids(1, 6)
    cache = KVCache.for_model(model, 1, LIMIT)
    first = generate(model, ids, 5, cache=cache)
    for length in (10, 6):
        cache.truncate(length)
        with pytest.raises(ValueError, match=f"cache holds {length}.*prompt has 6.*truncate"):
            generate(model, ids, 5, cache=cache)
    for length in (5, 2, 0):
        cache.truncate(length)
        assert generate(model, ids, 5, cache=cache).equal(first)


def test_a_given_cache_needs_room_for_all_that_is_read():
    model, ids = build(), random_ids(1, 6)
    assert generate(model, ids, 5, cache=KVCache.for_model(model, 1, 10)).equal(generate(model, ids, 5))  # the last token is not read
    with pytest.raises(ValueError, match="max_length=9.*needs 10"):
        generate(model, ids, 5, cache=KVCache.for_model(model, 1, 9))
    with pytest.raises(ValueError, match="max_length=15.*needs 16"):
        generate(model, ids, 30, overflow="slide", cache=KVCache.for_model(model, 1, 15))
    full = KVCache.for_model(model, 1, LIMIT)
    assert generate(model, ids, 30, overflow="slide", cache=full).equal(plain_loop(model, ids, 30)) and full.length == LIMIT


def test_a_given_cache_may_start_a_list():
    model, prompts = build(), random_prompts(5, 2)
    cache = KVCache.for_model(model, 2, LIMIT)
    first = generate(model, prompts, 4, cache=cache)
    assert all(a.equal(b) for a, b in zip(first, generate(model, prompts, 4))) and cache.length == 8
    with pytest.raises(ValueError, match="cache holds 8.*list"):
        generate(model, first, 4, cache=cache)


# --- stopping -------------------------------------------------------------------------------------------------------------------------------


def scripted(monkeypatch, *rows):
    "generate chooses these tokens instead of the model's."
    script, step = torch.tensor(rows), itertools.count()
    monkeypatch.setattr(sampling, "next_token", lambda logits, ids, **_: script[:, next(step)])


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_stop_each_at_its_own_time_and_the_batch_with_the_last(monkeypatch, passes, use_cache):
    # "All rows are at the stop id in this step" is never true here.
    scripted(monkeypatch, [7, 2, 9, 9], [5, 6, 2, 9])
    ids = generate(build(), random_ids(2, 3), 4, stop_ids=[2], pad_id=0, use_cache=use_cache)
    assert ids[:, 3:].tolist() == [[7, 2, 0], [5, 6, 2]] and len(passes) == 3


def test_rows_that_stop_are_cut_after_their_stop_token_in_a_list(monkeypatch):
    scripted(monkeypatch, [7, 2, 9, 9], [5, 6, 3, 9], [1, 1, 1, 1])
    prompts = random_prompts(3, 1, 2)
    new = [row[len(prompt) :].tolist() for row, prompt in zip(generate(build(), prompts, 4, stop_ids=(2, 3)), prompts)]
    assert new == [[7, 2], [5, 6, 3], [1, 1, 1, 1]]


@pytest.mark.parametrize("position", POSITIONS)
def test_a_row_is_not_moved_by_neighbours_that_have_stopped(position):
    model, prompts = build(position=position), random_prompts(6, 3, 5, 1)
    options = dict(temperature=1.5, stop_ids=range(7), overflow="slide")
    together = generate(model, prompts, 20, generator=dice(4), pad_id=3, **options)
    lengths = []
    for row, prompt, generator in zip(together, prompts, dice(4)):
        assert row.equal(generate(model, prompt[None], 20, generator=generator, **options)[0])
        lengths.append(len(row) - len(prompt))
    assert len(set(lengths)) > 1, "the rows must stop at different times"


def test_stop_and_pad_ids_inside_the_prompt_do_not_stop_it():
    model = build()
    ids = torch.tensor([[2, 0, 2, 2], [0, 2, 0, 0]])
    free = generate(model, ids, 6)
    stop = next(token for token in range(V) if token not in free[:, 4:])
    ids = torch.where(ids == 2, stop, ids)
    free = generate(model, ids, 6)
    unused = [token for token in range(V) if token not in free[:, 4:]]
    assert generate(model, ids, 6, stop_ids=unused, pad_id=0).equal(free) and free.shape == (2, 10)
    assert all(row.equal(text) for row, text in zip(free, generate(model, list(ids), 6, stop_ids=unused)))


def test_stop_ids_come_in_any_form():
    model, ids = build(), random_ids(1, 4)
    free = generate(model, ids, 8)[0, 4:].tolist()
    stop = free[3]
    expected = ids[0].tolist() + free[: free.index(stop) + 1]
    forms = ([stop], (stop,), {stop}, frozenset([stop]), iter([stop]), (token for token in [stop]), range(stop, stop + 1), torch.tensor([stop]),
             torch.tensor(stop), torch.tensor([stop], dtype=torch.int32), [torch.tensor(stop)], {stop: "end"}, torch.tensor([[stop]]))
    for form in forms:
        assert generate(model, ids, 8, stop_ids=form)[0].tolist() == expected
    for nothing in ((), [], set(), torch.tensor([], dtype=torch.long)):
        assert generate(model, ids, 8, stop_ids=nothing)[0].tolist() == ids[0].tolist() + free


def test_a_single_row_needs_no_pad_id_and_no_new_tokens_are_none(passes):
    model, ids = build(), random_ids(2, 4)
    assert generate(model, ids[:1], 3, stop_ids=range(V)).shape == (1, 5)
    passes.clear()
    for use_cache in (True, False):
        same = generate(model, ids, 0, use_cache=use_cache)
        assert same.equal(ids) and same.data_ptr() != ids.data_ptr()
        assert [text.tolist() for text in generate(model, [ids[0], ids[1, :1]], 0, use_cache=use_cache)] == [ids[0].tolist(), ids[1, :1].tolist()]
    assert passes == []


def test_on_token_hears_every_step(monkeypatch):
    model, heard = build(), []
    ids = generate(model, random_ids(2, 4), 5, on_token=lambda token: heard.append(token.tolist()))
    assert heard == ids[:, 4:].T.tolist()
    heard.clear()
    scripted(monkeypatch, [7, 2, 9, 9], [5, 6, 2, 9])
    generate(model, random_ids(2, 3), 4, stop_ids=[2], pad_id=1, on_token=lambda token: heard.append(token.tolist()))
    assert heard == [[7, 5], [2, 6], [1, 2]]


# --- what is left behind --------------------------------------------------------------------------------------------------------------------


def modes(model):
    return [module.training for module in model.modules()]


def with_dropout():
    return build(dropout=0.5)


@pytest.mark.parametrize("training", [True, False])
def test_no_dropout_while_writing_and_the_mode_comes_back(training):
    model = with_dropout().train(training)
    model.blocks[1].train(not training)  # a part that differs from the rest
    before = modes(model)
    texts = [generate(model, random_ids(2, 4), 8) for _ in range(3)]
    assert modes(model) == before
    assert texts[0].equal(texts[1]) and texts[0].equal(texts[2]) and texts[0].equal(generate(model.eval(), random_ids(2, 4), 8))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_mode_comes_back_after_an_exception(training, error):
    model = with_dropout().train(training)
    model.norm.train(not training)
    before = modes(model)

    def stop(token):
        assert not any(modes(model))
        raise error

    with pytest.raises(error):
        generate(model, random_ids(1, 4), 8, on_token=stop)
    assert modes(model) == before
    with pytest.raises(ValueError):
        generate(model, torch.tensor([[V]]), 8)
    assert modes(model) == before
    with pytest.raises(error), evaluation_mode(model):
        raise error
    assert modes(model) == before


def test_the_result_can_be_trained_on():
    model = build()
    for ids in (generate(model, random_ids(2, 4), 5), torch.stack(generate(model, random_prompts(4, 4), 5)), generate(model, random_ids(2, 4), 0)):
        assert not ids.is_inference() and not ids.requires_grad
        model(ids).sum().backward()
        ids[0, 0] = 1  # and changed


def test_training_goes_on_after_writing():
    model = with_dropout().train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    generate(model, random_ids(1, 4), 5)
    assert all(weight.equal(before[name]) and weight.requires_grad and weight.grad is None for name, weight in model.named_parameters())
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@by_sampler
def test_greedy_uses_no_random_number_and_the_rest_only_its_own(sampler):
    model, ids, generator = build(), random_ids(2, 4), seeded(0)
    own, common = generator.get_state(), torch.get_rng_state()
    generate(model, ids, 5, generator=generator, **sampler)
    assert generator.get_state().equal(own) == ("temperature" not in sampler) and torch.get_rng_state().equal(common)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_prompts_keep_their_dtype_and_are_not_changed(dtype):
    model, ids = build(), random_ids(2, 4).to(dtype)
    before = ids.clone()
    text = generate(model, ids, 5, repetition_penalty=1.2, stop_ids=[0], pad_id=0)
    assert text.dtype == dtype and text.shape[1] > 4 and ids.equal(before)
    assert text.long().equal(generate(model, ids.long(), 5, repetition_penalty=1.2, stop_ids=[0], pad_id=0))
    assert all(row.dtype == dtype for row in generate(model, list(ids), 5))


# --- refused before the first pass ----------------------------------------------------------------------------------------------------------


def test_the_context_is_filled_to_its_last_place_and_no_further(passes):
    model = build()
    assert generate(model, random_ids(1, 6), 10).shape == (1, LIMIT)
    passes.clear()
    for prompts in (random_ids(1, 6), random_prompts(2, 6)):
        with pytest.raises(ValueError, match="max_new_tokens=11.*prompt of 6.*context_length=16"):
            generate(model, prompts, 11)
    with pytest.raises(ValueError, match="context_length=16"):
        generate(model, random_ids(1, 17), 0)
    assert passes == []


ROW = [torch.tensor([1, 2])]
REFUSED = {
    "prompt of floats": (dict(ids=torch.zeros(1, 3)), TypeError, "float32"),
    "prompt of bools": (dict(ids=torch.ones(1, 3, dtype=torch.bool)), TypeError, "bool"),
    "list of numbers": (dict(ids=[1, 2, 3]), TypeError, "int"),
    "list of lists": (dict(ids=[[1, 2], [3]]), TypeError, "list"),
    "text": (dict(ids="red kite"), TypeError, "str"),
    "no prompt": (dict(ids=None), TypeError, "NoneType"),
    "one-dimensional tensor": (dict(ids=torch.tensor([1, 2])), ValueError, "(2,)"),
    "list of matrices": (dict(ids=[torch.tensor([[1, 2]])]), ValueError, "(1, 2)"),
    "empty list": (dict(ids=[]), ValueError, "[]"),
    "empty row": (dict(ids=[torch.tensor([1]), torch.tensor([], dtype=torch.long)]), ValueError, "(0,)"),
    "empty tensor": (dict(ids=torch.zeros(2, 0, dtype=torch.long)), ValueError, "(2, 0)"),
    "negative length": (dict(max_new_tokens=-1), ValueError, "max_new_tokens=-1"),
    "fractional length": (dict(max_new_tokens=2.0), TypeError, "max_new_tokens=2.0"),
    "length as bool": (dict(max_new_tokens=True), TypeError, "max_new_tokens=True"),
    "overflow": (dict(overflow="wrap"), ValueError, "overflow='wrap'"),
    "stop id outside": (dict(stop_ids=[V]), ValueError, f"stop_ids holds {V}"),
    "stop id negative": (dict(stop_ids=[-1]), ValueError, "stop_ids holds -1"),
    "stop id alone": (dict(stop_ids=3), TypeError, "stop_ids=3"),
    "stop id None": (dict(stop_ids=None), TypeError, "stop_ids=None"),
    "stop id text": (dict(stop_ids=["end"]), TypeError, "stop_ids=['end']"),
    "stop id float": (dict(stop_ids=torch.tensor([1.0])), TypeError, "stop_ids"),
    "pad id missing": (dict(stop_ids=[3]), ValueError, "pad_id=None"),
    "pad id outside": (dict(stop_ids=[3], pad_id=V), ValueError, f"pad_id holds {V}"),
    "pad id float": (dict(stop_ids=[3], pad_id=0.0), TypeError, "pad_id=[0.0]"),
    "generators too few": (dict(generator=[seeded(0)]), ValueError, "generator holds 1"),
    "generator twice": (dict(generator=[seeded(0)] * 2), ValueError, "generator holds one generator twice"),
    "no generators": (dict(generator=[None, None]), TypeError, "generator must be a torch.Generator, a list of them or None; got NoneType"),
    "mask of stops": (dict(stop_ids=torch.tensor([False, True]), pad_id=0), TypeError, "stop_ids=[False, True] must hold token ids"),
    "generator a seed": (dict(generator=7), TypeError, "generator must be a torch.Generator"),
    "generators seeds": (dict(generator=[7, 8]), TypeError, "generator must be a torch.Generator"),
    "cache unwanted": (dict(use_cache=False, cache=KVCache(3, 2, 4, LIMIT, 6)), ValueError, "use_cache=False"),
    "cache a bool": (dict(cache=True), TypeError, "cache=True"),
    "temperature": (dict(temperature=-1.0), ValueError, "temperature=-1.0"),
    "temperature text": (dict(temperature="hot"), TypeError, "temperature='hot'"),
    "top_k": (dict(top_k=0), ValueError, "top_k=0"),
    "top_p": (dict(temperature=1.0, top_p=0.0), ValueError, "top_p=0.0"),
    "min_p": (dict(min_p=2), ValueError, "min_p=2"),
    "penalty": (dict(repetition_penalty=0.0), ValueError, "repetition_penalty=0.0"),
}


@pytest.mark.parametrize("options, error, said", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused_before_the_first_pass(options, error, said, passes):
    options = {**dict(ids=torch.tensor([[1, 2], [3, 4]]), max_new_tokens=3), **options}
    with pytest.raises(error) as caught:
        generate(build(), **options)
    assert said in str(caught.value) and passes == []


def test_an_id_outside_the_vocabulary_or_a_cache_of_another_shape_is_refused_by_the_model():
    model = build()
    with pytest.raises(ValueError, match="vocabulary"):
        generate(model, torch.tensor([[1, V]]), 3)
    with pytest.raises(ValueError, match="rows"):
        generate(model, random_ids(2, 3), 3, cache=KVCache.for_model(model, 3, LIMIT))


class Broken(nn.Module):
    "Says something that is no distribution at its third step."

    def __init__(self, bad):
        super().__init__()
        self.config, self.head, self.bad, self.steps = ModelConfig(vocab_size=4, d_model=4, n_layers=1, n_heads=1), nn.Identity(), bad, 0
        self.device = torch.device("cpu")

    def hidden(self, ids, **_):
        self.steps += 1
        return torch.full((*ids.shape, 4), self.bad if self.steps == 3 else 0.0)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_model_that_breaks_down_is_an_error_and_not_a_text(bad, temperature):
    with pytest.raises(ValueError, match="logits"):
        generate(Broken(bad), torch.tensor([[1]]), 9, temperature=temperature, use_cache=False, generator=seeded(0))


def test_padding_adds_no_id_that_the_row_has_not_said():
    ids, real = left_pad([torch.tensor([5, 6, 7, 8]), torch.tensor([9]), torch.tensor([3, 4])])
    assert ids.tolist() == [[5, 6, 7, 8], [9, 9, 9, 9], [3, 3, 3, 4]]
    assert real.tolist() == [[True] * 4, [False] * 3 + [True], [False] * 2 + [True] * 2]


def test_generate_is_a_name_of_the_package():
    assert tinylm.generate is generate and "generate" in tinylm.__all__ and "generate" in dir(tinylm)
