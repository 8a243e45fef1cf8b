"""Chapter 12 plants fifty faults and four controls. What it claims of them is found again here by other means: `transformers`, autograd, counting.

The faults stand in the notebook, which exports no module, so its defining cells are run.
"""
import ast
import inspect
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from test_model_references import build, llama
from tinylm.kv_cache import KVCache
from tinylm.transformer import kite_model

NOTEBOOK = Path(__file__).parent.parent / "nbs" / "12_bug_zoo.ipynb"
KITE_SENTENCE, KITE = torch.tensor([[0, 1, 3, 2, 4, 1]]), 3
LEAKS = {"no mask", "sees next", "mask inverted", "blocked by −10, not −∞", "mask after softmax", "softmax over queries",
         "merged without transpose", "split without transpose", "norm over the whole text"}


def defined_by_the_notebook():
    "Its imports, and what it defines up to the first thing it measures on the whole zoo; pictures are left out."
    names = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "plt.show()" in source:
            continue
        if "def largest_error(" in source:
            return names
        if "def kite_notices(" not in source and "WHY =" not in source:
            exec(compile(source, "12_bug_zoo", "exec"), names)
    raise AssertionError("the notebook has no cell that defines largest_error")


ZOO = defined_by_the_notebook()
FAULTS, CONTROLS, planted = ZOO["FAULTS"], ZOO["CONTROLS"], ZOO["planted"]
by_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
by_control = pytest.mark.parametrize("fault", CONTROLS, ids=lambda fault: fault.name)


@torch.no_grad()
def read(model, ids, sizes=None):
    "The logits of all words: at once, or in passes of these sizes through a cache."
    if sizes is None:
        return model(ids)
    cache, ends = KVCache.for_model(model, len(ids), ids.shape[1]), list(itertools.accumulate(sizes))
    return torch.cat([model(ids[:, end - size : end], cache=cache) for size, end in zip(sizes, ends)], dim=1)


# --- the switch -----------------------------------------------------------------------------------------------------------------------------


@by_fault
def test_a_fault_is_planted_in_its_function_and_gone_afterwards_also_after_an_exception(fault):
    whole = fault.function.__code__
    with pytest.raises(ZeroDivisionError), planted(fault):
        assert fault.function.__code__.co_code != whole.co_code or fault.function.__code__.co_consts != whole.co_consts or \
            fault.function.__code__.co_names != whole.co_names
        1 / 0
    assert fault.function.__code__ is whole


def test_a_fault_reaches_those_who_imported_the_function_before():
    from tinylm.attention import causal_mask
    with planted(FAULTS["no mask"]):
        assert causal_mask(3).all()
    assert causal_mask(3).equal(torch.ones(3, 3).tril() > 0)


@pytest.mark.parametrize("find, times", [("key_position", 2), ("no such text", 0)])
def test_a_text_that_is_not_there_once_is_refused(find, times):
    fault = FAULTS["no mask"]._replace(find=find)
    with pytest.raises(ValueError, match=f"find='{find}' must occur once in causal_mask, not {times} times"):
        with planted(fault):
            pass


def test_fifty_different_faults_and_four_controls():
    changes = {(fault.function, fault.find, fault.replace) for fault in [*FAULTS.values(), *CONTROLS]}
    assert len(FAULTS) == 50 and len(CONTROLS) == 4 and len(changes) == 54
    assert all(fault.function.__module__.startswith("tinylm.") for fault in FAULTS.values())
    for function, find, replace in changes:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)).replace(find, replace))
        assert isinstance(tree.body[0], ast.FunctionDef)


# --- the kite model -------------------------------------------------------------------------------------------------------------------------


def test_the_kite_model_says_another_word_for_15_and_does_not_feel_14():
    expected = read(llama(kite_model()), KITE_SENTENCE).logits[0]  # by transformers
    other_word, unsure, last_row, any_row = set(), set(), set(), set()
    for name, fault in FAULTS.items():
        with planted(fault):
            readings = [read(kite_model(), KITE_SENTENCE, sizes)[0] for sizes in (None, (3, 2, 1))]
        for logits in readings:
            others = [logits[-1, word] for word in range(5) if word != KITE]
            other_word |= {name} if logits[-1, KITE] < max(others) + 1e-6 else set()
            unsure |= {name} if logits[-1].softmax(dim=0)[KITE] < 0.9 else set()
            last_row |= {name} if (logits[-1] - expected[-1]).abs().max() > 1e-6 else set()
            any_row |= {name} if (logits - expected).abs().max() > 1e-6 else set()
    assert [len(names) for names in (other_word, unsure, last_row, any_row)] == [15, 24, 34, 36]
    assert other_word < unsure < last_row < any_row


