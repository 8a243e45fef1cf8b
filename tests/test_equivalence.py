"""The gate: with the cache and without it a model computes the same logits, and so writes the same text. Every kind, every cut, every sampler.

Logits are compared first and tokens second, because a cache that lies can leave ten words as they are. What is compared with is the model that
reads everything at once; that this is right is shown against other libraries in test_model_references.py.
"""
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.kv_cache import KVCache, cache_error, logits_in_pieces
from tinylm.sampling import generate
from tinylm.transformer import ModelConfig, TransformerLM

V, CONTEXT = 13, 16
POSITIONS = ("rope", "learned", "sinusoidal", "none")
ATTENTION = {"multi-head": 4, "grouped-query": 2, "multi-query": 1}  # key/value heads of four
NORMS = ("rmsnorm", "layernorm")
SAMPLERS = {
    "greedy": dict(),
    "temperature": dict(temperature=1.3),
    "top-k": dict(temperature=1.0, top_k=4),
    "top-p": dict(temperature=1.0, top_p=0.8),
    "min-p": dict(temperature=1.0, min_p=0.1),
    "penalty": dict(temperature=0.8, repetition_penalty=1.4),
}
BATCHES = (1, 3)
LENGTHS = ((1, 4), (2, 3), (3, 2), (4, 1), (5, 3), (8, 2))  # prompt, new tokens


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def build(seed=0, dtype=torch.float64, scale=0.4, **fields):
    "A model in eval mode whose every parameter is random and large enough to matter."
    fields = dict(vocab_size=V, context_length=CONTEXT, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24) | fields
    generator = seeded(seed)
    model = TransformerLM(ModelConfig(**fields)).to(dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else scale * noise)
    return model


def random_ids(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=seeded(seed))


def assert_same(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def in_pieces(model, ids, sizes, cache=None, pad_mask=None):
    "The logits of ids, fed piece by piece through a cache."
    cache, parts = KVCache.for_model(model, len(ids), CONTEXT) if cache is None else cache, []
    for piece in ids.split(list(sizes), dim=1):
        seen = None if pad_mask is None else pad_mask[:, : cache.length + piece.shape[1]]
        parts.append(model(piece, cache=cache, pad_mask=seen))
    return torch.cat(parts, dim=1)


def poisoned(model, batch, number=math.nan):
    "An empty cache whose every slot holds NaN."
    cache, config = KVCache.for_model(model, batch, CONTEXT), model.config
    trash = torch.full((batch, config.kv_heads, CONTEXT, config.head_dim), number, dtype=cache.dtype)
    for layer in range(config.n_layers):
        cache.update(layer, trash, trash)
    return cache


# --- the grid ---------------------------------------------------------------------------------------------------------------------------

GRID = list(itertools.product(ATTENTION, POSITIONS, NORMS))
INSIDE = list(itertools.product(BATCHES, LENGTHS, SAMPLERS))


def test_the_grid_has_more_than_1500_combinations():
    assert len(GRID) == 24 and len(INSIDE) == 72 and len(GRID) * len(INSIDE) == 1728
    assert {prompt for prompt, _ in LENGTHS} >= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("attention, position, norm", GRID)
def test_cached_equals_uncached(attention, position, norm):
    "72 ways to write, each cached and not: the logits of every step, then the tokens, then the state of the generator."
    place = GRID.index((attention, position, norm))
    model = build(seed=place, n_kv_heads=ATTENTION[attention], position=position, norm=norm, bias=norm == "layernorm",
                  ffn=("swiglu", "gelu")[place % 2], backend=("math", "fused")[place // 2 % 2], n_layers=1 + place % 3)
    seen = set()
    for seed, (batch, (prompt, new), sampler) in enumerate(INSIDE):
        ids, dice = random_ids(batch, prompt, seed), (seeded(seed), seeded(seed))
        uncached = generate(model, ids, new, use_cache=False, generator=dice[0], **SAMPLERS[sampler])
        assert uncached.shape == (batch, prompt + new)
        logits = in_pieces(model, uncached[:, :-1], [prompt] + [1] * (new - 1), KVCache.for_model(model, batch, prompt + new - 1))
        assert_same(logits, model(uncached[:, :-1]))
        cached = generate(model, ids, new, generator=dice[1], **SAMPLERS[sampler])
        assert cached.equal(uncached), (batch, prompt, new, sampler)
        assert dice[0].get_state().equal(dice[1].get_state())
        seen.update(uncached[:, prompt:].flatten().tolist())
    assert len(seen) > V // 2, "the texts are not all the same word"


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_every_depth_and_dtype_within_its_digits(n_layers, position, dtype, atol):
    model, ids = build(dtype=dtype, scale=0.25, n_layers=n_layers, position=position), random_ids(2, 12)
    expected = model(ids)
    assert expected.std() > 0.2
    for sizes in ([12], [1] * 12, [11, 1], [1, 11], [4, 3, 5], [6] + [1] * 6):
        assert_same(in_pieces(model, ids, sizes), expected, atol)


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_in_bfloat16_the_cache_adds_no_more_than_rounding(n_layers, position, attention):
    "The model in bfloat16 is itself some way from the same weights in float64. The cached pass is no further from there than twice that."
    model = build(dtype=torch.bfloat16, scale=0.25, n_layers=n_layers, position=position, n_kv_heads=ATTENTION[attention])
    ids = random_ids(3, 12)
    plain = model(ids).double()
    cached = in_pieces(model, ids, [5] + [1] * 7)
    assert cached.dtype == torch.bfloat16
    exact = model.double()(ids)
    rounding = (plain - exact).abs().max()
    assert 1e-4 < rounding < 0.1
    assert (cached.double() - exact).abs().max() < 2 * rounding


# --- any program of operations ----------------------------------------------------------------------------------------------------------

OPERATIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 5)),
    st.tuples(st.just("keep"), st.integers(0, CONTEXT)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("fail"), st.integers(1, 3)),
    st.tuples(st.just("reset"), st.none()),
)
MODELS = {}


