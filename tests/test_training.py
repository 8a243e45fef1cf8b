"""Windows, loss, optimisers, schedule, evaluation and the run: against torch's own kernels, numpy in float64, and numbers worked out on paper.

Checkpoints and exact resume have a file of their own, test_resume.py.
"""
import dataclasses
import itertools
import json
import math
import random
import signal
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tinylm import training
from tinylm.tokenizer import Tokenizer, train_tokenizer
from tinylm.training import (
    IGNORE,
    MAX_SKIPPED,
    OPTIMIZERS,
    Muon,
    NorMuon,
    Optimizer,
    Run,
    TrainConfig,
    accumulate_gradients,
    check_streams,
    clip_gradients,
    embedding_from_counts,
    epoch_batch,
    epoch_starts,
    evaluate,
    first_tokens,
    leading_directions,
    load_checkpoint,
    lr_at,
    matrix_parts,
    neighbour_counts,
    next_token_loss,
    open_tokens,
    orthogonal,
    read_log,
    sample_batch,
    scoring_windows,
    token_stream,
    train,
    write_tokens,
)
from tinylm.transformer import ModelConfig, TransformerLM

V, T = 11, 8  # of every model that build() makes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def random_ids(n, seed=0, vocab=V):
    return torch.randint(vocab, (n,), generator=seeded(seed))


def build(seed=0, dtype=torch.float32, **fields):
    "A small model whose matrices are random and large enough to matter; gains are 1, biases 0."
    fields = {**dict(vocab_size=V, context_length=T, d_model=12, n_layers=2, n_heads=2, d_ff=10), **fields}
    model = TransformerLM(ModelConfig(**fields))
    with torch.no_grad():
        for i, weight in enumerate(p for p in model.parameters() if p.ndim == 2):
            weight.copy_(0.3 * randn(*weight.shape, seed=100 * seed + i))
    return model.to(dtype)


def settings_of(**fields):
    return TrainConfig(**{**dict(steps=6, batch_size=2, context_length=T, lr=1e-2), **fields})


def numbers(tensor):
    return tensor.detach().double().numpy().copy()


def everything(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


@pytest.fixture
def no_picture(monkeypatch):
    "Drawing takes longer than a short run."
    monkeypatch.setattr(training, "plot_log", lambda path: None)


# --- windows ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, context", [(8, 4), (5, 4), (6, 4), (20, 3), (9, 1)])
def test_data_1_no_window_is_lost_and_the_last_target_is_the_last_token(n, context):
    x, y = sample_batch(torch.arange(n), 400, context, seeded())
    assert x.shape == y.shape == (400, context) and x.dtype == y.dtype == torch.int64
    assert sorted(set(x[:, 0].tolist())) == list(range(n - context)), "n − T starts, each of them reached"
    assert y.max() == n - 1


def test_x_4_a_target_is_the_next_token():
    ids = torch.tensor([7, 3, 3, 9, 0, 4, 4, 1])
    x, y = sample_batch(ids, 200, 3, seeded())
    pairs = {(ids[i].item(), ids[i + 1].item()) for i in range(7)}
    assert set(zip(x.flatten().tolist(), y.flatten().tolist())) == pairs
    assert torch.equal(y[:, :-1], x[:, 1:])


def test_starts_are_drawn_with_equal_chances():
    starts = sample_batch(torch.arange(14), 10_000, 4, seeded())[0][:, 0]
    counts = torch.bincount(starts, minlength=10).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 33.7  # chi-square, 9 degrees of freedom, one in 10,000


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_stream_that_is_too_short_is_refused_and_both_lengths_are_named(n):
    with pytest.raises(ValueError, match=rf"ids holds {n} tokens.*context_length=4 needs 5"):
        sample_batch(torch.arange(n), 2, 4, seeded())


def test_a_tensor_an_array_and_a_memory_map_give_the_same_windows(tmp_path):
    ids = random_ids(50, vocab=60_000)
    ids.numpy().astype(np.uint16).tofile(tmp_path / "ids")
    sources = [ids, ids.int(), ids.numpy(), ids.numpy().astype(np.uint16), ids.numpy().astype(np.uint32), np.memmap(tmp_path / "ids", np.uint16, "r")]
    batches = [sample_batch(source, 5, 7, seeded(3)) for source in sources]
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, batches[0][0]) and torch.equal(y, batches[0][1])


def test_windows_depend_on_the_generator_and_on_nothing_else():
    ids, before = torch.arange(1000), torch.get_rng_state()
    generator = seeded(1)
    first, second = sample_batch(ids, 4, 5, generator)[0], sample_batch(ids, 4, 5, generator)[0]
    assert not torch.equal(first, second), "the generator moves on"
    torch.rand(7)
    assert torch.equal(sample_batch(ids, 4, 5, seeded(1))[0], first)
    torch.set_rng_state(before)
    sample_batch(ids, 4, 5, seeded(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("n, context", [(5, 4), (8, 4), (9, 4), (41, 10), (42, 10), (1000, 7), (3, 1)])
def test_an_epoch_takes_each_window_once_and_leaves_out_less_than_two(n, context):
    for epoch in range(8):
        starts = epoch_starts(n, context, epoch, seed=2)
        first, last = starts.min().item(), starts.max().item()
        assert sorted(starts.tolist()) == list(range(first, last + 1, context)), "end to end, each once"
        assert first >= 0 and last + context <= n - 1, "the last target is in the stream"
        assert n - 1 - len(starts) * context < 2 * context, "nearly all of it"
    many = [epoch_starts(n, context, epoch, 2) for epoch in range(40 * context)]
    assert {place for starts in many for start in starts.tolist() for place in range(start, start + context + 1)} == set(range(n)), "no token is left out for ever"
    if n > 2 * context:
        assert {starts.min().item() % context for starts in many} == set(range(context)), "every cut comes"


def test_every_epoch_has_its_own_order_and_its_own_cuts():
    first, second = epoch_starts(1000, 10, 0, 5), epoch_starts(1000, 10, 1, 5)
    assert first.min() != second.min()
    assert not torch.equal((first - first.min()).argsort(), (second - second.min()).argsort())
    assert not torch.equal(first, first.sort().values) and not torch.equal(second, second.sort().values)
    assert not torch.equal(first, epoch_starts(1000, 10, 0, 6)), "the seed decides, too"


@pytest.mark.parametrize("size", [1, 2, 5, 13, 31])
def test_how_many_are_asked_for_at_once_does_not_change_the_order(size):
    ids, before = random_ids(100), torch.get_rng_state()
    whole = epoch_batch(ids, 60, 7, 0, 3)
    pieces = [epoch_batch(ids, size, 7, already, 3) for already in range(0, 60, size)]
    for one, parts in zip(whole, zip(*pieces)):
        assert torch.equal(torch.cat(parts)[:60], one)
    expected = torch.cat([epoch_starts(100, 7, epoch, 3) for epoch in range(5)])[:60]
    assert torch.equal(whole[0], torch.stack([ids[start : start + 7] for start in expected]))
    assert torch.equal(whole[1], torch.stack([ids[start + 1 : start + 8] for start in expected]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_stream_that_is_too_short_for_an_epoch_is_refused(n):
    with pytest.raises(ValueError, match=rf"ids holds {n} tokens.*context_length=4 needs 5"):
        epoch_batch(torch.arange(n), 2, 4, 0, 0)


# --- vectors from counts ------------------------------------------------------------------------------------------------------------------


def table_of_counts(ids, vocab, window):
    "The same by loops."
    table = np.zeros((vocab, 2 * window * vocab))
    for place in range(1, window + 1):
        for i in range(len(ids) - place):
            table[ids[i], ids[i + place] + 2 * (place - 1) * vocab] += 1
            table[ids[i + place], ids[i] + (2 * (place - 1) + 1) * vocab] += 1
    return table


@pytest.mark.parametrize("window", [1, 2, 3])
def test_neighbours_are_counted_on_both_sides_at_every_distance(window):
    ids = random_ids(200, seed=1, vocab=9)
    rows, columns, counts = neighbour_counts(ids, 9, window)
    table = np.zeros((9, 18 * window))
    table[rows.numpy(), columns.numpy()] = counts.numpy()
    assert len(rows) == (table > 0).sum(), "each pair is listed once"
    np.testing.assert_array_equal(table, table_of_counts(ids.tolist(), 9, window))
    assert counts.sum() == sum(2 * (200 - place) for place in range(1, window + 1))


def skewed_ids(n, vocab, seed=0):
    "Some tokens often, some seldom, and not independent."
    generator = seeded(seed)
    ids = (torch.rand(n, generator=generator) ** 2 * vocab).long()
    follows = torch.rand(n - 1, generator=generator) < 0.5
    return torch.cat([ids[:1], torch.where(follows, (ids[:-1] * 7 + 1) % vocab, ids[1:])])


@pytest.mark.parametrize("window, d_model", [(1, 6), (2, 6), (2, 12)])
def test_the_vectors_are_those_of_an_exact_factorisation(window, d_model):
    vocab, ids = 30, skewed_ids(3000, 30)
    counts = table_of_counts(ids.tolist(), vocab, window)
    assert (counts.sum(1) > 0).all()
    shares = counts.sum(0) ** 0.75 / (counts.sum(0) ** 0.75).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(counts > 0, np.maximum(np.log(counts / (counts.sum(1, keepdims=True) * shares)), 0), 0)
    left, sizes, _ = np.linalg.svd(surprise, full_matrices=False)
    expected = left[:, :d_model] * np.sqrt(sizes[:d_model])
    expected *= 0.02 * math.sqrt(d_model) / np.linalg.norm(expected, axis=1, keepdims=True)
    vectors = embedding_from_counts(ids, vocab, d_model, window).numpy()
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=2e-3 * 0.02**2 * d_model)  # directions have no sign


def test_a_few_random_directions_find_the_best_ones():
    "More columns than directions, and singular values that fall slowly: what a few rounds are for."
    generator = seeded(0)
    some = torch.randn(300, 300, generator=generator) * torch.arange(1, 301) ** -1.0 @ torch.randn(300, 400, generator=generator) / 20
    left, sizes, _ = torch.linalg.svd(some)
    ours, best = leading_directions(some.to_sparse(), 3, seeded(1)), (left[:, :3] * sizes[:3]) @ left[:, :3].T
    assert (ours @ ours.T - best).norm() < 1e-4 * best.norm()


@pytest.mark.parametrize("vocab, d_model, std", [(30, 12, 0.02), (30, 40, 0.5), (400, 16, 1.0)])
def test_vectors_have_the_shape_and_the_size_that_were_asked_for(vocab, d_model, std):
    vectors = embedding_from_counts(skewed_ids(3000, 30), vocab, d_model, std=std)
    assert vectors.shape == (vocab, d_model) and vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.square().mean(1).sqrt(), torch.full((vocab,), std), atol=1e-5 * std, rtol=1e-4)


def test_a_token_that_does_not_occur_gets_a_vector_like_the_others():
    vectors = embedding_from_counts(skewed_ids(2000, 30), 60, 16)
    assert vectors.isfinite().all()
    absent = F.normalize(vectors[30:], dim=1)
    assert (absent @ absent.T - torch.eye(30)).abs().max() < 0.9, "and each its own"


def test_counting_depends_on_the_stream_and_the_seed_alone(tmp_path):
    ids, before = skewed_ids(2000, 30), torch.get_rng_state()
    write_tokens(tmp_path / "ids.bin", [ids.tolist()], 30)
    one, other = embedding_from_counts(ids, 30, 8), embedding_from_counts(open_tokens(tmp_path / "ids.bin", 30), 30, 8)
    assert torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, embedding_from_counts(ids, 30, 8, seed=1))


@pytest.mark.parametrize("n, window, error, message", [(2, 2, ValueError, "ids holds 2 tokens; window=2 needs 3"), (9, 0, ValueError, "window=0"), (9, 1.5, TypeError, "window=1.5")])
def test_too_little_to_count_in_is_refused(n, window, error, message):
    with pytest.raises(error, match=message):
        embedding_from_counts(torch.arange(n), 9, 4, window)


def test_words_of_one_use_come_together():
    "Two words that never meet, with the same company, point the same way; a third does not."
    pattern = [[0, 1, 2], [0, 3, 2], [4, 5, 6]]
    ids = torch.tensor([id for row in torch.randint(3, (400,), generator=seeded()).tolist() for id in pattern[row]])
    vectors = F.normalize(embedding_from_counts(ids, 7, 4, window=1), dim=1)
    assert vectors[1] @ vectors[3] > 0.95 and vectors[1] @ vectors[5] < 0.7


# --- token files --------------------------------------------------------------------------------------------------------------------------


class Letters:
    "A tokenizer for tests: a is 1, b is 2, …; 0 ends a text."

    eot_id = 0

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]


