"""What each filter keeps, exactly: against hand numbers, exact fractions, brute-force loops and the processors of `transformers`; and what is drawn.

Sets are compared as sets. A filter that loses one word, or keeps one more, still writes fluent text.
"""
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tinylm import sampling
from tinylm.sampling import draw, filter_min_p, filter_top_k, filter_top_p, next_token, penalize_repetition, token_probabilities

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
INF = math.inf


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def kept(row):
    "The ids that are still possible."
    return {i for i, logit in enumerate(row.tolist()) if logit > -INF}


def rows_of(logits):
    return [kept(row) for row in logits.reshape(-1, logits.shape[-1])]


def log_of(odds, dtype=torch.float64):
    return torch.tensor([float(share) for share in odds], dtype=torch.float64).log().to(dtype)


def distinct(rows, V, seed=0, dtype=torch.float64):
    "Random rows without ties."
    return torch.randn(rows, V, generator=seeded(seed), dtype=torch.float64).to(dtype)


def assert_same(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


# --- exact loops, in fractions ------------------------------------------------------------------------------------------------------------


def likeliest_first(odds):
    return sorted(range(len(odds)), key=lambda i: (-odds[i], i))  # of equals the lower id


def top_k_set(odds, k):
    return set(likeliest_first(odds)[:k])


def top_p_set(odds, p):
    found, before = set(), 0
    for i in likeliest_first(odds):
        if before < p:
            found.add(i)
        before += odds[i]
    return found


def min_p_set(odds, p):
    return {i for i, share in enumerate(odds) if share >= p * max(odds)}


def divided(odds):
    return [Fraction(share, sum(odds)) for share in odds]


# --- top-k --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "logits, k, right",
    [
        ([1, 2, 2, 2, 3], 3, {1, 2, 4}),  # a threshold would keep four
        ([5, 5, 1], 1, {0}),  # a threshold would keep two
        ([1, 5, 5], 1, {1}),
        ([0, 0, 0, 0], 2, {0, 1}),
        ([3, 1, 2], 2, {0, 2}),
        ([3, 1, 2], 3, {0, 1, 2}),
        ([3, 1, 2], 100, {0, 1, 2}),
        ([-INF, 1, -INF, 2], 3, {1, 3}),  # what is out stays out
    ],
)
def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids(logits, k, right, dtype):
    logits = torch.tensor(logits, dtype=dtype)
    found = filter_top_k(logits, k)
    assert kept(found) == right
    assert found.dtype == dtype and found[sorted(right)].equal(logits[sorted(right)])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), st.integers(1, 45))
def test_top_k_equals_the_loop_on_rows_full_of_ties(logits, k):
    assert kept(filter_top_k(torch.tensor(logits, dtype=torch.float32), k)) == top_k_set(logits, k)


@pytest.mark.parametrize("k", [1, 3, 17, 64, 100])
def test_top_k_equals_transformers_where_nothing_is_tied(k):
    rows = distinct(50, 64)
    assert_same(filter_top_k(rows, k), TopKLogitsWarper(k)(None, rows.clone()))


@pytest.mark.parametrize("dtype", HALF)
def test_top_k_keeps_k_of_a_large_half_precision_vocabulary(dtype):
    rows = distinct(3, 20_000, dtype=dtype)
    assert (rows >= rows.topk(500).values[:, -1:]).sum(dim=-1).gt(500).any(), "the rows must have ties at the cut"
    assert filter_top_k(rows, 500).isfinite().sum(dim=-1).tolist() == [500] * 3


def test_top_k_of_one_is_the_argmax_every_time():
    rows = torch.randint(0, 3, (500, 12), generator=seeded(0)).float()
    alone = filter_top_k(rows, 1).softmax(dim=-1)
    assert torch.multinomial(alone, 1, generator=seeded(1)).squeeze(-1).equal(rows.argmax(dim=-1))


# --- top-p --------------------------------------------------------------------------------------------------------------------------------