def model_for(**fields):
    kind = tuple(sorted(fields.items()))
    if kind not in MODELS:
        MODELS[kind] = build(**fields)
    return MODELS[kind]


class Interrupted(Exception):
    pass


def fail(model, ids, cache):
    "A pass that breaks down in its last block, after every layer before has written."
    def interrupt(*_):
        raise Interrupted

    hook = model.blocks[-1].register_forward_hook(interrupt)
    with pytest.raises(Interrupted):
        model(ids, cache=cache)
    hook.remove()


@settings(max_examples=120, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=10),
    position=st.sampled_from(POSITIONS),
    n_kv_heads=st.sampled_from((4, 2, 1)),
    n_layers=st.integers(1, 3),
    norm=st.sampled_from(NORMS),
    seed=st.integers(0, 99),
)
def test_any_program_of_operations_equals_reading_the_text_that_remains(operations, position, n_kv_heads, n_layers, norm, seed):
    "Read, go back, rearrange, break down, forget, in any order. Beside the cache goes the text it should stand for, as plain ids."
    model = model_for(position=position, n_kv_heads=n_kv_heads, n_layers=n_layers, norm=norm)
    cache, said = poisoned(model, 3), torch.zeros(3, 0, dtype=torch.long)
    for step, (name, argument) in enumerate(operations + [("read", 1)]):
        if name == "read":
            fresh = random_ids(3, argument, seed + 100 * step)
            if said.shape[1] + argument > CONTEXT:
                with pytest.raises(ValueError, match="context_length"):
                    model(fresh, cache=cache)
                continue
            said = torch.cat((said, fresh), dim=1)
            assert_same(model(fresh, cache=cache), model(said)[:, -argument:])
        elif name == "keep":
            n = min(argument, said.shape[1])
            cache.truncate(n)
            said = said[:, :n]
        elif name == "reorder":
            cache.reorder(torch.tensor(argument))
            said = said[argument]
        elif name == "fail" and said.shape[1] + argument <= CONTEXT:
            fail(model, random_ids(3, argument, seed), cache)
        elif name == "reset":
            cache.reset()
            said = said[:, :0]
        assert cache.length == said.shape[1]