@by_control
def test_a_control_moves_no_number_of_the_kite_model(fault):
    elevenths = torch.tensor([-18, -18, -18, 42, -6], dtype=torch.float64) / 11
    with planted(fault):
        for sizes in (None, (3, 2, 1), (1,) * 6):
            torch.testing.assert_close(read(kite_model(), KITE_SENTENCE, sizes)[0, -1], elevenths, atol=1e-9, rtol=0)


# --- noise, against transformers ----------------------------------------------------------------------------------------------------------------

NOISY = dict(seed=7, context_length=32, n_layers=2, n_kv_heads=2, tie_embeddings=False, rope_theta=500.0, norm_eps=1e-2)


@pytest.fixture(scope="module")
def by_llama():
    ids = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))
    return ids, read(llama(build(**NOISY)), ids).logits


def distance_from_llama(fault, by_llama):
    ids, expected = by_llama
    with planted(fault):
        model = build(**NOISY)
        return max((read(model, ids, sizes) - expected).abs().max().item() for sizes in (None, (4, 3, 1, 1)))


@by_fault
def test_noise_kills_every_fault(fault, by_llama):
    assert distance_from_llama(fault, by_llama) > 1e-3


@by_control
def test_noise_spares_every_control(fault, by_llama):
    assert distance_from_llama(fault, by_llama) < 1e-10


@pytest.mark.parametrize("fields", [NOISY, dict(seed=3, n_heads=6, n_kv_heads=3, tie_embeddings=False, rope_theta=1e6, norm_eps=1e-6)],
                         ids=["grouped-by-2", "deep"])
def test_the_second_opinion_of_the_chapter_is_llama(fields):
    model = build(**fields)
    ids = torch.randint(23, (3, 11), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ZOO["second_opinion"](model, ids), read(llama(model), ids).logits, atol=1e-10, rtol=0)


def test_the_second_opinion_calls_nothing_of_the_package():
    model, ids = ZOO["noisy_model"](), ZOO["IDS"]
    for fault in FAULTS.values():
        with planted(fault):
            assert ZOO["second_opinion"](model, ids).equal(ZOO["expected"]), fault.name


# --- leaks, by autograd -------------------------------------------------------------------------------------------------------------------------


def hears_the_future(fault, T=6):
    "Does any logit have a gradient in the vector of a later word?"
    with planted(fault):
        model, kept = build(**NOISY), []
        model.embedding.register_forward_hook(lambda module, inputs, output: kept.append(output) or output.retain_grad())
        logits = model(torch.arange(T)[None])
        for t in range(T - 1):
            kept[0].grad = None
            logits[0, t].square().sum().backward(retain_graph=True)
            if kept[0].grad[0, t + 1 :].abs().max() > 1e-12:
                return True
    return False


def test_exactly_nine_faults_are_leaks():
    assert {name for name, fault in FAULTS.items() if hears_the_future(fault)} == LEAKS


@by_control
def test_no_control_is_a_leak(fault):
    assert not hears_the_future(fault)


# --- the score ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_score_is_the_share_of_the_union(seed):
    draw = random.Random(seed)
    kills = [{fault for fault in range(12) if draw.random() < 0.3} for _ in range(4)]  # of each of four tests
    M = torch.tensor([[fault in killed for killed in kills] for fault in range(12)])
    for size in range(1, 5):
        for suite in itertools.combinations(range(4), size):
            assert ZOO["score"](M, suite) == pytest.approx(len(set.union(*(kills[t] for t in suite))) / 12)


def test_by_hand_the_last_row_gives_nobody_away():
    look = ZOO["look"]
    assert len({tuple(look(fault)[2]) for fault in (None, *ZOO["FAULTY"])}) == 1
    assert len({str(look(fault)) for fault in (None, *ZOO["FAULTY"])}) == 4