@pytest.mark.parametrize("texts, stream", [
    (["ab", "c"], [0, 1, 2, 0, 3, 0]),
    (["abc"], [0, 1, 2, 3, 0]),
    (["", "a"], [0, 0, 1, 0]),
    ([], [0]),
])
def test_x_11_end_of_text_stands_before_between_and_after_documents(texts, stream):
    assert list(itertools.chain(*token_stream(Letters(), iter(texts)))) == stream


@pytest.mark.parametrize("vocab_size, dtype", [(5, "uint16"), (50257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (100_300, "uint32")])
def test_data_2_the_width_on_disk_holds_the_largest_id(tmp_path, vocab_size, dtype):
    ids = [0, vocab_size - 1, 1, vocab_size // 2]
    assert write_tokens(tmp_path / "t.bin", [ids], vocab_size) == 4
    back = open_tokens(tmp_path / "t.bin", vocab_size)
    assert back.tolist() == ids and back.dtype == dtype and isinstance(back, np.memmap)
    x, y = sample_batch(back, 20, 3, seeded())
    assert x[0].tolist() == ids[:3] and y[0].tolist() == ids[1:]
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 3


def test_pieces_are_written_in_order_and_counted(tmp_path):
    n = write_tokens(str(tmp_path / "t.bin"), token_stream(Letters(), ["ab", "", "c"]), 4)
    assert n == 7 and open_tokens(str(tmp_path / "t.bin"), 4).tolist() == [0, 1, 2, 0, 0, 3, 0]


def test_a_stream_is_never_all_in_memory(tmp_path):
    alive = []

    def pieces():
        for i in range(20):
            piece = np.full(10, i)
            alive.append(weakref.ref(piece))
            yield piece
            del piece
            assert sum(ref() is not None for ref in alive) <= 2

    assert write_tokens(tmp_path / "t.bin", pieces(), 20) == 200


@pytest.mark.parametrize("ids", [[0, 9], [-1], [3, 2**40]])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path, ids):
    with pytest.raises(ValueError, match=r"ids run from .* to .*; the vocabulary is 0 … 8"):
        write_tokens(tmp_path / "t.bin", [[1], ids], 9)


def test_a_token_file_of_another_vocabulary_or_cut_short_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    write_tokens(path, [[1, 2, 3, 4]], 100)
    with pytest.raises(ValueError, match="vocabulary of 100; the model has 101"):
        open_tokens(path, 101)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"t\.bin holds 6 bytes; .* says 8"):
        open_tokens(path, 100)


# --- loss ---------------------------------------------------------------------------------------------------------------------------------


def certain_logits(ids, by=20.0):
    "Logits that put `by` on the token after each one."
    return by * F.one_hot(ids[:, 1:], V).double()


def test_loss_1_a_perfect_model_scores_nothing_and_a_double_shift_costs_what_it_is_certain_of():
    ids = torch.arange(3 * 9).reshape(3, 9) % V
    logits = certain_logits(ids)
    assert next_token_loss(logits, ids[:, 1:]) == pytest.approx(math.log1p((V - 1) * math.exp(-20)), rel=1e-6)
    assert next_token_loss(logits[:, :-1], ids[:, 2:]) == pytest.approx(20, abs=1e-6)
    assert next_token_loss(logits, ids[:, :-1]) == pytest.approx(20, abs=1e-6)


def test_a_loss_worked_out_on_paper():
    logits = torch.tensor([[[1.0, 2.0, 5.0]]], dtype=torch.float64).log().requires_grad_()
    loss = next_token_loss(logits, torch.tensor([[1]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4), abs=1e-15)
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([1.0, -6.0, 5.0], dtype=torch.float64) / 8, atol=1e-15, rtol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_loss_equals_torchs(dtype, tolerance):
    logits, targets = randn(3, 5, V, dtype=dtype), torch.randint(V, (3, 5), generator=seeded(1))
    targets[0, 3:] = targets[2, :] = IGNORE
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = next_token_loss(mine, targets), F.cross_entropy(theirs.transpose(1, 2), targets)
    loss.backward(), expected.backward()
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits, targets = randn(4, 30, V, dtype=dtype), torch.randint(V, (4, 30), generator=seeded(1))
    loss = next_token_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()), atol=1e-6, rtol=0)


def test_another_denominator_and_another_ignored_id():
    logits, targets = randn(2, 3, V), torch.tensor([[1, 2, 3], [4, 0, 0]])
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(next_token_loss(logits, targets, denominator=7), total / 7)
    torch.testing.assert_close(next_token_loss(logits, targets, denominator=torch.tensor(0.5)), total * 2)
    kept = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
    torch.testing.assert_close(next_token_loss(logits, targets, ignore_index=0), kept)
    assert next_token_loss(logits, targets, ignore_index=0) != next_token_loss(logits, targets)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (3, 2), (6,)])