CROSSING = [
    ((".5", ".3", ".15", ".05"), ".6", {0, 1}),
    ((".5", ".3", ".15", ".05"), ".85", {0, 1, 2}),
    ((".5", ".41", ".09"), ".9", {0, 1}),
    ((".4", ".3", ".2", ".1"), ".8", {0, 1, 2}),
    ((".5", ".35", ".10", ".05"), ".9", {0, 1, 2}),
]
MET_EXACTLY = [
    ((".5", ".3", ".1", ".1"), ".8", {0, 1}),
    ((".4", ".3", ".2", ".1"), ".9", {0, 1, 2}),
    ((".3", ".3", ".3", ".1"), ".6", {0, 1}),
    ((".6", ".3", ".1"), ".9", {0, 1}),
    (("1/2", "1/4", "1/8", "1/16", "1/16"), "3/4", {0, 1}),
    (("1/2", "1/4", "1/8", "1/16", "1/16"), "15/16", {0, 1, 2, 3}),
    ((".25", ".25", ".25", ".25"), ".5", {0, 1}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odds, p, right", CROSSING)
def test_top_p_keeps_the_token_that_crosses(odds, p, right, dtype):
    odds, p = [Fraction(share) for share in odds], Fraction(p)
    assert top_p_set(odds, p) == right
    assert kept(filter_top_p(log_of(odds, dtype), float(p))) == right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odds, p, right", MET_EXACTLY)
def test_top_p_keeps_nothing_more_where_p_is_met_exactly(odds, p, right, dtype):
    odds, p = [Fraction(share) for share in odds], Fraction(p)
    assert top_p_set(odds, p) == right
    assert kept(filter_top_p(log_of(odds, dtype), float(p))) == right


@pytest.mark.parametrize("odds, p, right", CROSSING + MET_EXACTLY)
def test_top_p_names_the_right_ids_of_an_unsorted_row(odds, p, right):
    odds, p = [Fraction(share) for share in odds], Fraction(p)
    for seed in range(5):
        order = torch.randperm(len(odds), generator=seeded(seed)).tolist()
        shuffled = [odds[i] for i in order]
        found = kept(filter_top_p(log_of(shuffled), float(p)))
        assert found == top_p_set(shuffled, p) and sorted(shuffled[i] for i in found) == sorted(odds[i] for i in right)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 3))
def test_top_p_equals_the_exact_loop(shares, fortieths, seconds):
    odds, p = divided(shares), Fraction(fortieths, 40)
    logits = log_of(shares) + seconds  # a shift of all logits means nothing
    assert kept(filter_top_p(logits, float(p))) == (set(range(len(shares))) if p == 1 else top_p_set(odds, p))
    assert kept(filter_top_p(logits.float(), float(p))) == kept(filter_top_p(logits, float(p)))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.77, 0.9, 0.99])
def test_top_p_equals_transformers(p):
    rows = 2 * distinct(50, 64)
    assert_same(filter_top_p(rows, p), TopPLogitsWarper(p)(None, rows.clone()))


def test_top_p_of_a_large_vocabulary_adds_up_in_wide_numbers():
    # 40,000 equal tokens and p = ½: 20,000 are in. A sum in the logits' own half precision stops growing long before.
    for dtype in DTYPES:
        assert filter_top_p(torch.zeros(40_000, dtype=dtype), 0.5).isfinite().sum() == 20_000


def test_top_p_keeps_the_likeliest_however_small_p_is():
    for p in (1e-7, 1e-6, 5e-324):
        assert rows_of(filter_top_p(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 3.0]]), p)) == [{1}, {0}]


def test_top_p_of_one_keeps_all_that_is_possible():
    logits = torch.tensor([0.0, -INF, -200.0, 3.0])
    assert filter_top_p(logits, 1.0).equal(logits) and filter_top_p(logits, 1).equal(logits)


def test_top_p_never_lets_in_what_is_out():
    assert kept(filter_top_p(torch.tensor([0.0, -INF, 1.0, -INF]), 0.999)) == {0, 2}


