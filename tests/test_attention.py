"""tinylm.attention against torch's kernel and layers, numpy loops in float64, and numbers worked out on paper."""
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tinylm.attention
from tinylm.attention import CausalSelfAttention, causal_attention, causal_mask, masked_softmax, scaled_dot_product_attention
from tinylm.kv_cache import KVCache

BACKENDS = ["math", "fused"]
HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)]  # query heads, key/value heads
LENGTHS = [(5, 5), (3, 7), (1, 6), (1, 1), (6, 9)]  # queries, keys
INF = math.inf


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(T, S, H=4, K=2, D=8, width=None, B=2, seed=0, dtype=torch.float64):
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, width or D)
    return [random(*shape, seed=seed + i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def with_gradients(attention, inputs):
    "The result and the gradient of every input, for a loss in which each number of the result has its own weight."
    out = attention(*inputs)
    loss = (out * random(*out.shape, seed=9, dtype=out.dtype)).sum()
    return [out, *torch.autograd.grad(loss, inputs)]


def assert_close(ours, theirs, atol=1e-12):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def mask_of(kind, T, S, dtype=torch.float64):
    noise = random(T, S, seed=T + 10 * S)
    return {
        "none": None,
        "causal": torch.tensor([[n <= S - T + t for n in range(S)] for t in range(T)]),
        "bool": (noise > -0.3) | torch.eye(T, S, dtype=torch.bool),
        "float": noise.to(dtype),
        "float with -inf": noise.masked_fill((noise > 0.5) & ~torch.eye(T, S, dtype=torch.bool), -INF).to(dtype),
    }[kind]


MASKS = ["none", "causal", "bool", "float", "float with -inf"]


# ---------------------------------------------------------------------------------------------------- causal_mask


def test_causal_mask_puts_query_t_at_position_past_plus_t():
    for T, S in product(range(6), range(6)):
        if T <= S:
            expected = [[n <= (S - T) + t for n in range(S)] for t in range(T)]
            mask = causal_mask(T, S)
            assert mask.tolist() == expected and mask.shape == (T, S) and mask.dtype == torch.bool
    assert causal_mask(4).equal(torch.ones(4, 4).tril().bool())


def test_causal_mask_is_built_where_asked():
    assert causal_mask(2, 3, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((3, 2), ValueError, "n_keys=2 must be at least 3"),
        ((-1,), ValueError, "n_queries=-1 must be at least 0"),
        ((-1, 4), ValueError, "n_queries=-1"),
        ((2.0,), TypeError, "n_queries=2.0"),
        ((2, 3.5), TypeError, "n_keys=3.5"),
        ((True,), TypeError, "n_queries=True"),
    ],
)
def test_causal_mask_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        causal_mask(*arguments)


# ------------------------------------------------------------- scaled_dot_product_attention against torch and numpy


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("H, K", HEADS)
def test_values_and_gradients_equal_torch_kernel(H, K, T, S, kind):
    mask = mask_of(kind, T, S)
    ours = with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), qkv(T, S, H, K))
    theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), qkv(T, S, H, K))
    assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [0.3, 1.0, -2.0, 0.0])
def test_custom_scale_equals_torch_kernel(scale):
    mask = mask_of("bool", 3, 5)
    ours = with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask, scale=scale), qkv(3, 5))
    theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True), qkv(3, 5))
    assert_close(ours, theirs)


@pytest.mark.parametrize("width", [1, 5, 16])
def test_values_may_have_another_width(width):
    ours = with_gradients(scaled_dot_product_attention, qkv(4, 6, width=width))
    theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), qkv(4, 6, width=width))
    assert ours[0].shape == (2, 4, 4, width)
    assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 1), (1, 3, 5), (4, 3, 5), (2, 1, 1, 5), (2, 1, 3, 5), (1, 4, 1, 5), (2, 4, 3, 5)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_broadcasts_to_batch_heads_queries_keys(shape, kind, backend):
    noise = random(*shape, seed=3)
    mask = noise > -0.5 if kind == "bool" else noise
    full = torch.broadcast_to(mask, (2, 4, 3, 5))
    inputs = qkv(3, 5)
    theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, full, enable_gqa=True), inputs)
    assert_close(with_gradients(lambda q, k, v: causal_attention(q, k, v, mask, backend), inputs), theirs)