def test_there_is_one_target_for_each_row_of_logits(shape):
    with pytest.raises(ValueError, match=r"targets has shape .*; logits \(2, 3, 11\) need \(2, 3\)"):
        next_token_loss(randn(2, 3, V), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("denominator", [None, 5])
def test_loss_6_without_a_target_the_loss_is_0_and_so_is_every_gradient(dtype, denominator):
    logits = randn(2, 3, V, dtype=dtype).requires_grad_()
    loss = next_token_loss(logits, torch.full((2, 3), IGNORE), denominator=denominator)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_loss_6_a_masked_row_does_not_count_in_the_mean():
    x = torch.tensor([[0.0, math.log(math.e**2 - 1)]]).expand(2, 4, 2)  # target 0 costs 2 nats
    targets = torch.tensor([[0, 0, 0, 0], [IGNORE] * 4])
    assert next_token_loss(x, targets).item() == pytest.approx(2.0, abs=1e-6)


# --- configuration ------------------------------------------------------------------------------------------------------------------------


def test_a_configuration_is_frozen_and_survives_json():
    config = settings_of(betas=[0.8, 0.99], optimizer="muon", precision="bf16", eval_tokens=50)
    assert config.betas == (0.8, 0.99)
    assert TrainConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0


def test_fields_and_defaults():
    config = TrainConfig(3, 2, 8, 1e-3)
    assert dataclasses.asdict(config) == dict(
        steps=3, batch_size=2, context_length=8, lr=1e-3, min_lr=0.0, warmup_steps=0, hold_steps=0, grad_accumulation=1, weight_decay=0.1, betas=(0.9, 0.95),
        clip_norm=1.0, optimizer="adamw", muon_lr=0.02, precision="fp32", compile=False, seed=0, eval_every=0, eval_tokens=None,
        checkpoint_every=0, keep_checkpoints=2, windows="anywhere", count_first=False)


COUNTS = {"steps": 1, "batch_size": 1, "context_length": 1, "grad_accumulation": 1, "keep_checkpoints": 1,
          "warmup_steps": 0, "hold_steps": 0, "seed": 0, "eval_every": 0, "checkpoint_every": 0, "eval_tokens": 2}
WRONG = [
    *[(name, value, TypeError) for name in COUNTS for value in (2.0, "2", True)],
    *[(name, least - 1, ValueError) for name, least in COUNTS.items()],
    *[(name, value, ValueError) for name in ("lr", "muon_lr") for value in (0, 0.0, -1e-3, math.inf, math.nan)],
    *[(name, value, ValueError) for name in ("min_lr", "weight_decay", "clip_norm") for value in (-1e-9, math.inf, math.nan)],
    *[(name, value, TypeError) for name in ("lr", "muon_lr", "min_lr", "weight_decay", "clip_norm") for value in ("1", None, True)],
    *[("betas", value, ValueError) for value in ((0.9,), (0.9, 0.95, 0.99), (0.9, 1), (-0.1, 0.9), (0.9, math.nan), ())],
    *[("optimizer", value, ValueError) for value in ("sgd", "", None, "AdamW")],
    *[("windows", value, ValueError) for value in ("epoch", "", None)],
    *[("precision", value, ValueError) for value in ("float32", "fp8", None)],
    *[(name, value, TypeError) for name in ("compile", "count_first") for value in (1, "yes", None)],
    ("min_lr", 0.011, ValueError),
]


@pytest.mark.parametrize("name, value, error", WRONG)
def test_a_field_of_the_wrong_type_or_range_is_refused_by_name(name, value, error):
    with pytest.raises(error, match=rf"^{name}="):
        settings_of(**{name: value})


@pytest.mark.parametrize("value", [0.9, None, (0.9, "0.95"), "ab", (0.9, None)])
def test_betas_of_the_wrong_type_are_refused_by_name(value):
    with pytest.raises((TypeError, ValueError), match="^betas="):
        settings_of(betas=value)


@pytest.mark.parametrize("name, value", [*COUNTS.items(), ("clip_norm", 0), ("weight_decay", 0), ("min_lr", 0.01), ("betas", (0, 0.0)), ("lr", 1), ("eval_tokens", None)])
def test_the_smallest_allowed_value_is_allowed(name, value):
    assert getattr(settings_of(**{name: value}), name) == value


# --- schedule -----------------------------------------------------------------------------------------------------------------------------

PAPER = [2, 4, 6, 8, 10, 9.66, 8.68, 7.22, 5.5, 3.78, 2.32, 1.34, 1, 1]  # ×1e-4


def test_opt_3_the_schedule_of_the_table():
    config = settings_of(steps=12, lr=1e-3, min_lr=1e-4, warmup_steps=4)
    assert [1e4 * lr_at(step, config) for step in range(14)] == pytest.approx(PAPER, abs=5e-3)
    for step, rate in {0: 2e-4, 3: 8e-4, 4: 1e-3, 11: 1.342e-4, 12: 1e-4, 13: 1e-4, 24: 1e-4, 1000: 1e-4}.items():
        assert lr_at(step, config) == pytest.approx(rate, rel=1e-3), step
    assert lr_at(4, config) == 1e-3 and lr_at(12, config) == lr_at(24, config) == 1e-4, "exactly"


def test_opt_3_the_first_update_is_not_wasted():
    assert lr_at(0, settings_of(steps=600_000, lr=6e-4, warmup_steps=2000)) == pytest.approx(6e-4 / 2001, rel=1e-12)


def test_opt_3_past_its_horizon_the_rate_does_not_climb_again():
    config = settings_of(steps=10, lr=1.0, min_lr=0.25, warmup_steps=2)
    assert [lr_at(step, config) for step in (10, 11, 14, 18, 26)] == [0.25] * 5


def test_without_warm_up_the_peak_comes_first():
    config = settings_of(steps=4, lr=0.5, min_lr=0.1)
    assert [lr_at(step, config) for step in range(6)] == pytest.approx([0.5, 0.1 + 0.2 * (1 + 0.5**0.5), 0.3, 0.1 + 0.2 * (1 - 0.5**0.5), 0.1, 0.1])


def test_a_warm_up_as_long_as_the_run_or_longer():
    assert [lr_at(step, settings_of(steps=3, lr=1.0, warmup_steps=3)) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 0.0]
    assert [lr_at(step, settings_of(steps=3, lr=1.0, warmup_steps=9)) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_the_peak_is_held_and_two_plans_with_different_ends_agree_until_the_first_goes_down():
    short, long = (settings_of(steps=steps, lr=1.0, min_lr=0.2, warmup_steps=3, hold_steps=hold) for steps, hold in ((12, 5), (20, 9)))
    expected = [0.25, 0.5, 0.75] + [1.0] * 6 + [0.2 + 0.4 * (1 + math.cos(math.pi * r / 4)) for r in (1, 2, 3)] + [0.2] * 3
    assert [lr_at(step, short) for step in range(15)] == pytest.approx(expected, rel=1e-12)
    assert [step for step in range(20) if lr_at(step, short) == lr_at(step, long)] == list(range(9))


def test_a_hold_that_leaves_no_way_down_is_refused():
    config = settings_of(steps=4, lr=1.0, warmup_steps=1, hold_steps=2)
    assert [lr_at(step, config) for step in range(6)] == [0.5, 1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="hold_steps=3 after 1 of warm-up reaches the end, steps=4"):
        settings_of(steps=4, warmup_steps=1, hold_steps=3)


# --- optimiser ----------------------------------------------------------------------------------------------------------------------------

MODELS = {
    "default": dict(),
    "gelu-bias-learned-untied": dict(ffn="gelu", bias=True, position="learned", tie_embeddings=False),
    "layernorm": dict(norm="layernorm", bias=True, ffn="gelu"),
    "grouped": dict(n_heads=6, n_kv_heads=2),
    "sinusoidal-untied": dict(position="sinusoidal", tie_embeddings=False),
}
all_models = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS.keys())
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def give_gradients(model, seed=0, scale=1.0):
    for i, p in enumerate(model.parameters()):
        p.grad = scale * randn(*p.shape, seed=1000 * seed + i, dtype=p.dtype)


@all_models
@every_optimizer
def test_every_parameter_is_in_exactly_one_group_and_a_tied_matrix_is_there_once(kind, fields):
    model = build(**fields)
    optimizer = Optimizer(model, settings_of(optimizer=kind))
    grouped = [id(p) for group in optimizer.groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}
    assert optimizer.slots().keys() == dict(model.named_parameters()).keys()


@all_models
@every_optimizer
def test_opt_5_weight_decay_reaches_matrices_and_tables_never_gains_and_biases(kind, fields):
    model = build(**fields)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = Optimizer(model, settings_of(optimizer=kind, lr=0.1, muon_lr=0.1, weight_decay=0.1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        expected = 0.99 if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p, torch.full_like(p, expected), atol=1e-7 if p.ndim >= 2 else 0, rtol=0, msg=name)


@every_optimizer
def test_which_parameters_muon_takes(kind):
    model = build(position="learned", tie_embeddings=False, bias=True, ffn="gelu")
    optimizer = Optimizer(model, settings_of(optimizer=kind))
    taken = {name for member in optimizer.members if isinstance(member, Muon) for group in member.param_groups for name in group["param_names"]}
    inside = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.qkv_proj", "attention.out_proj", "ffn.up_proj", "ffn.down_proj")}
    assert taken == (set() if kind == "adamw" else inside)


@pytest.mark.parametrize("gradient", [1e-3, 1.0, -1e3])
def test_the_first_step_of_adamw_is_the_rate_whatever_the_gradient(gradient):
    model = build()
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Optimizer(model, settings_of(lr=0.1, weight_decay=0.0)).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p, torch.full_like(p, math.copysign(0.1, gradient)), atol=2e-6, rtol=0)


class PaperAdamW:
    "Loshchilov & Hutter's algorithm 2 in numpy, float64."

    def __init__(self, model, betas, weight_decay):
        self.p = {name: numbers(p) for name, p in model.named_parameters()}
        self.m, self.v = ({name: np.zeros_like(p) for name, p in self.p.items()} for _ in "mv")
        self.betas, self.decay, self.t = betas, weight_decay, 0

    def step(self, gradients, lr):
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = self.betas[0] * self.m[name] + (1 - self.betas[0]) * g
            self.v[name] = self.betas[1] * self.v[name] + (1 - self.betas[1]) * g**2
            m, v = self.m[name] / (1 - self.betas[0] ** self.t), self.v[name] / (1 - self.betas[1] ** self.t)
            if self.p[name].ndim == 2:
                self.p[name] *= 1 - lr * self.decay
            self.p[name] -= lr * m / (np.sqrt(v) + 1e-8)


def test_adamw_equals_the_paper_over_five_steps():
    model = build(dtype=torch.float64, bias=True, ffn="gelu")
    config = settings_of(lr=0.05, betas=(0.8, 0.9), weight_decay=0.3)
    optimizer, paper = Optimizer(model, config), PaperAdamW(model, (0.8, 0.9), 0.3)
    for i, share in enumerate((0.2, 1.0, 0.7, 0.5, 0.0)):
        give_gradients(model, seed=i, scale=10.0**-i)
        optimizer.set_rate(share)
        optimizer.step()
        paper.step({name: numbers(p.grad) for name, p in model.named_parameters()}, 0.05 * share)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(numbers(p), paper.p[name], atol=1e-12, err_msg=name)


def test_adamw_equals_torchs_own_over_two_groups():
    mine, theirs = build(), build()
    reference = torch.optim.AdamW([dict(params=[p for p in theirs.parameters() if p.ndim == 2], weight_decay=0.2),
                                   dict(params=[p for p in theirs.parameters() if p.ndim < 2], weight_decay=0.0)], lr=0.02, betas=(0.9, 0.95))
    optimizer = Optimizer(mine, settings_of(lr=0.02, weight_decay=0.2))
    for i in range(5):
        give_gradients(mine, seed=i), give_gradients(theirs, seed=i)
        optimizer.step(), reference.step()
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=name)