@settings(max_examples=80, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) <= CONTEXT),
    pads=st.lists(st.integers(0, CONTEXT - 1), min_size=1, max_size=4),
    position=st.sampled_from(POSITIONS),
    backend=st.sampled_from(("math", "fused")),
    seed=st.integers(0, 99),
)
def test_any_cut_of_any_padded_batch_equals_each_row_alone(sizes, pads, position, backend, seed):
    "Logits of every real token, for rows that start at different slots, also when a whole piece of a row is padding."
    n, model = sum(sizes), model_for(position=position, backend=backend)
    pads = [min(pad, n - 1) for pad in pads]
    ids = random_ids(len(pads), n, seed)
    pad_mask = torch.arange(n) >= torch.tensor(pads)[:, None]
    logits = in_pieces(model, ids, sizes, poisoned(model, len(pads)), pad_mask)
    for row, text, pad in zip(logits, ids, pads):
        assert_same(row[pad:], model(text[None, pad:])[0])


# --- poison -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention, position, norm", GRID)
def test_nan_past_the_cursor_changes_no_bit(attention, position, norm):
    model = build(n_kv_heads=ATTENTION[attention], position=position, norm=norm, n_layers=3)
    ids, sizes = random_ids(2, 11), (4, 1, 1, 3, 1, 1)
    clean = in_pieces(model, ids, sizes)
    assert torch.equal(in_pieces(model, ids, sizes, poisoned(model, 2)), clean)
    assert_same(clean, model(ids))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -1e30])
def test_a_text_written_with_a_poisoned_cache_is_the_same(sampler, number):
    model, ids = build(), random_ids(2, 4)
    dice = seeded(3), seeded(3)
    expected = generate(model, ids, 9, use_cache=False, generator=dice[0], **SAMPLERS[sampler])
    assert generate(model, ids, 9, cache=poisoned(model, 2, number), generator=dice[1], **SAMPLERS[sampler]).equal(expected)


# --- many rows, and the end of the context ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention, position, norm", GRID)
@pytest.mark.parametrize("use_cache", [True, False])
def test_unequal_prompts_that_stop_early_equal_each_row_alone(attention, position, norm, use_cache):
    "Each row has a generator of its own, and ends at the first of four stop words."
    model = build(n_kv_heads=ATTENTION[attention], position=position, norm=norm)
    prompts = [random_ids(1, n, seed=n)[0] for n in (6, 1, 3, 8)]
    options = dict(temperature=2.0, stop_ids=(2, 5, 7, 11), overflow="slide")
    together = generate(model, prompts, 12, use_cache=use_cache, generator=[seeded(n) for n in range(4)], **options)
    for n, (row, prompt) in enumerate(zip(together, prompts)):
        assert row.equal(generate(model, prompt[None], 12, use_cache=not use_cache, generator=seeded(n), **options)[0])
    assert len({len(row) - len(prompt) for row, prompt in zip(together, prompts)}) > 1


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_up_to_the_limit_and_past_it(attention, position):
    "error: refused exactly when prompt + new > context. slide: cached and uncached agree wherever the limit falls."
    model = build(n_kv_heads=ATTENTION[attention], position=position)
    for prompt, new in itertools.product((1, 10, CONTEXT - 1, CONTEXT, CONTEXT + 3), (1, 6, 7)):
        ids = random_ids(2, prompt, seed=new)
        texts = [generate(model, ids, new, use_cache=use, temperature=1.0, generator=seeded(1), overflow="slide") for use in (True, False)]
        assert texts[0].equal(texts[1]) and texts[0].shape == (2, prompt + new)
        for use in (True, False):
            if prompt + new > CONTEXT:
                with pytest.raises(ValueError, match=f"context_length={CONTEXT}"):
                    generate(model, ids, new, use_cache=use)
            else:
                assert generate(model, ids, new, use_cache=use, temperature=1.0, generator=seeded(1)).equal(texts[0])


# --- the exported gate ------------------------------------------------------------------------------------------------------------------


class StartsOver(KVCache):
    length = property(lambda self: 0)


class CountsTwice(KVCache):
    length = property(lambda self: 2 * self._length)