# --- min-p --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "logits, p, right",
    [
        ([1, 3, 2], 0.3, {1, 2}),  # compared as raw logits, or with p itself, all or one would stay
        ([-1, -3, -2], 0.3, {0, 2}),
        ([1, 3, 2], 0.0, {0, 1, 2}),
        ([1, 3, 2], 1.0, {1}),
        ([3, 1, 3], 1.0, {0, 2}),
        ([-INF, 3, 2], 0.1, {1, 2}),
        ([0, 0, 0, 0, 0, 0], 0.9, {0, 1, 2, 3, 4, 5}),  # 1/6 each: an absolute threshold would empty the row
    ],
)
def test_min_p_measures_by_the_likeliest(logits, p, right, dtype):
    logits = torch.tensor(logits, dtype=dtype)
    found = filter_min_p(logits, p)
    assert kept(found) == right and found.dtype == dtype


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(0, 20))
def test_min_p_equals_the_exact_loop(shares, twentieths):
    for dtype in (torch.float32, torch.float64):
        assert kept(filter_min_p(log_of(shares, dtype), twentieths / 20)) == min_p_set(shares, Fraction(twentieths, 20))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.2, 0.7, 1.0])
def test_min_p_equals_transformers(p):
    rows = 2 * distinct(50, 64)
    assert_same(filter_min_p(rows, p), MinPLogitsWarper(p)(None, rows.clone()))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keep, p", [(filter_top_p, 0.9), (filter_top_p, 0.5), (filter_min_p, 0.3), (filter_min_p, 0.03)])
def test_half_precision_logits_are_judged_by_their_exact_values(keep, p, dtype):
    rows = 3 * distinct(200, 300, dtype=dtype)
    assert rows_of(keep(rows, p)) == rows_of(keep(rows.double(), p))


# --- repetition penalty ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_penalty_multiplies_negative_logits_and_counts_an_id_once(dtype):
    logits, ids = torch.tensor([2, -2, 0, 1], dtype=dtype), torch.tensor([0, 1, 2, 0, 0])
    right = torch.tensor([4 / 3, -3, 0, 1], dtype=torch.float64).to(dtype)
    found = penalize_repetition(logits, ids, 1.5)
    assert found.equal(right) and found.dtype == dtype
    assert penalize_repetition(logits, ids.int(), 1.5).equal(right)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_the_penalty_equals_transformers(penalty):
    logits, ids = distinct(20, 30), torch.randint(30, (20, 12), generator=seeded(1))
    assert_same(penalize_repetition(logits, ids, penalty), RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()))


def test_the_penalty_leaves_out_what_is_out_and_nothing_said_changes_nothing():
    logits = torch.tensor([-INF, 2.0, 1.0])
    assert penalize_repetition(logits, torch.tensor([0, 1]), 2.0).tolist() == [-INF, 1.0, 1.0]
    assert penalize_repetition(logits, torch.tensor([], dtype=torch.long), 2.0).equal(logits)


# --- all of them ----------------------------------------------------------------------------------------------------------------------------



def penalize_id_0(logits):
    rows = tuple(getattr(logits, "shape", ()))[:-1]
    return penalize_repetition(logits, torch.zeros(*rows, 2, dtype=torch.long), 1.5)


FILTERS = {"top-k": lambda x: filter_top_k(x, 3), "top-p": lambda x: filter_top_p(x, 0.7), "min-p": lambda x: filter_min_p(x, 0.4), "penalty": penalize_id_0}
by_filter = pytest.mark.parametrize("keep", FILTERS.values(), ids=FILTERS.keys())


@by_filter
@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 7), (2, 3, 7), (4, 1), (1,)])
def test_each_row_is_treated_alone_in_any_shape(keep, shape):
    logits = torch.randn(shape, generator=seeded(3))
    found = keep(logits)
    assert found.shape == shape
    flat = logits.reshape(-1, shape[-1])
    assert found.equal(torch.stack([keep(row) for row in flat]).reshape(shape))


@by_filter
def test_the_logits_given_are_not_changed(keep):
    logits = torch.randn(4, 9, generator=seeded(4))
    before = logits.clone()
    keep(logits)
    assert logits.equal(before)


@by_filter
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF], ids=["nan", "inf", "all minus inf"])
def test_rows_that_are_no_distribution_are_refused(keep, bad):
    logits = torch.zeros(3, 4)
    logits[1] = bad if bad == -INF else logits[1]
    logits[1, 2] = bad
    for function in (keep, token_probabilities, lambda x: token_probabilities(x, temperature=0)):
        with pytest.raises(ValueError, match="logits=-?(nan|inf)"):
            function(logits)