@every_optimizer
def test_set_rate_takes_a_share_of_each_peak(kind):
    optimizer = Optimizer(build(), settings_of(optimizer=kind, lr=0.01, muon_lr=0.5))
    peaks = [0.01, 0.01, 0.5][: len(optimizer.groups)]
    for share in (0.5, 0.1, 1.0):
        optimizer.set_rate(share)
        assert [group["lr"] for group in optimizer.groups] == pytest.approx([share * peak for peak in peaks]), "of the peak, not of the last rate"


# --- Muon ---------------------------------------------------------------------------------------------------------------------------------

SHAPES = [(6, 30), (30, 6), (16, 16), (1, 9), (9, 1), (40, 41)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_orthogonal_brings_every_singular_value_near_1(shape, scale):
    made = orthogonal(scale * randn(*shape, seed=2, dtype=torch.float32))
    values = torch.linalg.svdvals(made.double())
    assert made.shape == shape and made.dtype == torch.float32
    assert 0.6 < values.min() <= values.max() < 1.3, values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonal_keeps_the_singular_vectors(shape):
    matrix = randn(*shape, seed=5)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonal(matrix, dtype=torch.float64) @ vh.T
    torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-9, rtol=0)
    assert (inside.diagonal() > 0).all()


def test_orthogonal_of_nothing_is_nothing():
    assert torch.equal(orthogonal(torch.zeros(4, 7)), torch.zeros(4, 7))


def test_orthogonal_gives_back_the_dtype_it_got():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert orthogonal(randn(5, 4, dtype=dtype)).dtype == dtype


def muon_pair(shape, dtype=torch.float32, lr=0.03, weight_decay=0.2):
    mine, theirs = (nn.Parameter(randn(*shape, seed=9, dtype=dtype)) for _ in range(2))
    reference = torch.optim.Muon([theirs], lr=lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return mine, theirs, Muon([("w", mine)], {"w": [shape[0]]}, lr, weight_decay), reference


@pytest.mark.parametrize("shape", [(6, 30), (30, 6), (16, 16)], ids=str)
def test_muon_in_bfloat16_equals_torchs_step_for_step(shape, monkeypatch):
    monkeypatch.setattr(training, "orthogonal", partial(orthogonal, dtype=torch.bfloat16))
    mine, theirs, optimizer, reference = muon_pair(shape)
    for i in range(6):
        mine.grad = randn(*shape, seed=i, dtype=torch.float32)
        theirs.grad = mine.grad.clone()
        optimizer.step(), reference.step()
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 30), (30, 6), (16, 16)], ids=str)
def test_muon_in_float32_is_what_torchs_bfloat16_rounds(shape):
    mine, theirs, optimizer, reference = muon_pair(shape, lr=1.0, weight_decay=0.0)
    start = mine.detach().clone()
    mine.grad = randn(*shape, seed=1, dtype=torch.float32)
    theirs.grad = mine.grad.clone()
    optimizer.step(), reference.step()
    a, b = (start - mine).flatten(), (start - theirs).flatten()
    assert F.cosine_similarity(a, b, dim=0) > 0.9995 and (a - b).norm() < 0.03 * b.norm()


@all_models
def test_matrices_stacked_in_one_parameter_are_taken_one_by_one(fields):
    model = build(**fields)
    parts = matrix_parts(model)
    config = model.config
    key_rows = config.kv_heads * config.head_dim
    for name, rows in parts.items():
        p = model.get_parameter(name)
        assert sum(rows) == len(p)
        expected = {"qkv_proj": [12, key_rows, key_rows], "gate_up_proj": [10, 10]}.get(name.split(".")[-2], [len(p)])
        assert rows == expected, name
        whole = nn.Parameter(p.detach().clone())
        pieces = [nn.Parameter(piece.clone()) for piece in p.detach().split(expected)]
        whole.grad = randn(*p.shape, seed=3, dtype=torch.float32)
        for piece, gradient in zip(pieces, whole.grad.split(expected)):
            piece.grad = gradient.clone()
        Muon([("w", whole)], {"w": rows}, 0.1).step()
        Muon([(str(i), piece) for i, piece in enumerate(pieces)], {str(i): [len(piece)] for i, piece in enumerate(pieces)}, 0.1).step()
        torch.testing.assert_close(whole, torch.cat([piece.detach() for piece in pieces]), atol=1e-6, rtol=0, check_device=False)


@pytest.mark.parametrize("shape", [(8, 60), (60, 8), (24, 24)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_root_mean_square_of_an_update_is_a_fifth_of_the_rate(shape, scale):
    w = nn.Parameter(torch.zeros(shape))
    w.grad = scale * randn(*shape, seed=4, dtype=torch.float32)
    Muon([("w", w)], {"w": [shape[0]]}, 0.5).step()
    assert 0.16 < w.square().mean().sqrt() / 0.5 < 0.23


def test_the_momentum_of_muon_is_nesterovs():
    model = build(dtype=torch.float64)
    optimizer, name = Optimizer(model, settings_of(optimizer="muon")), "blocks.1.ffn.down_proj.weight"
    p, mean = model.get_parameter(name), 0.0
    seen = []
    for i in range(3):
        give_gradients(model, seed=i)
        mean = 0.95 * mean + 0.05 * p.grad
        seen.append(p.detach().clone())
        expected = p * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(12) * orthogonal(0.05 * p.grad + 0.95 * mean)
        optimizer.step()
        torch.testing.assert_close(p, expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(optimizer.state()[f"{name}/momentum_buffer"], mean)


def test_a_parameter_without_a_gradient_is_left_alone():
    w = nn.Parameter(torch.ones(3, 4))
    Muon([("w", w)], {"w": [3]}, 0.5).step()
    assert torch.equal(w, torch.ones(3, 4))


def paper_normuon(shape_of_parts, gradients, lr, weight_decay):
    "Li et al. 2025 in float64, one matrix after the other, from weights of 1."
    ends = []
    for part in range(len(shape_of_parts)):
        w, mean, squares = torch.ones(shape_of_parts[part], dtype=torch.float64), 0.0, 0.0
        for gradient in gradients:
            g = gradient.split([rows for rows, _ in shape_of_parts])[part]
            mean = 0.95 * mean + 0.05 * g
            o = orthogonal(0.05 * g + 0.95 * mean)
            squares = 0.95 * squares + 0.05 * (o**2).mean(dim=1)
            even = o / squares.sqrt()[:, None]
            w = w - lr * weight_decay * w - lr * 0.2 * even * math.sqrt(even.numel()) / even.norm()
        ends.append(w)
    return torch.cat(ends)


def test_normuon_is_the_papers_for_each_stacked_matrix():
    shapes = [(5, 7), (9, 7), (1, 7)]
    w = nn.Parameter(torch.ones(15, 7, dtype=torch.float64))
    optimizer = NorMuon([("w", w)], {"w": [5, 9, 1]}, 0.03, 0.2)
    gradients = [randn(15, 7, seed=i) * torch.logspace(-2, 2, 15, dtype=torch.float64)[:, None] for i in range(6)]
    for w.grad in gradients:
        optimizer.step()
    torch.testing.assert_close(w.detach(), paper_normuon(shapes, gradients, 0.03, 0.2), atol=1e-12, rtol=0)
    assert optimizer.state[w]["row_squares"].shape == (15, 1)


@pytest.mark.parametrize("shape", [(8, 60), (60, 8), (24, 24)], ids=str)
def test_the_root_mean_square_of_an_update_of_normuon_is_exactly_a_fifth_of_the_rate(shape):
    w = nn.Parameter(torch.zeros(shape))
    optimizer = NorMuon([("w", w)], {"w": [shape[0]]}, 0.5, weight_decay=0.0)
    for i in range(3):
        before = w.detach().clone()
        w.grad = 10.0**i * randn(*shape, seed=i, dtype=torch.float32)
        optimizer.step()
        assert (w.detach() - before).square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-5)


def test_normuon_gives_all_rows_one_speed():
    w, faint = nn.Parameter(torch.zeros(40, 10)), torch.linspace(0.05, 1, 40)[:, None]
    optimizer = NorMuon([("w", w)], {"w": [40]}, 0.1, weight_decay=0.0)
    for i in range(30):
        w.grad = randn(40, 10, seed=i, dtype=torch.float32) * faint
        optimizer.step()
    moved = w.detach().norm(dim=1)
    assert moved[:10].mean() > 0.7 * moved[-10:].mean()


def test_a_gradient_of_zeros_moves_nothing_under_normuon_and_a_silent_row_stays():
    w = nn.Parameter(torch.ones(4, 6))
    optimizer = NorMuon([("w", w)], {"w": [4]}, 0.1, weight_decay=0.0)
    w.grad = torch.zeros(4, 6)
    optimizer.step()
    assert torch.equal(w, torch.ones(4, 6))
    w.grad = randn(4, 6, dtype=torch.float32) * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None]
    optimizer.step()
    assert torch.equal(w[2], torch.ones(6)) and (w[[0, 1, 3]] != 1).all() and w.isfinite().all()


# --- optimiser state ----------------------------------------------------------------------------------------------------------------------


def after_two_steps(kind, **fields):
    model = build(**fields)
    optimizer = Optimizer(model, settings_of(optimizer=kind))
    for i in range(2):
        give_gradients(model, seed=i)
        optimizer.step()
    return model, optimizer


@every_optimizer
def test_opt_6_state_goes_to_the_parameter_of_its_name_whatever_the_order(kind):
    model, optimizer = after_two_steps(kind)
    saved = everything(optimizer.state())
    assert {key.rpartition("/")[0] for key in saved} == dict(model.named_parameters()).keys()
    twin = build()
    twin.load_state_dict(model.state_dict())
    other = Optimizer(twin, settings_of(optimizer=kind))
    other.load_state(dict(reversed(saved.items())))
    assert_equal(other.state(), saved)
    give_gradients(model, seed=7), give_gradients(twin, seed=7)
    optimizer.step(), other.step()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters()):
        assert torch.equal(p, q[1]), name