class SeesTheFirst(KVCache):
    def update(self, layer, k, v):
        return tuple(held[:, :, : k.shape[2]] for held in super().update(layer, k, v))


class OneSlotLate(KVCache):
    length = property(lambda self: self._length + (self._length > 0))


class HandsOutEverything(KVCache):
    def update(self, layer, k, v):
        super().update(layer, k, v)
        return self._keys[layer], self._values[layer]


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize("liar", [StartsOver, CountsTwice, SeesTheFirst, OneSlotLate, HandsOutEverything])
def test_the_gate_sees_every_cache_that_lies(liar, position):
    model, ids = build(position=position, context_length=40), random_ids(2, 8)
    assert cache_error(model, ids, (5, 1, 1, 1)) < 1e-12
    assert cache_error(model, ids, (5, 1, 1, 1), liar.for_model(model, 2, 12)) > 1e-2


def test_a_lie_about_places_is_no_lie_to_a_model_without_places():
    "Why every position kind is in the grid: without positions these two lies are none, and a single whole pass tells of none at all."
    model, ids = build(position="none", context_length=40), random_ids(2, 8)
    for liar in (StartsOver, CountsTwice):
        assert cache_error(model, ids, (5, 1, 1, 1), liar.for_model(model, 2, 12)) < 1e-12
    for liar in (StartsOver, CountsTwice, SeesTheFirst, OneSlotLate):
        assert cache_error(build(), ids, (8,), liar.for_model(build(), 2, 12)) < 1e-12


def test_the_gate_reports_the_largest_difference_of_any_logit():
    "One logit of one word of one row is moved by 0.125, in the cached passes only."
    model, ids = build(), random_ids(3, 6)

    def nudge(_, args, kwargs, logits):
        if kwargs.get("cache") is not None and kwargs["cache"].length == 5:
            logits[1, 0, 4] += 0.125
        return logits

    model.register_forward_hook(nudge, with_kwargs=True)
    assert abs(cache_error(model, ids, (2, 2, 1, 1)) - 0.125) < 1e-12
    assert cache_error(model, ids, (2, 2, 2)) < 1e-12


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2), [1] * 6], ids=str)
def test_logits_in_pieces_are_those_of_the_whole(sizes):
    model, ids = build(), random_ids(2, 6)
    cache = KVCache.for_model(model, 2, 9)
    assert_same(logits_in_pieces(model, ids, sizes, cache), model(ids))
    assert cache.length == 6
    assert_same(logits_in_pieces(model, ids, sizes), model(ids))


@pytest.mark.parametrize("sizes, total", [((5,), 5), ((3, 4), 7), ((), 0)], ids=str)
def test_pieces_that_do_not_make_the_text_are_refused(sizes, total):
    for gate in (logits_in_pieces, cache_error):
        with pytest.raises(ValueError, match=f"sizes=.*{total}.*6 tokens"):
            gate(build(), random_ids(2, 6), sizes)


# --- what is not equal, and must not be taken for it ------------------------------------------------------------------------------------


def rolled(model, ids, W):
    "Logits of the last word, from a cache out of which all but the W − 1 words before it were thrown."
    full, part = (KVCache.for_model(model, 1, CONTEXT) for _ in range(2))
    model(ids[:, :-1], cache=full)
    nothing = torch.zeros(1, 2, 0, 4, dtype=torch.float64)
    for layer in range(full.n_layers):
        part.update(layer, *[held[:, :, 1 - W :] for held in full.update(layer, nothing, nothing)])
    part.advance(W - 1)
    return model(ids[:, -1:], cache=part)[0, -1]


@pytest.mark.parametrize("n_layers, position, equal", [(1, "none", True), (2, "none", False), (3, "none", False), (1, "rope", False), (1, "learned", False), (1, "sinusoidal", False)])
def test_rolling_a_full_cache_is_not_reading_the_window_again(n_layers, position, equal):
    model, ids = build(n_layers=n_layers, position=position), random_ids(1, 9)
    gap = (rolled(model, ids, 5) - model(ids[:, -5:])[0, -1]).abs().max()
    assert gap < 1e-12 if equal else gap > 1e-2
