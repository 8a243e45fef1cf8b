"""Chapter 02: rotations against complex numbers and other libraries, tables against float64, positions behind a cache."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

from tinylm.attention import CausalSelfAttention
from tinylm.kv_cache import KVCache
from tinylm.positions import apply_rope, rope_table, sinusoidal_table

HALF_SPLIT = [-1.984111, 1.959901, 2.462378, 4.019800]  # (1, 2, 3, 4) at position 1, pairs 0-2 and 1-3
INTERLEAVED = [-1.142640, 1.922076, 2.959851, 4.029800]  # the same, pairs 0-1 and 2-3


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def complex_rotation(x, first_position, theta):
    "numpy, float64: pair (i, i + D/2) as one complex number times e^(i p ω)."
    D = x.shape[-1]
    omega = theta ** (-2 * np.arange(D // 2) / D)
    turn = np.exp(1j * (first_position + np.arange(x.shape[-2]))[:, None] * omega)
    z = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def score(q, k, m, n, table):
    cos, sin = table
    return (apply_rope(q, cos[m : m + 1], sin[m : m + 1]) * apply_rope(k, cos[n : n + 1], sin[n : n + 1])).sum().item()


@pytest.mark.parametrize("D", [2, 4, 6, 64])
@pytest.mark.parametrize("theta", [10.0, 10000.0, 1e6])
def test_rotation_is_multiplication_by_a_complex_number(D, theta):
    x = random(2, 3, 9, D)
    cos, sin = rope_table(20, D, theta, dtype=torch.float64)
    ours = apply_rope(x, cos[5:14], sin[5:14])
    np.testing.assert_allclose(ours.numpy(), complex_rotation(x.numpy(), 5, theta), rtol=0, atol=1e-12)


@pytest.mark.parametrize("D", [2, 8, 64])
def test_rotation_is_that_of_llama(D):
    q, k = random(2, 4, 7, D), random(2, 2, 7, D, seed=1)
    cos, sin = rope_table(7, D, dtype=torch.float64)
    theirs = llama_rope(q, k, *(torch.cat((table, table), -1)[None] for table in (cos, sin)))
    for ours, reference in zip((apply_rope(q, cos, sin), apply_rope(k, cos, sin)), theirs):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-14)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_table_is_that_of_llama_where_its_float32_angles_are_good(theta):
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": theta})
    theirs = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(64)[None])
    for ours, reference in zip(rope_table(64, 32, theta), theirs):
        torch.testing.assert_close(torch.cat((ours, ours), -1)[None], reference, rtol=0, atol=1e-5)


def test_half_split_pairs_are_pinned():
    cos, sin = rope_table(2, 4)
    assert apply_rope(torch.tensor([[1.0, 2, 3, 4]]), cos[1:], sin[1:])[0].tolist() == pytest.approx(HALF_SPLIT, abs=2e-6)


def test_interleaved_pairs_are_the_permuted_half_split():
    order, back = [0, 2, 1, 3], [0, 2, 1, 3]
    cos, sin = rope_table(2, 4, dtype=torch.float64)
    x = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float64)
    by_permutation = apply_rope(x[:, order], cos[1:], sin[1:])[:, back]
    reference = gptj_rope(x[None, :, None], sin[None, 1:], cos[None, 1:]).flatten()
    assert by_permutation[0].tolist() == pytest.approx(INTERLEAVED, abs=1e-6)
    torch.testing.assert_close(by_permutation[0], reference, rtol=0, atol=1e-14)


@pytest.mark.parametrize("D", [8, 16])
def test_interleaved_weights_need_their_rows_permuted(D):
    order = [*range(0, D, 2), *range(1, D, 2)]
    x = random(1, 1, 5, D)
    cos, sin = rope_table(5, D, dtype=torch.float64)
    reference = gptj_rope(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    torch.testing.assert_close(apply_rope(x[..., order], cos, sin), reference[..., order], rtol=0, atol=1e-14)


def test_foreign_scores_agree_if_permuted_and_only_then():
    # Either pairing is a rotation; what breaks is to mix them.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    q, k = random(1, 1, 5, 8), random(1, 1, 5, 8, seed=1)
    cos, sin = rope_table(5, 8, dtype=torch.float64)
    theirs_q, theirs_k = (gptj_rope(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2) for x in (q, k))
    theirs = theirs_q @ theirs_k.mT
    torch.testing.assert_close(theirs_q.norm(dim=-1), q.norm(dim=-1), rtol=0, atol=1e-13)  # so norms cannot tell the two apart
    permuted = apply_rope(q[..., order], cos, sin) @ apply_rope(k[..., order], cos, sin).mT
    torch.testing.assert_close(permuted, theirs, rtol=0, atol=1e-13)
    assert (apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).mT - theirs).abs().max() > 0.1


def test_two_integers_look_one_word_back():
    # q = (16, 0, 0, 0), k = (4, 0, 6, 0) at every position, scale 1/2: row 5 on paper is 8·√52·cos(5 − n − atan2(6, 4)).
    cos, sin = rope_table(6, 4, dtype=torch.float64)
    q, k = (torch.tensor([pair], dtype=torch.float64).expand(6, 4) for pair in ([16, 0, 0, 0], [4, 0, 6, 0]))
    row = (apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).mT / 2)[5]
    assert row.tolist() == pytest.approx([-36.95, -57.24, -24.91, 30.33, 57.68, 32.00], abs=5e-3)
    assert row.tolist() == pytest.approx([8 * math.sqrt(52) * math.cos(5 - n - math.atan2(6, 4)) for n in range(6)], abs=1e-12)


@pytest.mark.parametrize("m, n", [(5, 3), (102, 100), (100_002, 100_000)])
def test_a_score_depends_on_the_distance_only(m, n):
    q, k = random(1, 64), random(1, 64, seed=1)
    table = rope_table(100_003, 64, dtype=torch.float64)
    assert score(q, k, m, n, table) == pytest.approx(score(q, k, 2, 0, table), abs=1e-9)
    assert score(q, k, m, n, table) != pytest.approx(score(q, k, m, n - 1, table), abs=1e-3)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 300), st.sampled_from([2, 4, 10]))
def test_moving_both_moves_nothing(m, n, shift, D):
    q, k = random(1, D), random(1, D, seed=1)
    table = rope_table(501, D, dtype=torch.float64)
    assert score(q, k, m + shift, n + shift, table) == pytest.approx(score(q, k, m, n, table), abs=1e-10)


def test_lengths_are_kept_and_position_0_changes_nothing():
    x = random(2, 3, 50, 16)
    cos, sin = rope_table(50, 16, dtype=torch.float64)
    turned = apply_rope(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-12)
    assert torch.equal(turned[..., 0, :], x[..., 0, :]) and not torch.allclose(turned[..., 1:, :], x[..., 1:, :])


def test_the_gradient_is_turned_back():
    x, upstream = random(2, 2, 7, 6).requires_grad_(), random(2, 2, 7, 6, seed=1)
    cos, sin = rope_table(7, 6, dtype=torch.float64)
    apply_rope(x, cos, sin).backward(upstream)
    back = complex_rotation(upstream.flip(-2).numpy(), -6, 10000.0)[..., ::-1, :]  # positions −6 … 0, then put in order
    np.testing.assert_allclose(x.grad.numpy(), back, rtol=0, atol=1e-14)


def test_rope_table_closed_form():
    cos, sin = rope_table(3, 4, 10000.0, dtype=torch.float64)
    assert cos.shape == sin.shape == (3, 2)
    for p in range(3):
        for i, omega in enumerate((1.0, 0.01)):
            assert (cos[p, i].item(), sin[p, i].item()) == pytest.approx((math.cos(p * omega), math.sin(p * omega)), abs=1e-15)


def test_the_table_is_cast_last_and_stays_right_far_out():
    positions = [256, 257, 1857, 65_535, 99_999]
    for dtype, bound in ((torch.float32, 6e-8), (torch.float16, 4e-4), (torch.bfloat16, 4e-3)):
        cos, sin = rope_table(100_000, 32, dtype=dtype)
        truth = torch.tensor(positions, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        assert (cos[positions].double() - truth.cos()).abs().max() <= bound
        assert (sin[positions].double() - truth.sin()).abs().max() <= bound
        assert cos.dtype == sin.dtype == dtype


def test_positions_256_and_257_do_not_collide_in_bfloat16():
    cos, sin = rope_table(258, 8, dtype=torch.bfloat16)
    assert not torch.equal(cos[256], cos[257]) and not torch.equal(sin[256], sin[257])


def angles_in(dtype, n, D):
    "The fault that other libraries had: positions, frequencies and their product in one narrow dtype."
    omega = (10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)).to(dtype)
    return torch.arange(n).to(dtype)[:, None] * omega


@pytest.mark.parametrize(
    "dtype, angle, cosine_off_by, rounding",
    [(torch.float32, 1044.268, 0, 2**-25), (torch.float16, 1045, 0.77, 2**-12), (torch.bfloat16, 1040, 1.99, 2**-9)],
)
def test_2048_positions_are_off_by_rounding_where_narrow_angles_are_lost(dtype, angle, cosine_off_by, rounding):
    narrow = angles_in(dtype, 2048, 32)
    truth = np.arange(2048)[:, None] * 10000.0 ** (-np.arange(0, 32, 2) / 32)
    assert narrow[1857, 1].item() == pytest.approx(angle, abs=1e-3)  # 1044.267… is right
    assert np.abs(narrow.double().cos().numpy() - np.cos(truth)).max() > cosine_off_by  # the fault would be seen here
    for ours, exact in zip(rope_table(2048, 32, dtype=dtype), (np.cos(truth), np.sin(truth))):
        assert np.abs(ours.double().numpy() - exact).max() <= rounding * 1.001  # torch rounds to 16 bits by way of float32


def test_rounded_frequencies_are_seen_within_600_positions():
    truth = np.arange(600)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    rounded = np.arange(600)[:, None] * torch.tensor(10000.0 ** (-np.arange(0, 8, 2) / 8)).bfloat16().double().numpy()
    assert np.abs(np.cos(rounded) - np.cos(truth)).max() > 0.05
    assert torch.equal(*angles_in(torch.bfloat16, 258, 8)[256:])  # the whole row, for two positions
    cos, _ = rope_table(600, 8, dtype=torch.bfloat16)
    assert np.abs(cos.double().numpy() - np.cos(truth)).max() < 0.002


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_dtype_is_input_dtype_and_no_narrow_arithmetic(dtype):
    x = random(1, 2, 300, 8).to(dtype)
    ours = apply_rope(x, *rope_table(300, 8))
    truth = complex_rotation(x.double().numpy(), 0, 10000.0)
    assert ours.dtype == dtype
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    np.testing.assert_allclose(ours.double().numpy(), truth, rtol=rounding, atol=4 * 1.2e-7)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_table_never_decides_the_output_dtype(dtype, table_dtype):
    ours = apply_rope(random(1, 2, 5, 8).to(dtype), *rope_table(5, 8, dtype=table_dtype))
    assert ours.dtype == dtype
    rounding = 4 * max(torch.finfo(dtype).eps, torch.finfo(table_dtype).eps)
    np.testing.assert_allclose(ours.double().numpy(), complex_rotation(random(1, 2, 5, 8).numpy(), 0, 10000.0), rtol=0, atol=2 * rounding)


@pytest.mark.parametrize("axes", [(), (1,), (1, 1), (3, 1)])
def test_one_table_for_all_rows_may_carry_broadcast_axes(axes):
    x, table = random(3, 2, 4, 8), rope_table(4, 8, dtype=torch.float64)
    assert torch.equal(apply_rope(x, *(t.expand(*axes, 4, 4) for t in table)), apply_rope(x, *table))


def test_no_positions_and_no_words_are_fine():
    cos, sin = rope_table(0, 4)
    assert cos.shape == sin.shape == (0, 2) and sinusoidal_table(0, 4).shape == (0, 4)
    assert apply_rope(torch.ones(2, 3, 0, 4), cos, sin).shape == (2, 3, 0, 4)


def test_rows_may_stand_at_different_positions():
    x = random(3, 2, 4, 8)
    cos, sin = rope_table(20, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10], [0, 0, 0, 1]])
    together = apply_rope(x, cos[positions][:, None], sin[positions][:, None])
    for row, places in enumerate(positions):
        assert torch.equal(together[row : row + 1], apply_rope(x[row : row + 1], cos[places], sin[places]))


def attention_with_rope(first_position, T):
    cos, sin = rope_table(32, 8, dtype=torch.float64)
    places = slice(first_position, first_position + T)
    return partial(apply_rope, cos=cos[places], sin=sin[places])


def test_positions_go_on_after_the_cache():
    torch.manual_seed(0)
    layer, x = CausalSelfAttention(16, 2).double(), random(1, 8, 16)
    whole = layer(x, rope=attention_with_rope(0, 8))

    def in_two_pieces(second_start):
        cache = KVCache(1, 1, 2, 8, 8, dtype=torch.float64)
        first = layer(x[:, :5], rope=attention_with_rope(0, 5), cache=cache)
        cache.advance(5)
        return torch.cat((first, layer(x[:, 5:], rope=attention_with_rope(second_start, 3), cache=cache)), dim=1)

    with torch.no_grad():
        torch.testing.assert_close(in_two_pieces(5), whole, rtol=0, atol=1e-12)
        for restart in (0, 10):  # from the beginning again; the prompt counted twice
            assert (in_two_pieces(restart) - whole).abs().max() > 1e-3


def test_one_word_at_a_time_stands_where_the_cache_ends():
    torch.manual_seed(0)
    layer, x = CausalSelfAttention(16, 2, 1).double().requires_grad_(False), random(2, 7, 16)
    cache, steps = KVCache(1, 2, 1, 7, 8, dtype=torch.float64), []
    for t in range(7):
        assert cache.length == t
        steps.append(layer(x[:, t : t + 1], rope=attention_with_rope(cache.length, 1), cache=cache))
        cache.advance(1)
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(x, rope=attention_with_rope(0, 7)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [7, 24])
def test_moving_all_positions_changes_no_output(start):
    torch.manual_seed(0)
    layer, x = CausalSelfAttention(16, 2).double(), random(1, 8, 16)
    torch.testing.assert_close(layer(x, rope=attention_with_rope(start, 8)), layer(x, rope=attention_with_rope(0, 8)), rtol=0, atol=1e-12)


def test_words_in_another_order_are_another_text_only_with_positions():
    torch.manual_seed(0)
    layer, x = CausalSelfAttention(16, 2).double().requires_grad_(False), random(1, 8, 16)
    swapped = x[:, [4, 1, 2, 3, 0, 5, 6, 7]]
    torch.testing.assert_close(layer(swapped)[:, -1], layer(x)[:, -1], rtol=0, atol=1e-12)
    rope = attention_with_rope(0, 8)
    assert (layer(swapped, rope=rope) - layer(x, rope=rope))[:, -1].abs().max() > 1e-3


def test_angles_stay_on_the_cpu_in_float64_whatever_the_default_device():
    with torch.device("meta"):
        tables = (*rope_table(9, 4, dtype=torch.float64), sinusoidal_table(9, 4))
    assert all(table.device.type == "cpu" for table in tables)
    assert torch.equal(tables[0], rope_table(9, 4, dtype=torch.float64)[0])


class SeenTensors(TorchDispatchMode):
    "Which (dtype, device type) any operation made."

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {(leaf.dtype, leaf.device.type) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def test_no_float64_is_ever_asked_of_a_device():
    # Many accelerators have no float64; "meta" stands in for one of them.
    with torch.device("meta"), SeenTensors() as mode:
        cos, sin = (table.to("meta") for table in rope_table(5, 8))
        rotated = apply_rope(torch.empty(1, 2, 5, 8), cos, sin)
        sinusoidal_table(5, 8).to("meta")
    assert rotated.device.type == "meta"
    assert (torch.float64, "cpu") in mode.seen and (torch.float32, "meta") in mode.seen  # it watched
    assert {device for dtype, device in mode.seen if dtype == torch.float64} == {"cpu"}


def test_the_angles_of_a_float32_default_are_float64():
    cos, _ = rope_table(100_000, 64, dtype=torch.float64)
    assert cos[99_999, 0].item() == pytest.approx(math.cos(99_999), abs=1e-12)


@pytest.mark.parametrize("n, C", [(1, 2), (5, 4), (40, 64)])
def test_sinusoidal_table_is_the_papers_formula(n, C):
    reference = np.array([[(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / C)) for c in range(C)] for p in range(n)])
    table = sinusoidal_table(n, C)
    assert table.dtype == torch.float32 and table.shape == (n, C)
    np.testing.assert_allclose(table.numpy(), reference, rtol=0, atol=6e-8)


def test_sinusoidal_table_is_right_far_out():
    row = sinusoidal_table(100_000, 64)[99_999].tolist()
    angles = [99_999 * 10000 ** (-2 * i / 64) for i in range(32)]
    assert row == pytest.approx([f(angle) for angle in angles for f in (math.sin, math.cos)], abs=6e-8)


def test_sinusoidal_rows_know_their_distance():
    table = sinusoidal_table(109, 64).double()
    assert (table[3] @ table[8]).item() == pytest.approx(23.504, abs=1e-3)
    assert (table[103] @ table[108]).item() == pytest.approx((table[3] @ table[8]).item(), abs=1e-4)


@pytest.mark.parametrize(
    "call, error, named",
    [
        (lambda: rope_table(4, 3), ValueError, "head_dim=3"),
        (lambda: rope_table(4, 0), ValueError, "head_dim=0"),
        (lambda: rope_table(4, -2), ValueError, "head_dim=-2"),
        (lambda: rope_table(4, 4.0), TypeError, "head_dim=4.0"),
        (lambda: rope_table(True, 4), TypeError, "n_positions=True"),
        (lambda: rope_table(-1, 4), ValueError, "n_positions=-1"),
        (lambda: rope_table(2.0, 4), TypeError, "n_positions=2.0"),
        (lambda: rope_table(4, 4, 0.0), ValueError, "theta=0.0"),
        (lambda: rope_table(4, 4, -1e4), ValueError, "theta=-10000.0"),
        (lambda: rope_table(4, 4, math.inf), ValueError, "theta=inf"),
        (lambda: rope_table(4, 4, math.nan), ValueError, "theta=nan"),
        (lambda: rope_table(4, 4, "far"), TypeError, "theta='far'"),
        (lambda: rope_table(4, 4, dtype=torch.int64), TypeError, "dtype=torch.int64"),
        (lambda: sinusoidal_table(4, 5), ValueError, "d_model=5"),
        (lambda: sinusoidal_table(4, 0), ValueError, "d_model=0"),
        (lambda: sinusoidal_table(-2, 4), ValueError, "n_positions=-2"),
        (lambda: sinusoidal_table(2.5, 4), TypeError, "n_positions=2.5"),
        (lambda: apply_rope(torch.ones(1, 1, 3, 4), *rope_table(4, 4)), ValueError, r"\(4, 2\)"),
        (lambda: apply_rope(torch.ones(1, 1, 4, 6), *rope_table(4, 4)), ValueError, r"\(1, 1, 4, 6\)"),
        (lambda: apply_rope(torch.ones(1, 1, 4, 4), rope_table(4, 4)[0], rope_table(3, 4)[1]), ValueError, r"\(3, 2\)"),
        (lambda: apply_rope(torch.ones(4, 4, dtype=torch.int64), *rope_table(4, 4)), TypeError, "torch.int64"),
        (lambda: apply_rope(torch.ones(1, 1, 4, 5), *rope_table(4, 4)), ValueError, r"\(1, 1, 4, 5\)"),
        (lambda: apply_rope(torch.ones(1, 1, 3, 4), *rope_table(1, 4)), ValueError, r"\(1, 2\)"),  # one row, for every word?
        (lambda: apply_rope(torch.ones(4), *rope_table(1, 4)), ValueError, r"\(4,\)"),
        (lambda: apply_rope(torch.ones(2, 2, 3, 4), *(t.expand(2, 3, 2) for t in rope_table(3, 4))), ValueError, r"\(2, 3, 2\)"),  # as if per head
        (lambda: apply_rope(torch.ones(2, 2, 3, 4), *(t.expand(2, 2, 3, 2) for t in rope_table(3, 4))), ValueError, r"\(2, 2, 3, 2\)"),
        (lambda: apply_rope(torch.ones(1, 2, 3, 4), *(t.expand(3, 1, 3, 2) for t in rope_table(3, 4))), ValueError, r"\(3, 1, 3, 2\)"),  # would grow x
    ],
)
def test_bad_input_is_named(call, error, named):
    with pytest.raises(error, match=named):
        call()