def test_the_moments_are_what_adamw_needs():
    model, optimizer = after_two_steps("adamw")
    saved = optimizer.state()
    assert {key.rpartition("/")[2] for key in saved} == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["norm.weight/step"].item() == 2
    g0, g1 = (randn(12, seed=1000 * i + list(dict(model.named_parameters())).index("norm.weight"), dtype=torch.float32) for i in range(2))
    torch.testing.assert_close(saved["norm.weight/exp_avg"], 0.9 * 0.1 * g0 + 0.1 * g1)


def test_an_optimiser_that_has_made_no_step_has_nothing_to_save():
    optimizer = Optimizer(build(), settings_of())
    assert optimizer.state() == {}
    optimizer.load_state({})
    assert optimizer.state() == {}


@every_optimizer
@pytest.mark.parametrize("fault", ["missing", "foreign", "renamed", "shape"])
def test_state_of_other_parameters_is_refused(kind, fault):
    saved = everything(after_two_steps(kind)[1].state())
    name = "blocks.0.attention.out_proj.weight"
    of_it = {key: value for key, value in saved.items() if key.startswith(name)}
    if fault in ("missing", "renamed"):
        saved = {key: value for key, value in saved.items() if key not in of_it}
    if fault in ("foreign", "renamed"):
        saved.update({key.replace("out_proj", "proj_out"): value for key, value in of_it.items()})
    if fault == "shape":
        saved = {key: value[:-1] if key in of_it and value.ndim else value for key, value in saved.items()}
    match = rf"{name}/\w+ has shape \(11, 12\); it must be \(12, 12\)" if fault == "shape" else "other parameters"
    with pytest.raises(ValueError, match=match):
        Optimizer(build(), settings_of(optimizer=kind)).load_state(saved)


@pytest.mark.parametrize("kind, slot", [("adamw", "exp_avg"), ("muon", "momentum_buffer"), ("normuon", "momentum_buffer")])
def test_a_column_is_taken_for_the_squares_of_rows_only(kind, slot):
    saved = everything(after_two_steps(kind)[1].state())
    key = f"blocks.0.ffn.down_proj.weight/{slot}"
    saved[key] = saved[key][:, :1]
    with pytest.raises(ValueError, match=r"has shape \(12, 1\); it must be"):
        Optimizer(build(), settings_of(optimizer=kind)).load_state(saved)


def test_a_state_that_is_loaded_takes_the_place_of_the_old_one():
    optimizer = after_two_steps("adamw")[1]
    optimizer.load_state({})
    assert optimizer.state() == {}


# --- accumulation and clipping ------------------------------------------------------------------------------------------------------------


def table_loss(table):
    "A bigram model: the logits after token x are row x of a table."
    return lambda x, y, denominator: next_token_loss(table[x], y, denominator=denominator)


def gradient_of(table, batches, **options):
    table = table.clone().requires_grad_()
    loss = accumulate_gradients(table_loss(table), batches, **options)
    return loss, table.grad


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=80)
def test_loss_3_any_split_into_micro_batches_gives_the_gradient_of_the_whole(data, dtype):
    B, length, seed = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 999))
    table, generator = randn(V, V, seed=seed, dtype=dtype), seeded(seed)
    x, y = (torch.randint(V, (B, length), generator=generator) for _ in "xy")
    y[torch.rand(B, length, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))] = IGNORE
    cuts = sorted(data.draw(st.sets(st.integers(1, B - 1)))) if B > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, B])]
    whole = table.clone().requires_grad_()
    expected = F.cross_entropy(whole[x].flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum") / max(1, (y != IGNORE).sum().item())
    expected.backward()
    loss, gradient = gradient_of(table, list(zip(x.split(sizes), y.split(sizes))))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(gradient, whole.grad, atol=tolerance, rtol=0)
    torch.testing.assert_close(loss, expected.detach(), atol=10 * tolerance, rtol=0)
    assert not loss.requires_grad


def test_loss_3_ten_tokens_at_1_and_a_hundred_at_2():
    def rows(n, cost):  # target 0 costs that many nats
        return torch.tensor([0.0, math.log(math.exp(cost) - 1)], dtype=torch.float64).expand(1, n, 2).clone().requires_grad_(), torch.zeros(1, n, dtype=torch.int64)

    loss = accumulate_gradients(lambda x, y, n: next_token_loss(x, y, denominator=n), [rows(10, 1.0), rows(100, 2.0)])
    assert loss.item() == pytest.approx(210 / 110, abs=1e-12)


def test_loss_5_a_shorter_last_window_is_not_scaled_by_the_full_count():
    x, y = torch.randint(V, (2, 5, 3, 4), generator=seeded())
    micro = list(zip(x, y))
    table = randn(V, V)
    one = gradient_of(table, micro[4:])[1]
    whole = table.clone().requires_grad_()
    F.cross_entropy(whole[x[4]].flatten(0, 1), y[4].flatten()).backward()
    torch.testing.assert_close(one, whole.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_f_3_false_alarm_equal_micro_batches_weigh_the_same(k):
    x, y = torch.randint(V, (2, 3, 4), generator=seeded())
    table = randn(V, V)
    loss, gradient = gradient_of(table, [(x, y)] * k)
    once_loss, once = gradient_of(table, [(x, y)])
    torch.testing.assert_close(gradient, once, atol=1e-12, rtol=0)
    torch.testing.assert_close(loss, once_loss, atol=1e-12, rtol=0)


def test_gradients_are_added_to_what_is_there_and_scaled_before_backward():
    x, y = torch.randint(V, (2, 3, 4), generator=seeded())
    table = randn(V, V)
    plain_loss, plain = gradient_of(table, [(x, y)])
    loss, scaled = gradient_of(table, [(x, y)], scale=lambda loss: 1024 * loss)
    torch.testing.assert_close(scaled, 1024 * plain)
    torch.testing.assert_close(loss, plain_loss), "the loss that is told is not scaled"
    table = table.clone().requires_grad_()
    for _ in range(2):
        accumulate_gradients(table_loss(table), [(x, y)])
    torch.testing.assert_close(table.grad, 2 * plain)


def with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g.clone()
    return parameters


def test_clipping_on_paper_one_norm_for_all():
    parameters = with_gradients(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert clip_gradients(iter(parameters), 1.0) == pytest.approx(10**0.5)
    assert parameters[0].grad.tolist() + parameters[1].grad.tolist() == pytest.approx([0.9487, 0, 0, 0.3162], abs=1e-4)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 5.0, 1000.0])
def test_clipping_equals_torchs_and_keeps_the_direction(max_norm):
    gradients = [randn(4, 5), randn(7, seed=1), 3 * randn(2, 2, seed=2)]
    mine, theirs = with_gradients(*gradients), with_gradients(*gradients)
    mine.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    norm, expected = clip_gradients(mine, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert isinstance(norm, float) and norm == pytest.approx(expected.item(), rel=1e-12)
    for p, q, before in zip(mine, theirs, gradients):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-4 if max_norm < 0.1 else 2e-6, atol=0)
        assert F.cosine_similarity(p.grad.flatten(), before.flatten(), dim=0) == pytest.approx(1, abs=1e-12)
    after = math.sqrt(sum(p.grad.square().sum().item() for p in mine[:3]))
    assert after == pytest.approx(min(max_norm, norm), rel=1e-12)


@pytest.mark.parametrize("max_norm", [0, 0.0, 5.0])
def test_a_limit_of_0_only_measures_and_a_norm_at_the_limit_is_left_alone(max_norm):
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_gradients(parameters, max_norm) == 5.0
    assert parameters[0].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_x_1_a_gradient_that_is_not_finite_is_told_and_nothing_is_scaled(bad):
    parameters = with_gradients(torch.tensor([1.0, bad]), torch.tensor([2.0, 3.0]))
    assert not math.isfinite(clip_gradients(parameters, 1.0))
    assert parameters[1].grad.tolist() == [2.0, 3.0] and parameters[0].grad[0] == 1.0


# --- one update ---------------------------------------------------------------------------------------------------------------------------


class FakeScaler:
    "Of float16: unscales by 65,536, and writes down who was called when."

    def __init__(self, calls):
        self.calls = calls

    def scale(self, loss):
        self.calls.append("scale")
        return loss * 65536

    def unscale_(self, member):
        self.calls.append("unscale")
        for group in member.param_groups:
            for p in group["params"]:
                p.grad /= 65536

    def step(self, member):
        self.calls.append("step")
        self.seen = {name: p.grad.clone() for group in member.param_groups for name, p in zip(group["param_names"], group["params"])}
        member.step()

    def update(self):
        self.calls.append("update")


@every_optimizer
def test_opt_1_gradients_are_unscaled_then_clipped_then_stepped(kind, monkeypatch):
    calls, real = [], training.clip_gradients
    monkeypatch.setattr(training, "clip_gradients", lambda *args: calls.append("clip") or real(*args))
    run = Run(build(), settings_of(optimizer=kind, clip_norm=1e6))
    run.scaler = FakeScaler(calls)
    run.update(random_ids(50))
    members = 1 + (kind != "adamw")
    assert calls == ["scale", *["unscale"] * members, "clip", *["step"] * members, "update"]


def test_opt_1_a_small_gradient_is_not_clipped_because_it_was_scaled():
    run = Run(build(), settings_of(clip_norm=1.0))
    run.scaler = FakeScaler([])
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    run.model.norm.weight.grad[:2] = 65536 * torch.tensor([0.3, 0.4])
    assert run._step(1.0) == pytest.approx(0.5)
    assert run.scaler.seen["norm.weight"][:2].tolist() == pytest.approx([0.3, 0.4])


@every_optimizer
def test_one_update_is_the_formula(kind):
    "Loss, gradient, clipping, rate and step of the first update, each worked out apart."
    config = settings_of(optimizer=kind, lr=0.01, warmup_steps=4, clip_norm=0.5, grad_accumulation=3, batch_size=2, weight_decay=0.2, seed=5)
    model, ids = build(dtype=torch.float64), random_ids(60)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = seeded(5)
    x, y = (torch.cat(side) for side in zip(*(sample_batch(ids, 2, T, generator) for _ in range(3))))
    twin = build(dtype=torch.float64)
    expected = F.cross_entropy(twin(x).flatten(0, 1), y.flatten())
    expected.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in twin.parameters()))
    assert norm > 0.5
    line = Run(model, config).update(ids)
    assert line == dict(step=1, loss=pytest.approx(expected.item(), rel=1e-12), lr=pytest.approx(0.002), grad_norm=pytest.approx(norm, rel=1e-12), tokens=6 * T)
    assert list(line) == ["step", "loss", "lr", "grad_norm", "tokens"]
    rows = matrix_parts(model)
    for name, q in twin.named_parameters():
        gradient = q.grad * 0.5 / norm
        if kind != "adamw" and name in rows:
            pieces = [0.2 * math.sqrt(max(piece.shape)) * orthogonal(piece) for piece in gradient.split(rows[name])]
            if kind == "normuon":  # the first time every row has its own squares as their mean
                pieces = [0.2 * piece / piece.square().mean(dim=1, keepdim=True).sqrt() for piece in pieces]
            after = before[name] * (1 - 0.004 * 0.2) - 0.004 * torch.cat(pieces)  # the direction is the same with 0.0975 of the gradient
        else:
            after = before[name] * (1 - 0.002 * 0.2 * (q.ndim == 2)) - 0.002 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(model.get_parameter(name).detach(), after, atol=1e-6, rtol=0, msg=name)