def loop_attention(q, k, v, mask=None, scale=None):
    "One number at a time, in plain numpy and math.exp."
    (B, H, T, D), (_, K, S, _) = q.shape, k.shape
    out = np.zeros((B, H, T, v.shape[-1]))
    for b, h, t in product(range(B), range(H), range(T)):
        group = h // (H // K)
        scores = [sum(q[b, h, t, d] * k[b, group, n, d] for d in range(D)) * (scale or 1 / math.sqrt(D)) for n in range(S)]
        if mask is not None:
            scores = [s if allowed else -INF for s, allowed in zip(scores, mask[t])]
        voices = [math.exp(s - max(scores)) for s in scores]
        for n in range(S):
            out[b, h, t] += voices[n] / sum(voices) * v[b, group, n]
    return out


@pytest.mark.parametrize("H, K", HEADS)
@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_numpy_loop(H, K, T, S, backend):
    q, k, v = (x.detach() for x in qkv(T, S, H, K, D=3))
    expected = loop_attention(q.numpy(), k.numpy(), v.numpy(), mask_of("causal", T, S).numpy())
    np.testing.assert_allclose(causal_attention(q, k, v, None, backend).numpy(), expected, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3), K=st.integers(1, 3), group=st.integers(1, 3), T=st.integers(1, 9), past=st.integers(0, 9),
    D=st.integers(1, 9), width=st.integers(1, 9), kind=st.sampled_from(MASKS), seed=st.integers(0, 1000),
)
def test_any_shape_equals_torch_kernel(B, K, group, T, past, D, width, kind, seed):
    S = T + past
    mask = mask_of(kind, T, S)
    inputs = qkv(T, S, K * group, K, D, width, B, seed)
    theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), inputs)
    assert_close(with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), inputs), theirs)


def test_by_hand_kite_gets_16_of_33():
    # `. red kite blue boat red`: keys are the previous word, the query is the red arrow doubled, base 2
    arrow = {".": (0, 0), "red": (1, 0), "blue": (-1, 0), "kite": (0, 1), "boat": (0, -1)}
    words = [".", "red", "kite", "blue", "boat", "red"]
    k = torch.tensor([arrow[w] for w in [".", *words[:-1]]], dtype=torch.float64)[None, None]
    v = torch.tensor([arrow[w] for w in words], dtype=torch.float64)[None, None]
    q = torch.tensor([[[[2.0, 0.0]]]], dtype=torch.float64)
    out = scaled_dot_product_attention(q, k, v, scale=math.log(2))
    torch.testing.assert_close(out.flatten(), torch.tensor([4, 15], dtype=torch.float64) / 33, rtol=0, atol=1e-15)
    eye = torch.eye(6, dtype=torch.float64)[None, None]
    weights = scaled_dot_product_attention(q, k, eye, scale=math.log(2)).flatten()
    torch.testing.assert_close(weights * 33, torch.tensor([4, 4, 16, 4, 1, 4], dtype=torch.float64), rtol=0, atol=1e-13)


def test_large_scores_do_not_overflow():
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1000.0], [1001.0]]]])
    out = scaled_dot_product_attention(q, k, torch.tensor([[[[0.0], [1.0]]]]))
    assert out.item() == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-6)


def test_half_precision_scores_are_scaled_before_they_overflow():
    # q·k = 64·40·40 = 102,400 is beyond float16 (65,504); divided by √64 it is not
    q, v = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16), torch.ones(1, 1, 1, 64, dtype=torch.float16)
    assert scaled_dot_product_attention(q, q, v).equal(v)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_are_right_up_to_rounding(dtype, atol, kind, backend):
    mask = mask_of(kind, 6, 9)
    low = [x.detach() for x in qkv(6, 9, dtype=dtype)]
    attention = tinylm.attention.ENGINES[backend]
    out = attention(*low, mask)  # a float64 mask fits every dtype
    truth = F.scaled_dot_product_attention(*(x.double() for x in low), mask, enable_gqa=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", MASKS)
def test_gradients_equal_finite_differences(kind):
    mask = mask_of(kind, 3, 5)
    assert torch.autograd.gradcheck(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), qkv(3, 5, 2, 1, 3, B=1))