@by_filter
def test_logits_of_another_kind_are_refused(keep):
    for logits, error in (([1.0, 2.0], TypeError), (torch.tensor([1, 2]), TypeError), (torch.tensor([True, False]), TypeError),
                          (torch.tensor(1.0), ValueError), (torch.zeros(2, 0), ValueError)):
        for function in (keep, token_probabilities):
            with pytest.raises(error, match="logits"):
                function(logits)


BAD_SETTINGS = [
    ("top_k", 0, ValueError), ("top_k", -1, ValueError), ("top_k", 2.0, TypeError), ("top_k", True, TypeError), ("top_k", "3", TypeError),
    ("top_p", 0, ValueError), ("top_p", -0.1, ValueError), ("top_p", 1.0001, ValueError), ("top_p", float("nan"), ValueError),
    ("top_p", "0.9", TypeError), ("top_p", True, TypeError),
    ("min_p", -0.1, ValueError), ("min_p", 1.5, ValueError), ("min_p", float("nan"), ValueError), ("min_p", [0.1], TypeError),
    ("repetition_penalty", 0, ValueError), ("repetition_penalty", -1.0, ValueError), ("repetition_penalty", INF, ValueError),
    ("repetition_penalty", float("nan"), ValueError), ("repetition_penalty", "1.1", TypeError),
    ("temperature", -1e-9, ValueError), ("temperature", INF, ValueError), ("temperature", float("nan"), ValueError),
    ("temperature", "hot", TypeError), ("temperature", None, TypeError),
]


@pytest.mark.parametrize("name, value, error", BAD_SETTINGS)
def test_a_setting_out_of_range_is_named_with_its_value(name, value, error):
    with pytest.raises(error) as caught:
        token_probabilities(torch.zeros(2, 4), ids=torch.zeros(2, 1, dtype=torch.long), **{name: value})
    assert name in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize(
    "ids, error",
    [
        (None, TypeError), (torch.tensor([[0.0], [1.0]]), TypeError), ([[0], [1]], TypeError),
        (torch.tensor([0, 1]), ValueError), (torch.tensor([[0]]), ValueError), (torch.tensor(0), ValueError),
        (torch.tensor([[0], [4]]), ValueError), (torch.tensor([[0], [-1]]), ValueError),
    ],
)
def test_ids_that_do_not_belong_to_the_logits_are_refused(ids, error):
    for call in (lambda: penalize_repetition(torch.zeros(2, 4), ids, 1.5), lambda: token_probabilities(torch.zeros(2, 4), ids=ids, repetition_penalty=1.5)):
        with pytest.raises(error, match="ids"):
            call()