@every_optimizer
def test_the_rate_that_is_logged_is_the_rate_that_was_used(kind):
    config = settings_of(optimizer=kind, lr=0.01, muon_lr=0.5, warmup_steps=2, min_lr=0.001, grad_accumulation=3)
    run = Run(build(), config)
    for step in range(6):
        line, share = run.update(random_ids(50)), lr_at(step, config) / 0.01
        assert line["lr"] == pytest.approx(0.01 * share)
        assert [group["lr"] for group in run.optimizer.groups] == pytest.approx([0.01 * share, 0.01 * share, 0.5 * share][: len(run.optimizer.groups)])


def test_dropout_does_not_change_which_windows_are_seen():
    run, ids, seen, generator = Run(build(dropout=0.5), settings_of(seed=4)), random_ids(50), [], seeded(4)
    run.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for _ in range(3):
        run.update(ids)
    assert all(torch.equal(x, sample_batch(ids, 2, T, generator)[0]) for x in seen) and len(seen) == 3


@pytest.mark.parametrize("accumulation", [1, 3])
def test_updates_with_epochs_read_the_stream_from_where_the_last_one_stopped(accumulation):
    run, ids, seen = Run(build(), settings_of(windows="epochs", seed=4, grad_accumulation=accumulation)), random_ids(90), []
    run.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for _ in range(7):
        run.update(ids)
    assert torch.equal(torch.cat(seen), epoch_batch(ids, 7 * 2 * accumulation, T, 0, 4)[0])


def poison(run, how):
    "Make the next update go wrong in one way."
    real = run.loss_of
    if how == "loss":  # an infinite loss with finite gradients
        run.loss_of = lambda *args: real(*args) + math.inf
    elif how == "nan":
        run.loss_of = lambda *args: real(*args) * math.nan
    else:  # one infinite number in one gradient, while the loss looks healthy
        run.hook = run.model.norm.weight.register_hook(lambda g: torch.where(torch.arange(len(g)) == 3, math.inf, g))
    return real


@pytest.mark.parametrize("how", ["loss", "nan", "gradient"])
@every_optimizer
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_x_1_an_update_that_is_not_finite_changes_nothing_and_is_counted(how, kind, precision):
    run, ids = Run(build(), settings_of(optimizer=kind, precision=precision)), random_ids(60)
    run.update(ids)
    assert run.progress["skipped"] == 0
    weights, state = everything(dict(run.model.named_parameters())), everything(run.optimizer.state())
    real = poison(run, how)
    line = run.update(ids)
    assert_equal(dict(run.model.named_parameters()), weights)
    assert_equal(run.optimizer.state(), state)
    assert run.progress["skipped"] == run.progress["skipped_in_a_row"] == 1 and run.progress["step"] == 2 and run.progress["tokens"] == 4 * T
    assert (line["loss"] is None) == (how != "gradient") and (line["grad_norm"] is None) == (how != "loss")
    json.dumps(line, allow_nan=False)
    assert all(p.grad is None for p in run.model.parameters()), "no rest of it may reach the next update"
    run.loss_of = real
    if how == "gradient":
        run.hook.remove()
    run.update(ids)
    assert run.progress["skipped"] == 1 and run.progress["skipped_in_a_row"] == 0
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert not torch.equal(run.model.norm.weight, weights["norm.weight"])


def test_a_run_that_only_loses_updates_ends_with_advice():
    run, ids = Run(build(), settings_of()), random_ids(60)
    real = poison(run, "nan")
    for _ in range(MAX_SKIPPED - 1):
        run.update(ids)
    poisoned, run.loss_of = run.loss_of, real
    run.update(ids)  # one good update in between
    run.loss_of = poisoned
    for _ in range(MAX_SKIPPED - 1):
        run.update(ids)
    with pytest.raises(FloatingPointError, match=rf"{MAX_SKIPPED} updates in a row were not finite \(loss nan, gradient norm nan\): try a lower lr"):
        run.update(ids)
    assert MAX_SKIPPED == 8 and run.progress["skipped"] == 2 * MAX_SKIPPED - 1


@pytest.mark.parametrize("precision, dtype, tolerance", [("fp32", torch.float32, 1e-6), ("bf16", torch.bfloat16, 3e-2), ("fp16", torch.float16, 5e-3)])
@every_optimizer
def test_mixed_precision_computes_in_half_and_keeps_the_weights_in_float32(precision, dtype, tolerance, kind):
    ids, outputs = random_ids(60), []
    expected = Run(build(dtype=torch.float64), settings_of(optimizer=kind)).update(ids)
    run = Run(build(), settings_of(optimizer=kind, precision=precision))
    run.model.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
    line = run.update(ids)
    assert outputs == [dtype]
    assert line["loss"] == pytest.approx(expected["loss"], rel=tolerance) and line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3 * tolerance)
    assert run.progress["skipped"] == 0
    for name, p in run.model.named_parameters():
        assert p.dtype == torch.float32 and p.isfinite().all(), name
    assert all(tensor.dtype == torch.float32 for tensor in run.optimizer.state().values())
    assert run.scaler.is_enabled() == (precision == "fp16")


# --- evaluation ---------------------------------------------------------------------------------------------------------------------------


@given(n=st.integers(2, 40), context=st.integers(1, 9), data=st.data())
@settings(max_examples=150)
def test_every_token_after_the_first_is_a_target_exactly_once(n, context, data):
    stride = data.draw(st.none() | st.integers(1, context))
    windows = list(scoring_windows(torch.arange(n), context, stride))
    targets = [t for x, y in windows for t in y[y != IGNORE].tolist()]
    assert targets == list(range(1, n))
    step = context if stride is None else stride
    for i, (x, y) in enumerate(windows):
        real = y != IGNORE
        assert x.tolist() == list(range(i * step, min(i * step + context, n - 1))) and real.any()
        assert torch.equal(y[real], x[real] + 1), "each from its own past"
    if len(windows) > 1:
        assert all((y != IGNORE).sum() == step for _, y in windows[1:-1])


def test_without_two_tokens_there_is_no_window():
    assert not list(scoring_windows(torch.arange(1), 4)) and not list(scoring_windows(torch.arange(0), 4))


@torch.no_grad()
def plain_score(model, ids, stride=None):
    "Sum of the losses in nats, one target and one pass at a time: what evaluate must find."
    limit, nats = model.config.context_length, 0.0
    stride = limit if stride is None else stride
    for i in range(1, len(ids)):
        start = stride * max(0, math.ceil((i - limit) / stride))  # the first window that reaches it
        logits = model(torch.as_tensor(np.asarray(ids[start:i]).astype(np.int64))[None])[0, -1]
        nats -= logits.double().log_softmax(dim=-1)[int(ids[i])].item()
    return nats


@pytest.mark.parametrize("n", [2, 8, 9, 10, 17, 30])
@pytest.mark.parametrize("stride", [None, 1, 3, 7, 8])
def test_evaluation_equals_a_loop_over_single_targets(n, stride):
    model, ids = build(dtype=torch.float64).eval(), random_ids(n, seed=n)
    result = evaluate(model, ids, stride=stride, n_bytes=3 * n)
    nats = plain_score(model, ids, stride)
    assert result.n_tokens == n - 1
    assert result.nats == pytest.approx(nats, rel=1e-12) and result.loss == pytest.approx(nats / (n - 1), rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(nats / (n - 1)), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / (3 * n), rel=1e-12)


class Bigrams(nn.Module):
    "A language model that is a table of logits; counts its passes."

    def __init__(self, probabilities, context_length=4):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())
        self.config, self.device, self.batches = SimpleNamespace(context_length=context_length), torch.device("cpu"), []

    def forward(self, ids):
        self.batches.append(len(ids))
        return self.table[ids]


def priced(*nats):
    "Token i is followed by itself at a price of nats[i]; the last token takes what is left."
    rows = [[math.exp(-price) if i == j else 0 for j in range(len(nats))] + [1 - math.exp(-price)] for i, price in enumerate(nats)]
    return Bigrams([*rows, [1 / (len(nats) + 1)] * (len(nats) + 1)])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16, 100])
def test_eval_1_the_mean_is_over_tokens_never_over_batches(batch_size):
    model = priced(2.0, 4.0)
    result = evaluate(model, [torch.zeros(101, dtype=torch.int64), torch.ones(11, dtype=torch.int64)], batch_size=batch_size)
    assert (result.n_tokens, result.nats) == (110, pytest.approx(240, rel=1e-12))
    assert result.perplexity == pytest.approx(8.862, abs=1e-3) and result.perplexity == pytest.approx(math.exp(240 / 110))
    assert sum(model.batches) == 25 + 3 and max(model.batches) == min(batch_size, 28)