def test_an_added_mask_may_be_learned():
    bias = mask_of("float", 3, 5).requires_grad_()
    q, k, v = qkv(3, 5)
    ours = with_gradients(lambda *x: scaled_dot_product_attention(*x[:3], x[3]), [q, k, v, bias])
    theirs = with_gradients(lambda *x: F.scaled_dot_product_attention(*x[:3], x[3], enable_gqa=True), [q, k, v, bias])
    assert_close(ours, theirs)


# ------------------------------------------------------------------------------------------- masks, as they go wrong


def equal_scores(T, S, H=1, K=1, dtype=torch.float64):
    return torch.zeros(1, H, T, 2, dtype=dtype), torch.zeros(1, K, S, 2, dtype=dtype)


def values(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, -1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T, v, expected", [(1, (1, 2, 3, 4), [2.5]), (2, (1, 2, 3, 4, 5), [2.5, 3]), (3, (1, 2, 3), [1, 1.5, 2])])
def test_mask_1_fewer_queries_than_keys_still_see_the_cached_history(backend, T, v, expected):
    q, k = equal_scores(T, len(v))
    for mask in (None, causal_mask(T, len(v))):
        out = causal_attention(q, k, values(*v), mask, backend)
        assert out.flatten().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_3_true_means_attend_and_float_is_added(backend):
    q, k = equal_scores(3, 3)
    v = values(1, 2, 3)
    attention = tinylm.attention.ENGINES[backend]
    causal = torch.ones(3, 3, dtype=torch.float64).tril()
    assert attention(q, k, v, causal.bool()).flatten().tolist() == pytest.approx([1, 1.5, 2], abs=1e-12)
    e = math.e
    added = [(e + 5) / (e + 2), (3 * e + 3) / (2 * e + 1), 2]  # a table of 0 and 1 in float is added: that is the contract
    assert attention(q, k, v, causal).flatten().tolist() == pytest.approx(added, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.complex64])