class NoFloat64(TorchDispatchMode):
    "Fails if any operation makes a float64 tensor on a device that is not the CPU."

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                assert tensor.dtype != torch.float64, f"{function} makes float64 on {tensor.device}"
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_float64_is_asked_of_a_device_that_may_not_have_it(dtype, monkeypatch):
    for check in ("check_logits", "check_said"):  # they read values, and the meta device has none
        monkeypatch.setattr(sampling, check, lambda *_: None)
    logits, ids = torch.zeros(2, 9, dtype=dtype, device="meta"), torch.zeros(2, 3, dtype=torch.long, device="meta")
    with NoFloat64():
        for temperature in (0, 0.7):
            p = token_probabilities(logits, ids=ids, temperature=temperature, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
            assert p.shape == (2, 9) and p.dtype == torch.float32
        with pytest.raises(AssertionError, match="float64"):
            logits.double()


# --- token_probabilities --------------------------------------------------------------------------------------------------------------------

HALVES = [Fraction(1, n) for n in (2, 4, 8, 16, 16)]


@pytest.mark.parametrize(
    "settings, right",
    [
        (dict(), HALVES),
        (dict(temperature=0.5), [Fraction(n, 86) for n in (64, 16, 4, 1, 1)]),
        (dict(temperature=0.25), [Fraction(n**4, 69920) for n in (16, 8, 4, 2, 2)]),
        (dict(temperature=0), [1, 0, 0, 0, 0]),
        (dict(top_k=2), [Fraction(2, 3), Fraction(1, 3), 0, 0, 0]),
        (dict(top_p=0.8), [Fraction(4, 7), Fraction(2, 7), Fraction(1, 7), 0, 0]),
        (dict(top_p=0.75), [Fraction(2, 3), Fraction(1, 3), 0, 0, 0]),
        (dict(min_p=0.25), [Fraction(4, 7), Fraction(2, 7), Fraction(1, 7), 0, 0]),
        (dict(top_p=0.8, temperature=0.5), [Fraction(16, 21), Fraction(4, 21), Fraction(1, 21), 0, 0]),
        (dict(top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),  # ⅔ of what top-k left is enough; of the whole row ½ would not be
        (dict(top_p=0.75, min_p=0.6), [1, 0, 0, 0, 0]),
    ],
)
def test_the_powers_of_two_by_hand(settings, right):
    p = token_probabilities(log_of(HALVES), **settings)
    assert_same(p, torch.tensor([float(share) for share in right], dtype=torch.float64))


@pytest.mark.parametrize(
    "logits, settings, right",
    [([3, 2, 1], dict(top_p=0.8, temperature=0.5), {0, 1}), ([3, 1, 0], dict(min_p=0.1, temperature=2.0), {0, 1})],
)
def test_the_filters_see_the_odds_before_the_temperature(logits, settings, right):
    p = token_probabilities(torch.tensor(logits, dtype=torch.float64), **settings)
    assert {i for i, share in enumerate(p.tolist()) if share > 0} == right


def test_the_whole_pipeline_equals_the_processors_of_transformers_in_our_order():
    V, B = 40, 60
    for seed in range(6):
        rows, ids = 3 * distinct(B, V, seed), torch.randint(V, (B, 10), generator=seeded(seed))
        penalty, k, p, m, tau = [(1.3, 20, 0.9, 0.05, 0.7), (1.0, 5, 0.5, 0.2, 1.5), (0.8, 39, 0.99, 0.01, 3.0),
                                 (2.0, 1, 0.3, 0.5, 0.1), (1.1, 40, 0.8, 0.3, 1.0), (1.2, 10, 0.95, 0.9, 0.01)][seed]
        theirs = rows.clone()
        for processor in (RepetitionPenaltyLogitsProcessor(penalty), TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(m), TemperatureLogitsWarper(tau)):
            theirs = processor(ids, theirs)
        ours = token_probabilities(rows, ids=ids, temperature=tau, top_k=k, top_p=p, min_p=m, repetition_penalty=penalty)
        assert_same(ours, theirs.softmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits, right", [([1, 3, 3, 2], 1), ([2, 2], 0), ([-INF, -5, -5], 1), ([0], 0)])
def test_temperature_zero_is_the_argmax_and_of_equals_the_lower_id(logits, right, dtype):
    p = token_probabilities(torch.tensor(logits, dtype=dtype), temperature=0)
    assert p.tolist() == [float(i == right) for i in range(len(logits))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-40, 1e-8, 1e-3])
def test_a_tiny_temperature_is_no_division_by_zero(temperature, dtype):
    p = token_probabilities(torch.tensor([1, 3, 2, 3], dtype=dtype), temperature=temperature)
    assert p.tolist() == [0, 0.5, 0, 0.5]  # two best ones share, however cold it is
    p = token_probabilities(torch.tensor([6e4, -6e4], dtype=dtype), temperature=temperature)
    assert p.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e39, 1e308])