def test_f_6_false_alarm_perplexity_is_exp_of_the_mean():
    result = evaluate(priced(1.0, 3.0), [torch.tensor([0, 0]), torch.tensor([1, 1])])
    assert result.perplexity == pytest.approx(math.exp(2)) and result.loss == pytest.approx(2.0)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_eval_3_documents_scored_together_cost_what_they_cost_apart(position):
    model = build(dtype=torch.float64, position=position).eval()
    documents = [random_ids(n, seed=n) for n in (2, 30, 5, 9, 8, 3)]
    together = evaluate(model, documents)
    apart = [evaluate(model, document) for document in documents]
    assert together.n_tokens == sum(len(document) - 1 for document in documents) == sum(one.n_tokens for one in apart)
    assert together.nats == pytest.approx(sum(plain_score(model, document) for document in documents), rel=1e-12)
    assert together.nats == pytest.approx(sum(one.nats for one in apart), rel=1e-12)
    assert evaluate(model, tuple(documents)) == together
    joined = evaluate(model, torch.cat(documents))
    assert joined.n_tokens == together.n_tokens + 5 and joined.nats != pytest.approx(together.nats, rel=1e-6)


@pytest.mark.parametrize("stride", [None, 3])
def test_the_batch_size_changes_nothing(stride):
    model, ids = build(), random_ids(101)
    results = [evaluate(model, ids, batch_size=size, stride=stride) for size in (1, 2, 5, 13, 64)]
    for result in results:
        assert result.n_tokens == 100 and result.nats == pytest.approx(results[0].nats, rel=1e-6)


def test_a_memory_map_is_scored_like_a_tensor(tmp_path):
    ids = random_ids(40)
    write_tokens(tmp_path / "t", [ids.tolist()], V)
    model = build()
    assert evaluate(model, open_tokens(tmp_path / "t", V)) == evaluate(model, ids) == evaluate(model, [ids.numpy()])


def test_more_context_costs_a_trained_model_nothing_more_than_it_must():
    "Without bytes there are no bits per byte; with a stride the numbers differ, the count does not."
    model, ids = build(dtype=torch.float64), random_ids(30)
    plain, overlapping = evaluate(model, ids), evaluate(model, ids, stride=2)
    assert plain.bits_per_byte is None and plain.n_tokens == overlapping.n_tokens and plain.nats != overlapping.nats


@pytest.mark.parametrize("mode", [True, False])
def test_drop_2_dropout_is_off_and_the_mode_comes_back_also_after_an_exception(mode):
    model, ids = build(dropout=0.5).train(mode), random_ids(30)
    without = build(dropout=0.0).eval()
    assert evaluate(model, ids) == evaluate(model, ids) == evaluate(without, ids)
    assert all(part.training is mode for part in model.modules())
    with pytest.raises(ValueError, match="vocabulary"):
        evaluate(model, torch.tensor([1, V, 2]))
    assert all(part.training is mode for part in model.modules())


def test_evaluation_draws_nothing_and_leaves_no_gradient():
    model = build(dropout=0.3).train()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    evaluate(model, random_ids(30))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1] and np.random.get_state()[1].tolist() == before[2]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("call, match", [
    (dict(ids_or_list=torch.tensor([3])), "nothing to score"),
    (dict(ids_or_list=[]), "nothing to score"),
    (dict(ids_or_list=[torch.tensor([1]), torch.tensor([], dtype=torch.int64)]), "nothing to score"),
    (dict(ids_or_list=torch.arange(5), stride=0), "stride=0 must be 1 … context_length=8"),
    (dict(ids_or_list=torch.arange(5), stride=9), "stride=9 must be 1 … context_length=8"),
    (dict(ids_or_list=torch.arange(5), batch_size=0), "batch_size=0"),
])
def test_evaluation_refuses_what_it_cannot_score(call, match):
    model = build()
    with pytest.raises(ValueError, match=match):
        evaluate(model, **call)


def test_a_run_takes_held_out_text_as_evaluate_does(tmp_path, no_picture):
    held_out = [[1], [2], [1, 2, 3, 4, 5, 4, 3]]
    result = train(build(), random_ids(40), held_out, settings_of(steps=2, eval_every=1, eval_tokens=2), out_dir=tmp_path, progress=False)
    assert result.evaluation.n_tokens == 6


@pytest.mark.parametrize("n_bytes", [0, -3])
def test_a_number_of_bytes_must_be_one(n_bytes):
    with pytest.raises(ValueError, match=f"n_bytes={n_bytes}"):
        evaluate(build(), random_ids(9), n_bytes=n_bytes)


@pytest.mark.parametrize("n", [2, 5, 99])
def test_the_first_tokens_of_a_stream_and_the_first_of_many_streams(n):
    ids = random_ids(20)
    assert torch.equal(first_tokens(ids, n), ids[:n]) and first_tokens(ids, None) is ids
    streams = [ids[:4], ids[4:7], ids[7:]]
    assert first_tokens(streams, None) is streams
    assert torch.equal(torch.cat(first_tokens(streams, n)), ids[: {2: 2, 5: 4, 99: 20}[n]])  # of 5, one token alone would ask nothing


def test_the_first_tokens_of_a_long_stream_are_few_and_streams_that_ask_nothing_are_left_out():
    ids = random_ids(300)
    assert [len(stream) for stream in first_tokens([ids, ids], 16)] == [16]
    assert [len(stream) for stream in first_tokens([ids[:1], ids[:1], ids], 2)] == [2]


# --- a whole run --------------------------------------------------------------------------------------------------------------------------


def chain(n, seed, p=0.75, size=6):
    "A language with a known floor: token t is followed by t + 1 with probability p, else by t + 2."
    skips = (torch.rand(n, generator=seeded(seed)) >= p).long()
    return torch.cumsum(1 + skips, 0) % size


def chain_nats(ids, p=0.75, size=6):
    "What the ids after the first really cost."
    skips = (ids[1:] - ids[:-1] - 1) % size
    return -math.log(p) * (skips == 0).sum().item() - math.log(1 - p) * (skips == 1).sum().item()


@every_optimizer
def test_a_small_language_is_learned_down_to_its_floor_and_never_below(kind, tmp_path, no_picture):
    train_ids, val_ids = chain(20_000, 1), chain(4_000, 2)
    config = settings_of(steps=250, batch_size=16, lr=1e-2, min_lr=1e-3, warmup_steps=5, optimizer=kind, muon_lr=0.01)
    torch.manual_seed(3)
    model = TransformerLM(ModelConfig(vocab_size=6, context_length=T, d_model=16, n_layers=1, n_heads=2, d_ff=32))
    result = train(model, train_ids, val_ids, config, out_dir=tmp_path, progress=False)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    floor = chain_nats(val_ids)
    assert result.evaluation.n_tokens == 3999 and result.evaluation.loss == pytest.approx(entropy, abs=0.03)
    assert floor - math.log(1e6) < result.evaluation.nats < 1.03 * floor, "less would prove a leak"
    log = read_log(tmp_path)
    assert log[0]["loss"] == pytest.approx(math.log(6), rel=0.05), "it starts where it knows nothing"


TEXT = "the kite is red and the boat is blue. "


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "A run of seven updates, evaluated every two, saved every three."
    out = tmp_path_factory.mktemp("runs") / "deep" / "run"
    tokenizer = train_tokenizer([TEXT * 4], 270)
    config = settings_of(steps=7, batch_size=3, grad_accumulation=2, eval_every=2, eval_tokens=10, checkpoint_every=3, keep_checkpoints=2,
                         lr=0.01, warmup_steps=2, min_lr=0.001)
    torch.manual_seed(0)
    model = build(vocab_size=270, dropout=0.1)
    ids = torch.tensor(list(itertools.chain(*token_stream(tokenizer, [TEXT] * 6))))
    result = train(model, ids, ids[:31], config, out_dir=out, tokenizer=tokenizer, n_bytes=100, progress=False)
    return SimpleNamespace(out=out, tokenizer=tokenizer, config=config, model=model, ids=ids, result=result)


def test_a_run_logs_every_update_in_order_and_every_evaluation_after_its_update(finished):
    log = read_log(finished.out)
    assert read_log(finished.out / "log.jsonl") == log
    assert [(line["step"], tuple(line)) for line in log] == [
        (1, UPDATE), (2, UPDATE), (2, VAL), (3, UPDATE), (4, UPDATE), (4, VAL), (5, UPDATE), (6, UPDATE), (6, VAL), (7, UPDATE), (7, FINAL)]
    updates = [line for line in log if "loss" in line]
    assert [line["tokens"] for line in updates] == [2 * 3 * T * n for n in range(1, 8)]
    assert [line["lr"] for line in updates] == [lr_at(step, finished.config) for step in range(7)], "a rate per update, not per micro-batch"
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in updates)


UPDATE = ("step", "loss", "lr", "grad_norm", "tokens")
VAL = ("step", "val_loss")
FINAL = ("step", "val_loss", "bits_per_byte", "final")


def test_the_last_line_is_the_score_of_all_held_out_tokens(finished):
    final, result = read_log(finished.out)[-1], finished.result
    again = evaluate(finished.model, finished.ids[:31], n_bytes=100)
    assert final == dict(step=7, val_loss=again.loss, bits_per_byte=again.bits_per_byte, final=True)
    assert result.evaluation == again and again.n_tokens == 30
    assert (result.step, result.tokens, result.interrupted) == (7, 7 * 2 * 3 * T, False) and result.seconds > 0