def test_mask_3_integer_mask_is_refused(backend, dtype):
    q, k = equal_scores(3, 3)
    with pytest.raises(TypeError, match="mask must be bool"):
        causal_attention(q, k, values(1, 2, 3), torch.ones(3, 3).to(dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("K", [4, 2, 1])
def test_mask_4_row_without_a_key_gives_0_and_finite_gradients(backend, kind, K):
    allowed = torch.tensor([[False] * 3, [True, True, False], [True] * 3])
    mask = allowed if kind == "bool" else torch.zeros(3, 3, dtype=torch.float64).masked_fill(~allowed, -INF)
    inputs = qkv(3, 3, 4, K)
    out, *gradients = with_gradients(lambda q, k, v: causal_attention(q, k, v, mask, backend), inputs)
    assert not out[:, :, 0].any()
    assert all(g.isfinite().all() for g in gradients) and not gradients[0][:, :, 0].any()

    # the other rows, and what they send back, are as if row 0 were not there (torch's kernel on the two rows alone)
    def two_rows(q, k, v):
        rest = F.scaled_dot_product_attention(q[:, :, 1:], k, v, allowed[1:], enable_gqa=True)
        return torch.cat((torch.zeros_like(rest[:, :, :1]), rest), dim=2)

    assert_close([out, *gradients], with_gradients(two_rows, inputs))


def test_mask_4_no_uniform_row_from_a_finite_fill():
    q, k = equal_scores(1, 3)
    assert scaled_dot_product_attention(q, k, values(1, 2, 3), torch.zeros(1, 3, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_4_finite_fill_that_overflows_to_minus_infinity_in_half_precision(backend):
    q, k = equal_scores(2, 3, dtype=torch.float16)
    mask = torch.tensor([[-1e9, -1e9, -1e9], [0, -1e9, -1e9]])  # float32; in float16 all of these are −inf
    out = causal_attention(q, k, values(1, 2, 3, dtype=torch.float16), mask, backend)
    assert out.flatten().tolist() == [0, 1]


def test_masked_softmax_keeps_every_gradient_finite():
    scores = random(2, 3, 4).requires_grad_()
    masked_softmax(scores, torch.zeros(3, 4, dtype=torch.bool)).sum().backward()
    assert not scores.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_meter_reads_one_over_the_number_of_visible_keys(backend):
    q, k = equal_scores(6, 6)
    first = values(1, 0, 0, 0, 0, 0)
    out = causal_attention(q, k, first, None, backend).flatten().tolist()
    assert out == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6], abs=1e-12)


def test_scale_1_is_the_root_of_the_head_width_not_of_the_model_width():
    # width 64, 4 heads of 16: the scale is 16^-1/2 = 0.25, not 0.125. One unit of score is worth a factor e.
    q = torch.zeros(1, 4, 1, 16, dtype=torch.float64)
    k = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    q[..., 0], k[:, :, 1, 0] = 1, 4  # scores 0 and 4 · 0.25 = 1
    v = values(0, 1).expand(1, 4, 2, 1)
    assert scaled_dot_product_attention(q, k, v).flatten().tolist() == pytest.approx([1 / (1 + 1 / math.e)] * 4, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("H, K, expected", [(4, 2, [10, 10, 20, 20]), (6, 3, [10, 10, 20, 20, 30, 30]), (6, 2, [10, 10, 10, 20, 20, 20])])
def test_gqa_1_neighbouring_query_heads_share_a_key_value_head(backend, H, K, expected):
    q, k = equal_scores(1, 1, H, K)
    v = torch.tensor([10.0, 20.0, 30.0][:K], dtype=torch.float64).reshape(1, K, 1, 1).expand(1, K, 1, 2)
    assert tinylm.attention.ENGINES[backend](q, k, v)[..., 0].flatten().tolist() == expected


# -------------------------------------------------------------------------------------------------------- bad input


def z(*shape, dtype=torch.float32, device=None):
    return torch.zeros(*shape, dtype=dtype, device=device)


BAD = {
    "three dimensions": ((z(4, 3, 2), z(4, 3, 2), z(4, 3, 2)), ValueError, r"q \(4, 3, 2\)"),
    "q alone has three": ((z(4, 3, 2), z(1, 4, 3, 2), z(1, 4, 3, 2)), ValueError, "must be"),
    "no width": ((z(1, 1, 3, 0), z(1, 1, 3, 0), z(1, 1, 3, 0)), ValueError, "D ≥ 1"),
    "batch of k": ((z(2, 4, 3, 2), z(1, 4, 3, 2), z(2, 4, 3, 2)), ValueError, "B and D as in q"),
    "batch of v": ((z(2, 4, 3, 2), z(2, 4, 3, 2), z(1, 4, 3, 2)), ValueError, "B and D as in q"),
    "width of k": ((z(1, 4, 3, 2), z(1, 4, 3, 3), z(1, 4, 3, 2)), ValueError, r"k \(1, 4, 3, 3\)"),
    "positions of v": ((z(1, 4, 3, 2), z(1, 4, 3, 2), z(1, 4, 4, 2)), ValueError, r"v \(1, 4, 4, 2\)"),
    "heads of v": ((z(1, 4, 3, 2), z(1, 2, 3, 2), z(1, 4, 3, 2)), ValueError, r"v \(1, 4, 3, 2\)"),
    "6 heads on 4": ((z(1, 6, 3, 2), z(1, 4, 3, 2), z(1, 4, 3, 2)), ValueError, "the 4 key/value heads of k must divide the 6"),
    "2 heads on 4": ((z(1, 2, 3, 2), z(1, 4, 3, 2), z(1, 4, 3, 2)), ValueError, "the 4 key/value heads of k must divide the 2"),
    "no key head": ((z(1, 2, 3, 2), z(1, 0, 3, 2), z(1, 0, 3, 2)), ValueError, "the 0 key/value heads"),
    "mixed dtypes": ((z(1, 1, 3, 2), z(1, 1, 3, 2, dtype=torch.float64), z(1, 1, 3, 2)), TypeError, "float64"),
    "integers": ((z(1, 1, 3, 2, dtype=torch.int64),) * 3, TypeError, "int64"),
    "two devices": ((z(1, 1, 3, 2), z(1, 1, 3, 2, device="meta"), z(1, 1, 3, 2)), ValueError, "one device"),
    "mask elsewhere": ((*[z(1, 1, 3, 2)] * 3, z(3, 3, device="meta")), ValueError, "one device"),
    "mask too long": ((*[z(1, 1, 3, 2)] * 3, z(3, 4)), ValueError, r"mask \(3, 4\) must broadcast"),
    "mask of another batch": ((*[z(1, 1, 3, 2)] * 3, z(2, 1, 3, 3)), ValueError, r"mask \(2, 1, 3, 3\) must broadcast"),
    "mask of five dimensions": ((*[z(1, 1, 3, 2)] * 3, z(1, 1, 1, 3, 3)), ValueError, "must broadcast"),
    "mask transposed": ((z(1, 1, 2, 2), *[z(1, 1, 3, 2)] * 2, z(3, 2)), ValueError, r"mask \(3, 2\) must broadcast"),
}


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_the_documented_error(name, engine):
    arguments, error, says = BAD[name]
    with pytest.raises(error, match=says):
        tinylm.attention.ENGINES[engine](*arguments)


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("B, T, S", [(0, 3, 3), (2, 0, 3), (2, 0, 0)])
def test_nothing_to_do_gives_an_empty_result(engine, B, T, S):
    assert tinylm.attention.ENGINES[engine](z(B, 4, T, 8), z(B, 2, S, 8), z(B, 2, S, 8)).shape == (B, 4, T, 8)


def test_no_keys_at_all_gives_0():
    out = scaled_dot_product_attention(z(1, 2, 3, 4), z(1, 2, 0, 4), z(1, 2, 0, 5))
    assert out.equal(z(1, 2, 3, 5))


@pytest.mark.parametrize(
    "arguments, options, error, says",
    [
        ((8, 3), {}, ValueError, "n_heads=3 must divide d_model=8"),
        ((8, 0), {}, ValueError, "n_heads=0"),
        ((0, 1), {}, ValueError, "d_model=0"),
        ((8, -2), {}, ValueError, "n_heads=-2"),
        ((8, 4, 3), {}, ValueError, "n_kv_heads=3 must divide n_heads=4"),
        ((8, 4, 8), {}, ValueError, "n_kv_heads=8 must divide n_heads=4"),
        ((8, 4, 0), {}, ValueError, "n_kv_heads=0"),
        ((8, 2.0), {}, TypeError, "n_heads=2.0"),
        (("8", 2), {}, TypeError, "d_model='8'"),
        ((8, 2, True), {}, TypeError, "n_kv_heads=True"),
        ((8, 2), {"backend": "flash"}, ValueError, "backend='flash' must be one of math, fused"),
        ((8, 2), {"dropout": 1.5}, ValueError, "dropout.*1.5"),
        ((8, 2), {"dropout": -0.1}, ValueError, "dropout.*-0.1"),
    ],
)
def test_layer_refuses(arguments, options, error, says):
    with pytest.raises(error, match=says):
        CausalSelfAttention(*arguments, **options)


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 7), (1, 2, 3, 8)])
def test_layer_refuses_another_x(shape):
    with pytest.raises(ValueError, match=r"x must be \(B, T, 8\)"):
        CausalSelfAttention(8, 2)(torch.zeros(shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_refuses_integer_and_misfitting_masks(backend):
    layer, x = CausalSelfAttention(8, 2, backend=backend), torch.zeros(1, 3, 8)
    with pytest.raises(TypeError, match="mask must be bool"):
        layer(x, mask=torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask \(2, 2\)"):
        layer(x, mask=torch.ones(2, 2, dtype=torch.bool))


# -------------------------------------------------------------------------------------------------------- the layer


def make_layer(C=16, H=4, K=2, bias=True, seed=0, dtype=torch.float64, **options):
    layer = CausalSelfAttention(C, H, K, bias=bias, **options).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + i) / math.sqrt(C))
    return layer.eval()


def torch_only(layer, x, mask=None, past=None, rope=None):
    "The layer from its parameters, with torch alone: separate products, no fused matrix, keys repeated, softmax written out."
    C, H, K = x.shape[-1], layer.n_heads, layer.n_kv_heads
    D = C // H
    rows = {"q": slice(0, C), "k": slice(C, C + K * D), "v": slice(C + K * D, C + 2 * K * D)}

    def heads(name, n):
        bias = None if layer.qkv_proj.bias is None else layer.qkv_proj.bias[rows[name]]
        projected = F.linear(x, layer.qkv_proj.weight[rows[name]], bias)
        return torch.stack([projected[..., i * D : (i + 1) * D] for i in range(n)], dim=1)

    q, k, v = heads("q", H), heads("k", K), heads("v", K)
    if rope is not None:
        q, k = rope(q), rope(k)
    if past is not None:
        k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
    T, S = q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(D)
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
    weights = scores.masked_fill(~mask, -INF).softmax(-1)
    out = torch.einsum("bhts,bhsd->bthd", weights, v).reshape(x.shape)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("H, K", [(4, None), (4, 4), (4, 2), (4, 1), (1, 1), (16, 4)])
def test_layer_equals_torch_only_computation_with_gradients(H, K, bias, backend):
    layer = make_layer(16, H, K, bias, backend=backend)
    for B, T in ((2, 5), (1, 1), (3, 8)):
        x = random(B, T, 16, seed=B).requires_grad_()
        wanted = [x, *layer.parameters()]
        ours, theirs = layer(x), torch_only(layer, x)
        noise = random(*ours.shape, seed=5)
        assert_close([ours], [theirs])
        assert_close(torch.autograd.grad((ours * noise).sum(), wanted), torch.autograd.grad((theirs * noise).sum(), wanted))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_torch_multihead_attention_with_copied_weights(bias, backend):
    layer = make_layer(24, 3, 3, bias, backend=backend)
    theirs = torch.nn.MultiheadAttention(24, 3, bias=bias, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(layer.qkv_proj.weight)
        theirs.out_proj.weight.copy_(layer.out_proj.weight)
        if bias:
            theirs.in_proj_bias.copy_(layer.qkv_proj.bias)
            theirs.out_proj.bias.copy_(layer.out_proj.bias)
    x = random(2, 7, 24)
    blocked = torch.ones(7, 7, dtype=torch.bool).triu(1)  # there, True means blocked
    expected = theirs(x, x, x, attn_mask=blocked, need_weights=False)[0]
    assert_close([layer(x)], [expected])


@settings(max_examples=40, deadline=None)
@given(K=st.integers(1, 3), group=st.integers(1, 3), D=st.integers(1, 6), B=st.integers(1, 3), T=st.integers(1, 9),
       bias=st.booleans(), backend=st.sampled_from(BACKENDS), seed=st.integers(0, 1000))
def test_layer_of_any_shape_equals_torch_only_computation(K, group, D, B, T, bias, backend, seed):
    layer = make_layer(K * group * D, K * group, K, bias, seed, backend=backend)
    x = random(B, T, K * group * D, seed=seed)
    assert_close([layer(x)], [torch_only(layer, x)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("H, K", [(4, 2), (4, 1), (6, 3), (6, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_grouped_layer_equals_multi_head_layer_with_duplicated_key_value_projections(H, K, seed, backend):
    D, C = 4, 4 * H
    grouped = make_layer(C, H, K, True, seed, backend=backend)
    ordinary = make_layer(C, H, H, True, seed, backend=backend)
    with torch.no_grad():
        for name in ("weight", "bias"):
            source = getattr(grouped.qkv_proj, name)
            parts = [source[:C]]
            for part in (source[C : C + K * D], source[C + K * D :]):
                parts += [part[h // (H // K) * D :][:D] for h in range(H)]  # head by head
            getattr(ordinary.qkv_proj, name).copy_(torch.cat(parts))
        ordinary.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x = random(2, 6, C, seed=seed + 50)
    assert_close([grouped(x)], [ordinary(x)])


def test_names_and_shapes_of_the_parameters():
    layer = CausalSelfAttention(32, 4, 2, bias=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "qkv_proj.weight": (64, 32), "qkv_proj.bias": (64,), "out_proj.weight": (32, 32), "out_proj.bias": (32,),
    }
    assert [name for name, _ in CausalSelfAttention(32, 4).named_parameters()] == ["qkv_proj.weight", "out_proj.weight"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "float with -inf"])
def test_a_mask_takes_the_place_of_the_causal_one(backend, kind):
    layer, x = make_layer(backend=backend), random(2, 5, 16)
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    mask |= torch.eye(5, dtype=torch.bool)  # also the future where the mask allows it
    expected = torch_only(layer, x, mask)
    given_mask = mask if kind == "bool" else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -INF)
    assert_close([layer(x, mask=given_mask)], [expected])


@pytest.mark.parametrize("backend", BACKENDS)
def test_left_padding_gives_each_row_its_unpadded_run(backend):
    layer, x = make_layer(backend=backend), random(2, 6, 16)
    real = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    out = layer(x, mask=causal_mask(6) & real[:, None, None, :])
    assert_close([out[0, 2:]], [torch_only(layer, x[:1, 2:])[0]])
    assert_close([out[1]], [torch_only(layer, x[1:])[0]])
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_with_padding_has_finite_gradients_everywhere(backend):
    layer, x = make_layer(backend=backend), random(2, 4, 16).requires_grad_()
    real = torch.tensor([[False, False, True, True], [True] * 4])
    layer(x, mask=causal_mask(4) & real[:, None, None, :]).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_is_applied_to_queries_and_keys_only(backend):
    layer, x = make_layer(backend=backend), random(2, 5, 16)
    seen = []

    def rope(heads):
        seen.append(tuple(heads.shape))
        return heads.flip(-1) * torch.arange(1, 6, dtype=torch.float64)[:, None]

    assert_close([layer(x, rope=rope)], [torch_only(layer, x, rope=rope)])
    assert seen[0] == (2, 4 + 2, 5, 4), "one call for the query heads and the key heads side by side"


# -------------------------------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("H, K", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_a_word_leaves_every_earlier_row_bit_identical(H, K, dtype, backend):
    layer, x = make_layer(16, H, K, backend=backend, dtype=dtype), random(2, 9, 16, dtype=dtype)
    before = layer(x)
    for t in range(9):
        changed = x.clone()
        changed[:, t] += 3
        after = layer(changed)
        assert after[:, :t].equal(before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(dim=-1).all()  # and the row itself and every later one notices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [4, 2, 1])
def test_causality_behind_a_cache(K, backend):
    layer, x = make_layer(16, 4, K, backend=backend), random(2, 9, 16)

    def second_pass(x):
        cache = KVCache(1, 2, K, 12, 4, dtype=torch.float64)
        with torch.no_grad():
            layer(x[:, :4], cache=cache)
            cache.advance(4)
            return layer(x[:, 4:], cache=cache)

    before = second_pass(x)
    for t in range(9):
        changed = x.clone()
        changed[:, t] += 3
        after, first = second_pass(changed), max(t - 4, 0)  # the first new row that may notice
        assert after[:, :first].equal(before[:, :first])
        assert (after[:, first:] != before[:, first:]).any(dim=-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_do_not_meet(backend):
    layer, x = make_layer(backend=backend), random(3, 5, 16)
    changed = x.clone()
    changed[1] += 1
    assert layer(changed)[[0, 2]].equal(layer(x)[[0, 2]])


# ------------------------------------------------------------------------------------------------------- with a cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("split", [[7], [6, 1], [1] * 7, [2, 3, 2], [1, 6], [4, 3]])
def test_any_split_through_the_cache_equals_one_pass(split, K, backend):
    layer, x = make_layer(16, 4, K, backend=backend), random(2, 7, 16)
    cache, pieces = KVCache(2, 2, K, 10, 4, dtype=torch.float64), []
    with torch.no_grad():
        for piece in x.split(split, dim=1):
            pieces.append(layer(piece, cache=cache, layer=1))
            cache.advance(piece.shape[1])
    assert_close([torch.cat(pieces, dim=1)], [torch_only(layer, x).detach()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("module, stored", [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)])
def test_cache_of_another_dtype_costs_its_rounding_and_no_more(module, stored, backend):
    layer, x = make_layer(backend=backend, dtype=module), random(2, 6, 16, dtype=module)
    cache = KVCache(1, 2, 2, 8, 4, dtype=stored)
    with torch.no_grad():
        layer(x[:, :4], cache=cache)
        cache.advance(4)
        out = layer(x[:, 4:], cache=cache)
        k, v = (t.to(stored).to(module).double() for t in layer.project(x)[1:])

    # the rest in float64, from keys and values rounded to the stored dtype
    double = make_layer(dtype=torch.float64)
    double.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    q = double.project(x[:, 4:].double())[0]
    heads = F.scaled_dot_product_attention(q, k, v, torch.ones(2, 6, dtype=torch.bool).tril(4), enable_gqa=True)
    expected = F.linear(heads.transpose(1, 2).flatten(2), double.out_proj.weight, double.out_proj.bias)
    assert out.dtype == module
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 if module == torch.float32 else 2e-2)


def test_layers_do_not_share_slots_of_the_cache():
    layers, x, cache = [make_layer(seed=seed) for seed in (0, 10)], random(2, 5, 16), KVCache(2, 2, 2, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        for piece in x.split([3, 2], dim=1):
            outs = [layer(piece, cache=cache, layer=i) for i, layer in enumerate(layers)]
            cache.advance(piece.shape[1])
    for layer, out in zip(layers, outs):
        assert_close([out], [torch_only(layer, x)[:, 3:].detach()])


def test_the_cache_holds_rotated_keys_and_plain_values_per_key_value_head():
    layer, x, cache = make_layer(), random(2, 3, 16), KVCache(1, 2, 2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        _, k, v = layer.project(x)
        layer(x[:, :2], cache=cache, rope=lambda heads: heads * 2)
        cache.advance(2)
        held_k, held_v = cache.update(0, k[:, :, 2:], v[:, :, 2:])  # what lies before the third position
    assert_close([held_k[:, :, :2], held_v[:, :, :2]], [k[:, :, :2] * 2, v[:, :, :2]])


# ----------------------------------------------------------------------------------------------------- fused backend


def test_fused_builds_no_table_of_T_by_T_when_there_is_no_mask(monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("a T×T mask was built")

    layer, x = make_layer(backend="fused"), random(2, 5, 16)
    expected = layer(x)
    monkeypatch.setattr(tinylm.attention, "causal_mask", forbidden)
    assert layer(x).equal(expected)
    with pytest.raises(AssertionError, match="T×T"):
        make_layer(backend="math")(x)


def test_fused_is_the_kernel_of_torch(monkeypatch):
    calls, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(o) or kernel(*a, **o))
    x = random(2, 5, 16)
    make_layer(backend="math")(x)
    assert not calls
    make_layer(backend="fused")(x)
    assert len(calls) == 1 and calls[0]["is_causal"]


@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("T, S", LENGTHS)
def test_fused_equals_math_in_values_and_gradients(T, S, kind, K):
    mask = mask_of(kind, T, S)
    one, other = (with_gradients(lambda q, k, v: causal_attention(q, k, v, mask, backend), qkv(T, S, 4, K)) for backend in BACKENDS)
    assert_close(one, other)


# ----------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("backend", BACKENDS)
def test_drop_1_eval_is_bit_equal_and_without_dropout(backend):
    layer, x = make_layer(dropout=0.5, backend=backend), random(2, 6, 16)
    assert layer(x).equal(layer(x)) and layer(x).equal(make_layer(backend=backend)(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_training_drops_numbers_of_the_result_and_scales_the_rest(backend):
    layer, x = make_layer(dropout=0.25, backend=backend), random(8, 16, 16)
    plain = layer(x)
    layer.train()
    torch.manual_seed(0)
    out = layer(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], plain[kept] / 0.75, rtol=0, atol=1e-12)
    share = kept.double().mean().item()
    assert abs(share - 0.75) < 5 * math.sqrt(0.25 * 0.75 / kept.numel())  # five standard errors


# ------------------------------------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_graph_break(backend):
    layer = make_layer(backend=backend)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for T in (4, 6):
        x = random(2, T, 16)
        assert_close([compiled(x)], [torch_only(layer, x)])
        assert_close([compiled(x, mask=causal_mask(T))], [torch_only(layer, x)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_under_autocast(backend):
    layer, x = make_layer(backend=backend, dtype=torch.float32), random(2, 6, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask=causal_mask(6))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), rtol=0, atol=3e-2)