def test_a_huge_temperature_makes_all_equal_and_lets_nothing_in(temperature, dtype):
    p = token_probabilities(torch.tensor([1, 3, -INF, 2], dtype=dtype), temperature=temperature)
    assert_same(p.double(), torch.tensor([1 / 3, 1 / 3, 0, 1 / 3], dtype=torch.float64), atol=1e-5)
    p = token_probabilities(torch.tensor([1, 3, 0, 2], dtype=dtype), temperature=temperature, top_k=2)
    assert_same(p.double(), torch.tensor([0, 0.5, 0, 0.5], dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("dtype, out", [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_probabilities_are_at_least_float32(dtype, out, temperature):
    logits = distinct(5, 50, dtype=dtype)
    p = token_probabilities(logits, temperature=temperature, top_p=0.9)
    assert p.dtype == out
    exact = token_probabilities(logits.double(), temperature=temperature, top_p=0.9)
    assert_same(p.double(), exact, atol=1e-12 if out == torch.float64 else 1e-6)  # not merely to bfloat16's three digits


def test_the_temperature_changes_no_order_and_one_changes_nothing():
    rows = distinct(20, 30)
    order = rows.argsort(dim=-1)
    for tau in (0.3, 1.0, 5.0):
        assert token_probabilities(rows, temperature=tau).argsort(dim=-1).equal(order)
    assert_same(token_probabilities(rows), rows.softmax(dim=-1))


# --- draws ----------------------------------------------------------------------------------------------------------------------------------


def chance_of_more(statistic, degrees):
    "P(χ² > statistic) in closed form, for an even number of degrees of freedom."
    half = statistic / 2
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))


def chi_square(counts, odds):
    n = sum(counts)
    return sum((count - n * share) ** 2 / (n * share) for count, share in zip(counts, odds))


def draws(logits, n, seed, **settings):
    rows = torch.tensor(logits, dtype=torch.float64).expand(n, -1)
    return next_token(rows, None, generator=seeded(seed), **settings).bincount(minlength=len(logits)).tolist()


@pytest.mark.parametrize(
    "settings, odds",
    [
        (dict(top_p=0.8), [4 / 7, 2 / 7, 1 / 7, 0, 0]),
        (dict(top_p=0.8, temperature=0.5), [16 / 21, 4 / 21, 1 / 21, 0, 0]),
        (dict(), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16]),
        (dict(temperature=0.5), [64 / 86, 16 / 86, 4 / 86, 1 / 86, 1 / 86]),
        (dict(min_p=0.25, temperature=1e9), [1 / 3, 1 / 3, 1 / 3, 0, 0]),
    ],
)
def test_draws_have_the_odds_that_were_asked_for(settings, odds):
    counts = draws(log_of(HALVES).tolist(), 7000, seed=0, **{"temperature": 1.0, **settings})
    possible = [i for i, share in enumerate(odds) if share]
    assert sum(counts[i] for i in possible) == 7000, "something was drawn that is out"
    statistic = chi_square([counts[i] for i in possible], [odds[i] for i in possible])
    assert chance_of_more(statistic, len(possible) - 1) > 1e-3


def test_the_statistic_would_notice_odds_that_are_a_little_wrong():
    counts = draws(log_of(HALVES).tolist(), 7000, seed=0, temperature=0.85)
    assert chance_of_more(chi_square(counts, [float(share) for share in HALVES]), 4) < 1e-6


def test_what_has_no_probability_is_never_drawn():
    # searchsorted over the running sum, a usual way to draw, gives index 0 for u = 0 even if it is ruled out.
    assert torch.searchsorted(torch.tensor([0.0, 1.0]), torch.tensor([0.0])).item() == 0
    rows = torch.tensor([0.0, 1.0, 0.0, 1e-30, 0.0]).expand(200_000, -1)
    assert set(draw(rows, seeded(0)).tolist()) <= {1, 3}


def test_greedy_uses_no_random_number():
    rows, generator = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]]), seeded(0)
    own, common = generator.get_state(), torch.get_rng_state()
    assert next_token(rows, None, temperature=0, generator=generator).tolist() == [1, 0]
    assert next_token(rows, None, temperature=0.0).tolist() == [1, 0]
    assert generator.get_state().equal(own) and torch.get_rng_state().equal(common)
    next_token(rows, None, temperature=1.0, generator=generator)
    assert not generator.get_state().equal(own) and torch.get_rng_state().equal(common)


def test_a_row_with_its_own_generator_draws_what_it_would_alone():
    p = distinct(4, 30).softmax(dim=-1)
    for _ in range(20):
        generators, singles = [[seeded(s) for s in (3, 1, 4, 5)] for _ in range(2)]
        for _ in range(3):
            together = draw(p, generators)
            assert together.tolist() == [draw(p[b : b + 1], singles[b]).item() for b in range(4)]
    assert together.shape == (4,) and draw(p, seeded(0)).shape == (4,)