def test_evaluations_along_the_way_take_the_first_tokens_only(tmp_path, monkeypatch, no_picture):
    seen, real = [], training.evaluate
    monkeypatch.setattr(training, "evaluate", lambda model, ids, **options: seen.append((len(ids), options)) or real(model, ids, **options))
    train(build(), random_ids(40), random_ids(30), settings_of(steps=4, eval_every=2, eval_tokens=10), out_dir=tmp_path, n_bytes=60, progress=False)
    assert seen == [(10, dict(processes=training.ONE)), (30, dict(n_bytes=60, processes=training.ONE))]


def test_a_run_leaves_what_it_promises(finished):
    out = finished.out
    assert {path.name for path in out.iterdir()} == {"config.json", "tokenizer.json", "log.jsonl", "loss.png", "checkpoints"}
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"latest", "step-00000006", "step-00000007"}
    assert (out / "checkpoints" / "latest").read_text(encoding="utf-8") == "step-00000007"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert ModelConfig(**stored["model"]) == finished.model.config and TrainConfig(**stored["train"]) == finished.config
    assert Tokenizer.load(out / "tokenizer.json").encode(TEXT) == finished.tokenizer.encode(TEXT)


def test_a_run_and_each_of_its_checkpoints_can_be_loaded(finished):
    for path, step in ((finished.out, 7), (finished.out / "checkpoints" / "step-00000006", 6)):
        loaded = load_checkpoint(path)
        assert loaded.step == step and not loaded.model.training
        assert loaded.model_config == finished.model.config == loaded.model.config and loaded.train_config == finished.config
        assert loaded.tokenizer.encode(TEXT) == finished.tokenizer.encode(TEXT)
    assert_equal(dict(load_checkpoint(finished.out).model.named_parameters()), dict(finished.model.named_parameters()))


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_is(finished):
    before = {path: path.read_bytes() for path in finished.out.rglob("*") if path.is_file()}
    model, untouched = build(), build()
    with pytest.raises(ValueError, match="holds a run already"):
        train(model, random_ids(40), None, settings_of(count_first=True), out_dir=finished.out, progress=False)
    assert_equal(dict(model.named_parameters()), dict(untouched.named_parameters()))
    assert {path: path.read_bytes() for path in finished.out.rglob("*") if path.is_file()} == before


def test_without_held_out_text_there_is_no_evaluation(tmp_path, no_picture):
    result = train(build(), random_ids(40), None, settings_of(steps=3, eval_every=1), out_dir=tmp_path, progress=False)
    assert result.evaluation is None and [tuple(line) for line in read_log(tmp_path)] == [UPDATE] * 3
    assert not (tmp_path / "tokenizer.json").exists() and load_checkpoint(tmp_path).tokenizer is None


@pytest.mark.parametrize("keep, left", [(1, [6]), (3, [4, 5, 6]), (20, range(7))])
def test_the_last_checkpoints_are_kept(tmp_path, no_picture, keep, left):
    train(build(), random_ids(40), None, settings_of(steps=6, checkpoint_every=1, keep_checkpoints=keep), out_dir=tmp_path, progress=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*")) == ["latest", *(f"step-{step:08d}" for step in left)]


def test_a_run_is_the_same_run_when_repeated_and_another_one_with_another_seed(tmp_path, no_picture):
    def weights(name, **fields):
        model = build(dropout=0.2)
        train(model, random_ids(60), None, settings_of(steps=3, **fields), out_dir=tmp_path / name, progress=False)
        return dict(model.named_parameters())

    first = weights("a", seed=1)
    torch.rand(5)
    assert_equal(weights("b", seed=1), first)
    assert not torch.equal(weights("c", seed=2)["norm.weight"], first["norm.weight"])


def test_evaluations_and_checkpoints_along_the_way_do_not_change_the_run(tmp_path, no_picture):
    runs = []
    for i, fields in enumerate((dict(), dict(eval_every=1, checkpoint_every=1))):
        runs.append(build(dropout=0.3))
        train(runs[-1], random_ids(60), random_ids(40, seed=1), settings_of(steps=5, **fields), out_dir=tmp_path / str(i), progress=False)
    assert_equal(*(dict(model.named_parameters()) for model in runs))


def test_dropout_is_on_while_training(tmp_path, no_picture):
    seen, model = [], build(dropout=0.3).eval()
    model.register_forward_hook(lambda module, args, output: seen.append(module.training))
    train(model, random_ids(60), random_ids(9), settings_of(steps=3, eval_every=1), out_dir=tmp_path, progress=False)
    assert seen == [True, False, True, False, True, False]


def test_a_memory_map_trains_like_a_tensor(tmp_path, no_picture):
    ids = random_ids(60)
    write_tokens(tmp_path / "t", [ids.tolist()], V)
    models = [build(), build()]
    for model, stream in zip(models, (ids, open_tokens(tmp_path / "t", V))):
        train(model, stream, stream, settings_of(), out_dir=tmp_path / str(id(model)), progress=False)
    assert_equal(*(dict(model.named_parameters()) for model in models))


@pytest.mark.parametrize("fields, ids, match", [
    (dict(context_length=9), random_ids(40), "context_length=9 must not exceed the model's, 8"),
    (dict(), random_ids(8), "training text has 8 tokens; a window of context_length=8 needs 9"),
    (dict(), torch.tensor([V] + [0] * 20), f"ids run from 0 to {V}; the vocabulary is 0 … {V - 1}"),
    (dict(), torch.tensor([-1] + [0] * 20), "ids run from -1 to 0"),
    (dict(), np.array([V] + [0] * 20, dtype=np.uint16), f"ids run from 0 to {V}"),
])
def test_a_stream_that_the_model_cannot_learn_is_refused_before_anything_is_made(tmp_path, fields, ids, match):
    with pytest.raises(ValueError, match=match):
        train(build(), ids, None, settings_of(**fields), out_dir=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("val_ids", [random_ids(1), torch.tensor([0, V]), [random_ids(9), torch.tensor([-1, 0])], []], ids=["short", "foreign", "list", "none"])
def test_a_held_out_stream_that_cannot_be_scored_is_refused_before_anything_is_made(tmp_path, no_picture, val_ids):
    with pytest.raises(ValueError):
        train(build(), random_ids(40), val_ids, settings_of(steps=1), out_dir=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_the_shortest_stream_can_be_trained_on(tmp_path, no_picture):
    check_streams(build(), random_ids(9), settings_of())
    assert train(build(), random_ids(9), None, settings_of(steps=1), out_dir=tmp_path, progress=False).step == 1


def test_the_picture_of_a_run_with_lost_updates(tmp_path):
    lines = [dict(step=1, loss=2.0), dict(step=2, loss=None), dict(step=2, val_loss=1.5), dict(step=3, loss=1.0)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    training.plot_log(tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
def test_the_picture_of_a_run_that_was_stopped_before_its_first_update(tmp_path):
    (tmp_path / "log.jsonl").write_text("", encoding="utf-8")
    training.plot_log(tmp_path)


def test_an_evaluation_that_is_not_finite_is_logged_as_json(tmp_path, monkeypatch, no_picture):
    real = training.evaluate
    monkeypatch.setattr(training, "evaluate", lambda *args, **options: real(*args, **options)._replace(loss=math.nan, bits_per_byte=math.inf))
    train(build(), random_ids(40), random_ids(30), settings_of(steps=2, eval_every=1), out_dir=tmp_path, progress=False)
    for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_bar_shows_how_far_it_is(tmp_path, no_picture, capsys):
    train(build(), random_ids(40), random_ids(30), settings_of(steps=3, eval_every=1), out_dir=tmp_path)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "loss" in shown and "tokens/s" in shown and "best held-out loss" in shown
    train(build(), random_ids(40), None, settings_of(steps=2), out_dir=tmp_path / "quiet", progress=False)
    assert capsys.readouterr().err == ""


# --- Ctrl-C -------------------------------------------------------------------------------------------------------------------------------


def pressing_ctrl_c(monkeypatch, step, times=1):
    "Ctrl-C arrives in the middle of an update."
    real = Run.update

    def update(run, ids):
        line = real(run, ids)
        if line["step"] == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return line

    monkeypatch.setattr(Run, "update", update)


def test_ctrl_c_finishes_the_update_saves_and_ends(tmp_path, monkeypatch, no_picture):
    pressing_ctrl_c(monkeypatch, 3)
    before = signal.getsignal(signal.SIGINT)
    result = train(build(), random_ids(40), random_ids(30), settings_of(steps=50), out_dir=tmp_path, progress=False)
    assert result.interrupted and result.step == 3 and result.evaluation is None
    assert load_checkpoint(tmp_path).step == 3 and [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C means again what it meant"


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch, no_picture):
    pressing_ctrl_c(monkeypatch, 3, times=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(build(), random_ids(40), None, settings_of(steps=50), out_dir=tmp_path, progress=False)
    assert load_checkpoint(tmp_path).step == 0 and signal.getsignal(signal.SIGINT) is before


def test_a_run_may_live_in_another_thread(tmp_path, no_picture):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(build(), random_ids(40), None, settings_of(), out_dir=tmp_path, progress=False)))
    thread.start()
    thread.join()
    assert results[0].step == 6 and not results[0].interrupted


def test_a_file_of_tokens_that_broke_off_is_not_read_as_whole(tmp_path):
    write_tokens(tmp_path / "t.bin", [[1, 2, 3]], 5)
    with pytest.raises(ValueError, match="ids run from 9 to 9"):
        write_tokens(tmp_path / "t.bin", [[4, 4, 4], [9]], 5)
    with pytest.raises(FileNotFoundError, match="t.bin.json"):
        open_tokens(tmp_path / "t.bin", 5)


def test_without_gradients_there_is_nothing_to_clip():
    assert clip_gradients([torch.nn.Parameter(torch.zeros(3))], 1.0) == 0.0


def test_only_ids_of_the_vocabulary_are_counted():
    for ids in ([0, 3], [0, -1]):
        with pytest.raises(ValueError, match="the vocabulary is 0 … 2"):
            embedding_from_counts(torch.tensor(ids), 3, 2, window=1)
