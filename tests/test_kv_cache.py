"""The cache tells no lies: its own contract, and cached logits equal to uncached ones for every model and every way to feed it.

Equality is asked of logits, not of tokens: a cache that restarts positions at 0 can leave ten greedy words unchanged.
"""
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.kv_cache import KVCache, logits_in_pieces
from tinylm.transformer import ModelConfig, TransformerLM, kite_model

POSITIONS = ("rope", "learned", "sinusoidal", "none")
V, CONTEXT = 13, 12


def build(seed=0, dtype=torch.float64, scale=0.4, **fields):
    "A model in eval mode whose every parameter is random and large enough to matter."
    fields = {**dict(vocab_size=V, context_length=CONTEXT, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24), **fields}
    generator = torch.Generator().manual_seed(seed)
    model = TransformerLM(ModelConfig(**fields)).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else scale * noise)
    return model


def random_ids(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def in_chunks(model, ids, sizes, cache=None):
    "Feed ids piece by piece through a cache; the logits of all pieces."
    cache = KVCache.for_model(model, len(ids), CONTEXT) if cache is None else cache
    return torch.cat([model(piece, cache=cache) for piece in ids.split(list(sizes), dim=1)], dim=1)


@torch.no_grad()
def at_once(model, ids):
    return model(ids)


def assert_same(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


# --- sizes ------------------------------------------------------------------------------------------------------------------------------

MIB = 1024**2


@pytest.mark.parametrize("n_kv_heads, mib", [(8, 12.0), (4, 6.0), (2, 3.0), (1, 1.5)])
def test_memory_of_base_at_1024_positions(n_kv_heads, mib):
    with torch.device("meta"):  # shapes without memory
        model = TransformerLM(ModelConfig.preset("base", n_kv_heads=n_kv_heads))
    assert KVCache(6, 1, n_kv_heads, 1024, 32).nbytes == mib * MIB
    assert KVCache.for_model(model, 1, 1024).nbytes == mib * MIB
    assert KVCache.for_model(model, 3, 1024, dtype=torch.bfloat16).nbytes == 3 * mib * MIB / 2
    nothing = torch.zeros(1, n_kv_heads, 0, 32, device="meta")
    assert KVCache.for_model(model, 1, 1024).update(0, nothing, nothing)[0].device == torch.device("meta"), "it lies where the model lies"


def test_a_cache_for_a_model_has_its_shape_dtype_and_device():
    cache = KVCache.for_model(build(n_heads=4, n_kv_heads=2), 3, 9)
    assert (cache.n_layers, cache.batch_size, cache.max_length, cache.length, cache.dtype) == (2, 3, 9, 0, torch.float64)
    k = randn(3, 2, 9, 4, dtype=torch.float64)
    keys, values = cache.update(1, k, -k)
    assert torch.equal(keys, k) and torch.equal(values, -k) and keys.device == torch.device("cpu")
    assert KVCache.for_model(build(dtype=torch.bfloat16), 1, 4).dtype == torch.bfloat16
    assert KVCache.for_model(build(), 1, 4, dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize("name", ["n_layers", "batch_size", "n_kv_heads", "max_length", "head_dim"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_at_least_one(name, size):
    sizes = dict(n_layers=2, batch_size=3, n_kv_heads=2, max_length=5, head_dim=4)
    with pytest.raises(ValueError, match=f"{name}={size}.*at least 1"):
        KVCache(**{**sizes, name: size})


@pytest.mark.parametrize("name", ["n_layers", "batch_size", "n_kv_heads", "max_length", "head_dim"])
@pytest.mark.parametrize("size", [2.0, 1.5, True, False, "2", None, math.nan, torch.tensor(2)], ids=repr)
def test_sizes_are_whole_numbers(name, size):
    sizes = dict(n_layers=2, batch_size=3, n_kv_heads=2, max_length=5, head_dim=4)
    with pytest.raises(TypeError, match=f"{name}=.*whole number"):
        KVCache(**{**sizes, name: size})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32", None], ids=str)
def test_keys_and_values_are_floating_point(dtype):
    with pytest.raises(TypeError, match="dtype.*floating-point"):
        KVCache(1, 1, 1, 4, 2, dtype=dtype)


def test_a_new_cache_is_empty_and_as_large_as_it_says():
    "2 · L · B · K · S · D · bytes, with no two sizes alike."
    for dtype, itemsize in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        cache = KVCache(2, 3, 5, 7, 11, dtype=dtype)
        assert cache.nbytes == 2 * 2 * 3 * 5 * 7 * 11 * itemsize
        assert (cache.n_layers, cache.batch_size, cache.max_length, cache.length) == (2, 3, 7, 0)


# --- update and advance -----------------------------------------------------------------------------------------------------------------


def new_cache(max_length=8, **options):
    return KVCache(2, 2, 3, max_length, 4, **options)  # 2 layers, 2 rows, 3 heads of width 4


def write(cache, n, seed):
    "One pass: n positions into both layers, then the cursor. Returns what was written."
    written = []
    for layer in range(2):
        k, v = randn(2, 3, n, 4, seed=seed + 10 * layer), randn(2, 3, n, 4, seed=seed + 10 * layer + 5)
        cache.update(layer, k, v)
        written.append((k, v))
    cache.advance(n)
    return written


def contents(cache):
    "Keys and values held, layer by layer: what an update with no new position returns."
    nothing = torch.zeros(2, 3, 0, 4)
    return [tuple(part.clone() for part in cache.update(layer, nothing, nothing)) for layer in range(2)]


def assert_holds(cache, *passes):
    for layer, held in enumerate(contents(cache)):
        for part in range(2):
            assert torch.equal(held[part], torch.cat([written[layer][part] for written in passes], dim=2))


def test_update_returns_everything_held_and_the_new_but_only_advance_moves_the_cursor():
    cache = new_cache()
    k, v = randn(2, 3, 3, 4, seed=1), randn(2, 3, 3, 4, seed=2)
    for _ in range(2):  # twice into the same slots: the cursor has not moved
        keys, values = cache.update(0, k, v)
        assert torch.equal(keys, k) and torch.equal(values, v) and cache.length == 0
    cache.update(1, -k, -v)
    cache.advance(3)
    assert cache.length == 3
    more_k, more_v = randn(2, 3, 2, 4, seed=3), randn(2, 3, 2, 4, seed=4)
    keys, values = cache.update(0, more_k, more_v)
    assert torch.equal(keys, torch.cat((k, more_k), dim=2)) and torch.equal(values, torch.cat((v, more_v), dim=2))
    keys, values = cache.update(1, more_k, more_v)
    assert torch.equal(keys, torch.cat((-k, more_k), dim=2)) and torch.equal(values, torch.cat((-v, more_v), dim=2))
    assert cache.length == 3


def test_a_cache_fills_to_its_last_slot_and_no_further():
    cache = new_cache(max_length=5)
    passes = [write(cache, 3, 0), write(cache, 2, 1)]
    assert cache.length == cache.max_length == 5
    one = torch.zeros(2, 3, 1, 4)
    for call in (lambda: cache.update(0, one, one), lambda: cache.advance(1)):
        with pytest.raises(ValueError, match="(?s)1.*5.*max_length=5"):
            call()
    assert_holds(cache, *passes)


ZERO = torch.zeros(2, 3, 2, 4)
BAD_UPDATES = {
    "more rows": (0, torch.zeros(3, 3, 2, 4), torch.zeros(3, 3, 2, 4), ValueError, ("k", "(3, 3, 2, 4)", "(2, 3, T, 4)")),
    "one row, which would be copied to both": (0, ZERO[:1], ZERO[:1], ValueError, ("k", "(1, 3, 2, 4)", "(2, 3, T, 4)")),
    "query heads instead of key heads": (0, torch.zeros(2, 6, 2, 4), torch.zeros(2, 6, 2, 4), ValueError, ("k", "(2, 6, 2, 4)")),
    "one head, which would be copied to all": (0, ZERO[:, :1], ZERO[:, :1], ValueError, ("k", "(2, 1, 2, 4)")),
    "another width": (0, torch.zeros(2, 3, 2, 5), torch.zeros(2, 3, 2, 5), ValueError, ("k", "(2, 3, 2, 5)")),
    "width one, which would be copied": (0, ZERO[..., :1], ZERO[..., :1], ValueError, ("k", "(2, 3, 2, 1)")),
    "values of another length": (0, ZERO, ZERO[:, :, :1], ValueError, ("v", "(2, 3, 1, 4)")),
    "values of another width": (0, ZERO, ZERO[..., :1], ValueError, ("v", "(2, 3, 2, 1)")),
    "three dimensions": (0, ZERO[0], ZERO[0], ValueError, ("k", "(3, 2, 4)")),
    "keys in bfloat16": (0, ZERO.bfloat16(), ZERO, TypeError, ("k", "bfloat16", "float32")),
    "values in float64": (0, ZERO, ZERO.double(), TypeError, ("v", "float64", "float32")),
    "keys in integers": (0, ZERO.int(), ZERO.int(), TypeError, ("k", "int32", "float32")),
    "keys elsewhere": (0, ZERO.to("meta"), ZERO, ValueError, ("k", "meta", "cpu")),
    "layer past the last": (2, ZERO, ZERO, ValueError, ("layer=2", "1")),
    "layer counted from the end": (-1, ZERO, ZERO, ValueError, ("layer=-1", "0")),
    "no room": (0, torch.zeros(2, 3, 6, 4), torch.zeros(2, 3, 6, 4), ValueError, ("6", "3", "max_length=8")),
    "one dimension": (0, ZERO[0, 0, 0], ZERO[0, 0, 0], ValueError, ("k", "(4,)", "(2, 3, T, 4)")),
    "five dimensions": (0, ZERO[None], ZERO[None], ValueError, ("k", "(1, 2, 3, 2, 4)")),
    "values in three dimensions": (0, ZERO, ZERO[0], ValueError, ("v", "(3, 2, 4)")),
    "values elsewhere": (0, ZERO, ZERO.to("meta"), ValueError, ("v", "meta", "cpu")),
    "a list of keys": (0, ZERO.tolist(), ZERO, TypeError, ("k", "tensor", "list")),
    "keys in numpy": (0, ZERO.numpy(), ZERO, TypeError, ("k", "tensor", "ndarray")),
    "no values": (0, ZERO, None, TypeError, ("v", "tensor", "NoneType")),
    "layer 1.0": (1.0, ZERO, ZERO, TypeError, ("layer=1.0", "whole number")),
    "layer True": (True, ZERO, ZERO, TypeError, ("layer=True", "whole number")),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_a_bad_update_raises_before_anything_is_written(case):
    layer, k, v, error, fragments = BAD_UPDATES[case]
    cache = new_cache()
    held = write(cache, 3, 0)
    ahead = randn(2, 3, 5, 4, seed=9)
    for i in range(2):
        cache.update(i, ahead, ahead)  # fill the free slots too, so that a stray write there would show
    with pytest.raises(error) as caught:
        cache.update(layer, k, v)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    assert cache.length == 3
    assert_holds(cache, held)
    cache.advance(5)
    assert_holds(cache, held, [(ahead, ahead)] * 2)


def test_advance_goes_forward_only():
    cache = new_cache()
    write(cache, 3, 0)
    with pytest.raises(ValueError, match="-1"):
        cache.advance(-1)
    cache.advance(0)
    assert cache.length == 3


@pytest.mark.parametrize("n", [1.0, True, None, "1", torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("method", ["advance", "truncate"])
def test_positions_are_counted_in_whole_numbers(method, n):
    cache = new_cache()
    held = write(cache, 3, 0)
    with pytest.raises(TypeError, match="n=.*whole number"):
        getattr(cache, method)(n)
    assert cache.length == 3
    assert_holds(cache, held)


def test_what_update_returns_lies_in_the_cache_and_is_not_copied():
    "Copying everything at every step would cost as much as concatenating."
    cache = new_cache()
    write(cache, 2, 0)
    first = cache.update(1, ZERO, ZERO)
    second = cache.update(1, ZERO, ZERO)
    for part, again in zip(first, second):
        assert part.data_ptr() == again.data_ptr() and part.shape == (2, 3, 4, 4)
    assert first[0].data_ptr() != first[1].data_ptr() != cache.update(0, ZERO, ZERO)[1].data_ptr()


def test_training_through_two_layers_of_one_buffer_is_an_error_and_no_wrong_gradient():
    model = build().train()
    with pytest.raises(RuntimeError, match="inplace"):
        model(random_ids(1, 4), cache=KVCache.for_model(model, 1, CONTEXT)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_come_back_as_they_went_in(dtype):
    cache = new_cache(dtype=dtype)
    k, v = randn(2, 3, 4, 4, dtype=dtype), randn(2, 3, 4, 4, seed=1, dtype=dtype)
    keys, values = cache.update(0, k, v)
    assert keys.dtype == values.dtype == dtype and torch.equal(keys, k) and torch.equal(values, v)


# --- truncate, reset, reorder -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_truncate_keeps_the_first_n(n):
    cache = new_cache()
    held = write(cache, 3, 0)
    cache.truncate(n)
    kept = [tuple(part[:, :, :n] for part in layer) for layer in held]
    assert cache.length == n
    assert_holds(cache, kept)
    more = write(cache, 2, 50)
    assert cache.length == n + 2
    assert_holds(cache, kept, more)


@pytest.mark.parametrize("n", [4, 8, -1, -5])
def test_truncate_never_grows_and_never_counts_from_the_end(n):
    cache = new_cache()
    held = write(cache, 3, 0)
    with pytest.raises(ValueError, match=f"(?s)n={n}.*3"):
        cache.truncate(n)
    assert cache.length == 3
    assert_holds(cache, held)


def test_reset_forgets_everything():
    cache = new_cache()
    write(cache, 8, 0)
    cache.reset()
    assert cache.length == 0 and cache.max_length == 8
    assert_holds(cache, write(cache, 2, 50))


@pytest.mark.parametrize("index", [[1, 0], [0, 1], [0, 0], [1, 1]])
def test_reorder_takes_whole_rows(index):
    cache = new_cache()
    held = write(cache, 3, 0)
    cache.reorder(torch.tensor(index))
    reordered = [tuple(part[index] for part in layer) for layer in held]
    assert cache.length == 3
    assert_holds(cache, reordered)
    assert_holds(cache, reordered, write(cache, 2, 50))


def test_reorder_reads_the_old_rows_only():
    "[1, 2, 3] by [1, 0, 0] is [2, 1, 1]; row after row in place it would be [2, 2, 2]."
    cache = KVCache(1, 3, 1, 2, 1)
    numbers = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1)
    cache.update(0, numbers, 10 * numbers)
    cache.advance(1)
    cache.reorder(torch.tensor([1, 0, 0]))
    keys, values = cache.update(0, numbers[:, :, :0], numbers[:, :, :0])
    assert keys.flatten().tolist() == [2, 1, 1] and values.flatten().tolist() == [20, 10, 10]


BAD_ORDERS = [([0], ValueError), ([0, 1, 0], ValueError), ([[0, 1]], ValueError), ([0, 2], ValueError), ([-1, 0], ValueError),
              ([0.0, 1.0], TypeError), ([True, False], TypeError), ([], TypeError)]  # torch.tensor([]) is float


@pytest.mark.parametrize("index, error", BAD_ORDERS, ids=str)
def test_a_bad_reorder_is_refused_and_changes_nothing(index, error):
    cache = new_cache()
    held = write(cache, 3, 0)
    with pytest.raises(error, match="index"):
        cache.reorder(torch.tensor(index))
    assert_holds(cache, held)


@pytest.mark.parametrize("index", [None, 1, "01"])
def test_what_is_no_list_of_rows_is_a_type_error(index):
    with pytest.raises(TypeError, match="index must be a tensor of row numbers"):
        new_cache().reorder(index)


def test_sizes_may_come_one_by_one():
    model, ids = kite_model(), torch.tensor([[0, 1, 3, 2, 4, 1]])
    assert torch.equal(logits_in_pieces(model, ids, iter([4, 2])), logits_in_pieces(model, ids, [4, 2]))


@pytest.mark.parametrize("index", [torch.tensor([1, 0], dtype=torch.int16), torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.int32), [1, 0]], ids=str)
def test_row_numbers_come_in_any_whole_type(index):
    cache = new_cache()
    held = write(cache, 3, 0)
    cache.reorder(index)
    assert_holds(cache, [tuple(part[[1, 0]] for part in layer) for layer in held])


@pytest.mark.parametrize("position", POSITIONS)
def test_a_reordered_cache_goes_on_as_the_reordered_sequences(position):
    model, ids, index = build(position=position), random_ids(3, 6), [2, 0, 0]
    cache, next_ids = KVCache.for_model(model, 3, CONTEXT), random_ids(3, 2, seed=1)
    in_chunks(model, ids, (4, 2), cache)
    cache.reorder(torch.tensor(index))
    assert_same(in_chunks(model, next_ids, (1, 1), cache), at_once(model, torch.cat((ids[index], next_ids), dim=1))[:, 6:])


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_truncated_cache_goes_on_as_the_shorter_sequence(position, n):
    model, ids, next_ids = build(position=position), random_ids(2, 6), random_ids(2, 3, seed=1)
    cache = KVCache.for_model(model, 2, CONTEXT)
    in_chunks(model, ids, (6,), cache)
    cache.truncate(n)
    assert_same(in_chunks(model, next_ids, (2, 1), cache), at_once(model, torch.cat((ids[:, :n], next_ids), dim=1))[:, n:])


def test_one_cache_used_twice_equals_two_caches():
    model, cache = build(), KVCache.for_model(build(), 2, CONTEXT)
    first = in_chunks(model, random_ids(2, 9), (5, 4), cache)
    cache.reset()
    second = in_chunks(model, random_ids(2, 4, seed=1), (2, 2), cache)
    assert torch.equal(first, in_chunks(model, random_ids(2, 9), (5, 4)))
    assert torch.equal(second, in_chunks(model, random_ids(2, 4, seed=1), (2, 2)))


# --- only what was written is read --------------------------------------------------------------------------------------------------------


def poison(cache, model, number):
    "Fill every slot past the cursor, through the public door: an update that is never advanced."
    config, free = model.config, cache.max_length - cache.length
    trash = torch.full((cache.batch_size, config.kv_heads, free, config.head_dim), number, dtype=cache.dtype)
    for layer in range(cache.n_layers):
        cache.update(layer, trash, trash)


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("backend", ["math", "fused"])
def test_what_lies_past_the_cursor_changes_nothing(number, backend):
    model, ids = build(backend=backend), random_ids(2, 8)
    clean = in_chunks(model, ids, (3, 2, 1, 1, 1))
    cache, pieces = KVCache.for_model(model, 2, CONTEXT), []
    for piece in ids.split([3, 2, 1, 1, 1], dim=1):
        poison(cache, model, number)
        pieces.append(in_chunks(model, piece, (piece.shape[1],), cache))
    assert torch.equal(torch.cat(pieces, dim=1), clean)
    assert_same(clean, at_once(model, ids))


@pytest.mark.parametrize("length", [1, 2, 6])
def test_capacity_does_not_matter(length):
    model, ids = build(), random_ids(1, 6)
    outputs = [in_chunks(model, ids[:, :length], (1,) * length, KVCache.for_model(model, 1, capacity)) for capacity in (6, 8, 64)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert_same(outputs[0], at_once(model, ids[:, :length]))


def test_the_mean_of_two_written_values_is_three():
    "All scores equal, values 2 and 4, eight slots: 3; with the empty slots it would be 0.75."
    model = build(d_model=2, n_heads=1, n_kv_heads=1, n_layers=1, position="none")
    attention, cache = model.blocks[0].attention, KVCache(1, 1, 1, 8, 2, dtype=torch.float64)
    with torch.no_grad():
        attention.qkv_proj.weight.copy_(torch.cat((torch.zeros(4, 2), torch.eye(2))))
        attention.out_proj.weight.copy_(torch.eye(2))
        for step, (value, mean) in enumerate([(2.0, 2.0), (4.0, 3.0), (9.0, 5.0)]):
            out = attention(torch.full((1, 1, 2), value, dtype=torch.float64), cache=cache, layer=0)
            cache.advance(1)
            assert_same(out, torch.full_like(out, mean))


# --- positions, stated ------------------------------------------------------------------------------------------------------------------


def positions_used(model, ids, **arguments):
    "The position the model gave each token of a pass, read off the first block's input (tables) or its rotation."
    seen = {}

    def look(block, args, kwargs):
        seen.update(x=args[0].detach(), rope=kwargs["rope"])

    handle = model.blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(ids, **arguments)
    handle.remove()
    added = seen["x"] - model.embedding(ids).detach()  # (B, T, C)
    if model.config.position == "rope":
        D, (B, T) = model.config.head_dim, ids.shape
        hand = torch.zeros(B, 1, T, D, dtype=added.dtype)
        hand[..., D // 2 - 1] = 1.0  # the slowest pair, which never comes round here
        turned = seen["rope"](hand)[:, 0]
        angle = torch.atan2(turned[..., D - 1], turned[..., D // 2 - 1])
        return (angle / model.config.rope_theta ** (-(D - 2) / D)).round(decimals=6).tolist()
    if model.config.position == "learned":
        rows = model.position_embedding.weight.detach()
    else:
        angle = torch.arange(model.config.context_length)[:, None] / 10000 ** (torch.arange(16) // 2 * 2 / 16)
        rows = torch.where(torch.arange(16) % 2 == 0, angle.sin(), angle.cos()).to(added.dtype)
    distance = (added[:, :, None] - rows).abs().amax(dim=-1)  # (B, T, positions)
    assert (distance.min(dim=-1).values < 1e-6).all(), "each token got exactly one row of the table"
    return distance.argmin(dim=-1).tolist()


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_positions_continue_where_the_cache_stops(position):
    "A prompt of 6, then 1, then 2, then 1: the next position is the number of tokens held."
    model, cache = build(position=position, context_length=40), KVCache.for_model(build(), 2, CONTEXT)
    for n, expected in ((6, [0, 1, 2, 3, 4, 5]), (1, [6]), (2, [7, 8]), (1, [9])):
        assert positions_used(model, random_ids(2, n), cache=cache) == [expected] * 2
        assert cache.length == expected[-1] + 1
    cache.truncate(4)
    assert positions_used(model, random_ids(2, 1), cache=cache) == [[4]] * 2
    cache.reset()
    assert positions_used(model, random_ids(2, 2), cache=cache) == [[0, 1]] * 2
    assert positions_used(model, random_ids(2, 3)) == [[0, 1, 2]] * 2, "without a cache there is no past"


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_positions_count_real_tokens_row_by_row(position):
    model, cache = build(position=position), KVCache.for_model(build(), 2, CONTEXT)
    pad_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert positions_used(model, random_ids(2, 6), pad_mask=pad_mask[:, :6]) == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    for n, expected in ((6, [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]), (1, [[4], [6]]), (1, [[5], [7]])):
        end = cache.length + n
        assert positions_used(model, random_ids(2, n), cache=cache, pad_mask=pad_mask[:, :end]) == expected


@pytest.mark.parametrize("position, moves", [("rope", False), ("none", False), ("learned", True), ("sinusoidal", True)])
def test_moving_every_position_by_three_is_seen_unless_only_distances_count(position, moves):
    "The same five words behind three others that they may not see."
    model, ids, masks = build(position=position, n_layers=1), random_ids(1, 5), {}

    def use_mask(attention, args, kwargs):
        return args, {**kwargs, "mask": masks[args[0].shape[1]]}

    masks[5] = torch.ones(5, 5, dtype=torch.bool).tril()
    masks[8] = torch.ones(8, 8, dtype=torch.bool).tril()
    masks[8][3:, :3] = False
    model.blocks[0].attention.register_forward_pre_hook(use_mask, with_kwargs=True)
    later = at_once(model, torch.cat((random_ids(1, 3, seed=1), ids), dim=1))[:, 3:]
    difference = (later - at_once(model, ids)).abs().max().item()
    assert difference > 1e-2 if moves else difference < 1e-12


# --- a pass that raises -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["blocks.0", "blocks.1.attention.out_proj", "blocks.1.ffn"])
def test_a_pass_that_raises_leaves_the_cache_as_it_was(where):
    model, ids = build(), random_ids(2, 7)
    cache = KVCache.for_model(model, 2, CONTEXT)
    in_chunks(model, ids[:, :4], (4,), cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.get_submodule(where).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_chunks(model, random_ids(2, 5, seed=3), (5,), cache)
    handle.remove()
    assert cache.length == 4
    assert_same(in_chunks(model, ids[:, 4:], (1, 2), cache), at_once(model, ids)[:, 4:])


def test_a_pass_that_does_not_fit_raises_before_layer_0_writes():
    model, ids = build(), random_ids(2, 6)
    cache = KVCache.for_model(model, 2, 6)
    in_chunks(model, ids[:, :4], (4,), cache)
    with pytest.raises(ValueError, match="(?s)3.*max_length=6"):
        in_chunks(model, random_ids(2, 3, seed=3), (3,), cache)
    assert cache.length == 4
    cache.advance(2)  # nobody does this: it shows that the two free slots are still empty
    nothing = torch.zeros(2, 2, 0, 4, dtype=torch.float64)
    assert all((part[:, :, 4:] == 0).all() for layer in range(2) for part in cache.update(layer, nothing, nothing))
    cache.truncate(4)
    assert_same(in_chunks(model, ids[:, 4:], (2,), cache), at_once(model, ids)[:, 4:])


# --- a cache in another dtype -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 4e-2), (torch.float16, 5e-3), (torch.float64, 2e-6)], ids=str)
@pytest.mark.parametrize("backend", ["math", "fused"])
def test_a_narrow_cache_costs_its_rounding_and_no_more(dtype, atol, backend):
    model, ids = build(dtype=torch.float32, scale=0.25, backend=backend), random_ids(2, 8)
    cache = KVCache.for_model(model, 2, CONTEXT, dtype=dtype)
    logits, exact = in_chunks(model, ids, (4, 1, 1, 2), cache), at_once(model, ids)
    assert logits.dtype == torch.float32 and cache.dtype == dtype
    assert_same(logits, exact, atol)
    if dtype.itemsize == 2:
        assert (logits - exact).abs().max() > atol / 100, "two bytes per number are rounded, and that is seen"


@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 6e-2), (torch.float16, 8e-3)], ids=str)
@pytest.mark.parametrize("backend", ["math", "fused"])
def test_a_narrow_model_with_its_own_cache(dtype, atol, backend):
    model, ids = build(dtype=dtype, scale=0.25, backend=backend), random_ids(2, 8)
    assert_same(in_chunks(model, ids, (4, 1, 1, 2)), at_once(model, ids), atol)


def test_under_autocast_the_cache_takes_what_the_model_computes():
    model, ids = build(dtype=torch.float32, scale=0.25), random_ids(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached, uncached = in_chunks(model, ids, (4, 1, 3)), at_once(model, ids)
    assert_same(cached.float(), uncached.float(), 6e-2)
    assert_same(cached.float(), at_once(model, ids), 6e-2)


# --- cached = uncached: a full grid and a search ------------------------------------------------------------------------------------------

SPLITS = ((8,), (1,) * 8, (7, 1), (1, 7), (4, 4), (2, 3, 3), (5, 1, 1, 1), (3, 1, 4), (6, 2))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["multi-head", "grouped", "multi-query"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("backend", ["math", "fused"])
def test_cached_logits_equal_uncached_on_the_grid(position, n_kv_heads, norm, backend):
    "48 models × 9 ways to split 8 tokens × 2 batch sizes = 864 comparisons."
    model = build(position=position, n_kv_heads=n_kv_heads, norm=norm, backend=backend, bias=norm == "layernorm", ffn=("swiglu", "gelu")[n_kv_heads == 2])
    ids = random_ids(3, 8)
    expected = at_once(model, ids)
    assert expected.std() > 0.3
    for sizes, batch in itertools.product(SPLITS, (1, 3)):
        assert_same(in_chunks(model, ids[:batch], sizes), expected[:batch])


MODELS = {}


@settings(max_examples=120, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
@given(
    position=st.sampled_from(POSITIONS),
    n_kv_heads=st.sampled_from((1, 2, 4)),
    norm=st.sampled_from(("rmsnorm", "layernorm")),
    ffn=st.sampled_from(("swiglu", "gelu")),
    backend=st.sampled_from(("math", "fused")),
    dtype_and_atol=st.sampled_from(((torch.float64, 1e-12), (torch.float32, 1e-5))),
    batch=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) <= CONTEXT),
    capacity=st.sampled_from((CONTEXT, 40)),
    seed=st.integers(0, 1000),
)
def test_cached_logits_equal_uncached_for_any_split(position, n_kv_heads, norm, ffn, backend, dtype_and_atol, batch, sizes, capacity, seed):
    dtype, atol = dtype_and_atol
    kind = (position, n_kv_heads, norm, ffn, backend, dtype)
    if kind not in MODELS:
        MODELS[kind] = build(dtype=dtype, scale=0.25, position=position, n_kv_heads=n_kv_heads, norm=norm, ffn=ffn, backend=backend)
    model, ids = MODELS[kind], random_ids(batch, sum(sizes), seed)
    cache = KVCache.for_model(model, batch, capacity)
    assert_same(in_chunks(model, ids, sizes, cache), at_once(model, ids), atol)
    assert cache.length == sum(sizes)


@pytest.mark.parametrize("sizes", [(6,), (5, 1), (1,) * 6, (2, 3, 1)], ids=str)
@pytest.mark.parametrize("capacity", [6, 8, 16])
def test_the_kite_model_answers_through_the_cache(sizes, capacity):
    model = kite_model()
    logits = in_chunks(model, torch.tensor([[0, 1, 3, 2, 4, 1]]), sizes, KVCache.for_model(model, 1, capacity))
    assert_same(11 * logits[0, -1], torch.tensor([-18.0, -18, -18, 42, -6], dtype=torch.float64), 1e-8)


def test_a_cached_pass_is_the_same_under_inference_mode():
    model, ids = build(), random_ids(2, 6)
    with torch.inference_mode():
        cached = in_chunks(model, ids, (4, 1, 1))
    assert_same(cached, at_once(model, ids))
