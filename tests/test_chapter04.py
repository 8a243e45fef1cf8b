"What chapter 04 itself promises: the numbers of the kite model, step by step, and the two provisional tools `fit` and `continue_ids`."
import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tinylm.transformer import KITE_WEIGHTS, ModelConfig, TransformerLM, continue_ids, fit, kite_model

STOP, RED, BLUE, KITE, BOAT = range(5)
SENTENCE = [STOP, RED, KITE, BLUE, BOAT, RED]
ELEVENTHS = torch.tensor([-18, -18, -18, 42, -6], dtype=torch.float64)


def all_stories():
    "The 16 stories, int (16, 8), written out here: a stop, six words, a stop."
    rows = []
    for first, red, blue, asked in itertools.product((RED, BLUE), (KITE, BOAT), (KITE, BOAT), (RED, BLUE)):
        thing, second = {RED: red, BLUE: blue}, RED + BLUE - first
        rows.append([STOP, first, thing[first], second, thing[second], asked, thing[asked], STOP])
    return torch.tensor(rows)


def probabilities(model, ids):
    "What the model expects after the last id, (V,)."
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, -1].softmax(dim=-1)


def stages(model, ids):
    "The residual stream (T, C) after the embedding and after each branch that writes, by hooks on the four writers."
    written, hooks = [], []
    for block in model.blocks:
        for branch in (block.attention, block.ffn):
            hooks.append(branch.register_forward_hook(lambda module, inputs, output: written.append(output[0].detach())))
    with torch.no_grad():
        model(torch.tensor([ids]))
        stream = [model.embedding(torch.tensor(ids))]
    for hook in hooks:
        hook.remove()
    for note in written:
        stream.append(stream[-1] + note)
    return stream


# --- the board ----------------------------------------------------------------------------------------------------------------------------

BOARDS = [  # of the last word: after the embedding, attention 0, feed-forward 0, attention 1, feed-forward 1; and the root mean square
    ((1, 1, 0, 0, 0, 0, 0, 0), 1 / 2),
    ((1, 1, 0, 0, 0, -4, 0, 0), 3 / 2),
    ((1, 1, 0, 0, 0, -4, 0, 0), 3 / 2),
    ((1, 1, 0, 0, 0, -4, 0, 12), 9 / 2),
    ((9, 1, 0, 0, 0, -4, 0, 12), 11 / 2),
]


def test_each_stage_writes_its_own_slots():
    stream = stages(kite_model(), SENTENCE)
    assert len(stream) == len(BOARDS)
    for x, (board, rms) in zip(stream, BOARDS):
        torch.testing.assert_close(x[-1], torch.tensor(board, dtype=torch.float64), atol=1e-9, rtol=0)
        assert x[-1].square().mean().sqrt().item() == pytest.approx(rms, abs=1e-9)


def test_after_layer_0_every_word_carries_the_one_before():
    stream = stages(kite_model(), SENTENCE)
    torch.testing.assert_close(stream[1][1:, 4:6], 4 * stream[0][:-1, 1:3], atol=1e-9, rtol=0)
    torch.testing.assert_close(stream[1][:, :4], stream[0][:, :4], atol=1e-9, rtol=0)


def test_the_five_elevenths():
    with torch.no_grad():
        logits = kite_model()(torch.tensor([SENTENCE]))[0, -1]
    torch.testing.assert_close(11 * logits, ELEVENTHS, atol=1e-8, rtol=0)


def test_a_stop_and_three_words_give_the_same_elevenths():
    with torch.no_grad():
        logits = kite_model()(torch.tensor([[STOP, RED, KITE, RED]]))[0, -1]
    torch.testing.assert_close(11 * logits, ELEVENTHS, atol=1e-8, rtol=0)


def test_reading_the_answer_early():
    model = kite_model()
    with torch.no_grad():
        early = [model.head(model.norm(x[-1])).softmax(dim=-1) for x in stages(model, SENTENCE)]
    assert [f"{p[KITE]:.3f}" for p in early] == ["0.487", "0.358", "0.358", "0.878", "0.975"]
    assert all(abs(p[KITE] - p[BOAT]) < 1e-9 for p in early[:3])


# --- the heads ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer, head, scores", [
    (0, 0, [-36.95, -57.24, -24.91, 30.33, 57.68, 32.00]),  # the previous word
    (0, 1, [0, 0, 0, 0, 0, 0]),  # the meter
    (1, 0, [33.56, 0, 62.05, 0, -63.36, 0]),  # colour recall
    (1, 1, [31.96, 0, 0, -1.28, 0, 0]),  # thing recall, at rest
])
def test_scores_of_the_last_word(layer, head, scores):
    "Rotated here with complex numbers, from the weights and the stream alone."
    model = kite_model()
    x = stages(model, SENTENCE)[2 * layer]
    read = x / x.square().mean(dim=-1, keepdim=True).sqrt()
    weight = model.blocks[layer].attention.qkv_proj.weight.detach()
    q, k = (read @ weight[start + 4 * head : start + 4 * head + 4].T for start in (0, 8))  # (6, 4) each
    turns = torch.polar(torch.ones(6, 2, dtype=torch.float64), torch.arange(6)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64))
    q, k = (torch.complex(vectors[:, :2], vectors[:, 2:]) * turns for vectors in (q, k))
    found = (q[-1].conj() * k).real.sum(dim=-1) / 2
    torch.testing.assert_close(found, torch.tensor(scores, dtype=torch.float64), atol=0.005, rtol=0)


@pytest.mark.parametrize("silent, kite_after_red, blue_after_kite", [
    (None, "0.975", "0.895"),
    ((0, 0), "0.497", "0.333"),
    ((0, 1), "0.975", "0.895"),
    ((1, 0), "0.497", "0.895"),
    ((1, 1), "0.975", "0.333"),
])
def test_silencing_a_head_loses_what_it_is_for(silent, kite_after_red, blue_after_kite):
    model = kite_model()
    if silent is not None:
        layer, head = silent
        with torch.no_grad():
            model.blocks[layer].attention.out_proj.weight[:, 4 * head : 4 * head + 4] = 0
    assert f"{probabilities(model, SENTENCE)[KITE]:.3f}" == kite_after_red
    assert f"{probabilities(model, SENTENCE + [KITE])[BLUE]:.3f}" == blue_after_kite


# --- what the model can and cannot do -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), (0,), (0, 0), (3,), (5,), (0, 3, 5)])
def test_every_story_is_answered_wherever_its_words_stand(stops):
    stories = all_stories()
    for story in stories.tolist():
        prompt = story[:6]
        for place in reversed(stops):
            prompt = prompt[:place] + [STOP] + prompt[place:]
        p = probabilities(kite_model(), prompt)
        assert p.argmax() == story[6] and p.max() > 0.9


def test_perfect_answers_are_not_a_good_language_model():
    stories = all_stories()
    with torch.no_grad():
        nats = F.cross_entropy(kite_model()(stories[:, :-1]).flatten(0, 1), stories[:, 1:].flatten(), reduction="sum")
    assert f"{nats / 16 / math.log(2):.2f}" == "10.38"  # bits per story; nothing can be below 4


def test_tied_to_its_embedding_the_kite_model_echoes():
    model = kite_model()
    model.head.weight = model.embedding.weight
    with torch.no_grad():
        assert model(torch.tensor([SENTENCE]))[0].argmax(dim=-1).tolist() == SENTENCE
    assert f"{probabilities(model, SENTENCE)[RED]:.3f}" == "0.238"


def test_every_entry_arrives_in_its_parameter():
    model, placed = kite_model(), 0
    for name, parts in KITE_WEIGHTS.items():
        weight = model.get_parameter(name).detach()
        assert sum(sum(part.values()) for part in parts) == weight.sum()
        placed += sum(len(part) for part in parts)
        assert sum(len(part) for part in parts) == weight.count_nonzero()
    assert placed == 60


def test_each_kite_model_is_a_new_one():
    model, spoilt = kite_model(), kite_model()
    with torch.no_grad():
        spoilt.head.weight.zero_()
    assert probabilities(model, SENTENCE)[KITE] > 0.97 and probabilities(kite_model(), SENTENCE)[KITE] > 0.97
    assert not kite_model().training and kite_model().embedding.weight.dtype == torch.float64


# --- fit ----------------------------------------------------------------------------------------------------------------------------------


def small_model(**changes):
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(**{**dict(vocab_size=11, context_length=8, d_model=16, n_layers=2, n_heads=2, d_ff=24), **changes}))


def small_batches(n):
    generator = torch.Generator().manual_seed(1)
    windows = [torch.randint(11, (3, 7), generator=generator) for _ in range(n)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("learning_rate", [None, 1e-2])
def test_fit_is_adamw_on_the_mean_loss(tied, learning_rate):
    model = small_model(tie_embeddings=tied)
    reference, expected = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(reference.parameters(), lr=learning_rate or 3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for x, y in small_batches(4):
        log_p = reference(x).log_softmax(dim=-1)
        loss = -log_p.gather(-1, y[:, :, None]).mean()
        reference.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    options = {} if learning_rate is None else dict(learning_rate=learning_rate)
    assert list(fit(model, small_batches(4), **options)) == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (model.head.weight is model.embedding.weight) is tied


class Certain(nn.Module):
    "Logits that put 20 on the token after the present one in a cycle of five."

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, ids):
        return self.scale * F.one_hot((ids + 1) % 5, 5).float()


def test_fit_neither_shifts_the_targets_nor_forgets_to():
    x = torch.arange(10).view(1, 10) % 5
    (perfect,) = fit(Certain(), [(x, (x + 1) % 5)])
    (shifted_twice,) = fit(Certain(), [(x, (x + 2) % 5)])
    (not_shifted,) = fit(Certain(), [(x, x)])
    assert perfect < 1e-6 and shifted_twice > 19 and not_shifted > 19


def test_fit_yields_each_loss_before_its_update_and_works_only_when_asked():
    model, batches = small_model(), small_batches(2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    steps = fit(model, iter(batches))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with torch.no_grad():
        first = F.cross_entropy(model(batches[0][0]).flatten(0, 1), batches[0][1].flatten()).item()
    assert next(steps) == pytest.approx(first, rel=1e-6)
    assert any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert len(list(steps)) == 1


def test_fit_trains_with_dropout_switched_on():
    model = small_model(dropout=0.5).eval()
    list(fit(model, small_batches(1)))
    assert model.training


def test_a_small_model_reaches_the_floor_and_does_not_break_it():
    "Four coins for seven words: 0.3961 nats a word. Below it something looks ahead."
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size=5, context_length=8, d_model=32, n_layers=2, n_heads=2, d_ff=96, tie_embeddings=False,
                                      backend="fused"))
    assert model.num_parameters() == 27_104
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= math.sqrt(768 / 32)
    stories, generator = all_stories(), torch.Generator().manual_seed(0)
    for steps, learning_rate in ((300, 3e-3), (60, 3e-4)):
        picked = (stories[torch.randint(16, (16,), generator=generator)] for _ in range(steps))
        list(fit(model, ((batch[:, :-1], batch[:, 1:]) for batch in picked), learning_rate))
    with torch.no_grad():
        loss = F.cross_entropy(model(stories[:, :-1]).flatten(0, 1), stories[:, 1:].flatten()).item()
    floor = 4 * math.log(2) / 7
    assert floor < loss < floor + 0.02
    for story in stories:
        assert continue_ids(model, story[:6], 2).tolist() == story.tolist()


# --- continue_ids -------------------------------------------------------------------------------------------------------------------------


def test_continue_ids_takes_the_likeliest_word_each_time():
    model, ids = small_model(), torch.tensor([3, 1, 4])
    written, expected = continue_ids(model, ids, 5), ids.tolist()
    for _ in range(5):
        with torch.no_grad():
            expected.append(model(torch.tensor([expected]))[0, -1].argmax().item())
    assert written.tolist() == expected and ids.tolist() == [3, 1, 4]


def test_continue_ids_goes_on_past_the_context_with_the_last_words_only():
    model = small_model(position="learned", tie_embeddings=False)
    for weight in model.parameters():  # strong opinions: it matters which words there are, and where
        nn.init.normal_(weight)
    expected = list(range(8))
    for _ in range(12):
        with torch.no_grad():
            expected.append(model(torch.tensor([expected[-8:]]))[0, -1].argmax().item())
    assert len(set(expected[8:])) >= 3  # the text does not stand still
    assert continue_ids(model, torch.arange(8), 12).tolist() == expected


def test_continue_ids_draws_from_the_probabilities():
    model, ids, n = kite_model(), torch.tensor([STOP, RED, KITE]), 600
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.stack([continue_ids(model, ids, 1, generator)[-1] for _ in range(n)]), minlength=5)
    p = probabilities(model, ids.tolist())  # a third each for the stop and the two colours
    assert (counts[:3] - n * p[:3]).abs().max() < 4 * math.sqrt(n * 2 / 9) and counts[3:].sum() <= 8


def test_continue_ids_is_decided_by_its_generator_alone():
    model, ids = small_model(), torch.tensor([2])
    first, again, other = (continue_ids(model, ids, 7, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("ids", [torch.tensor([1]), torch.tensor([1, 2], dtype=torch.int32)])
def test_continue_ids_keeps_the_beginning_and_switches_dropout_off(ids):
    model = small_model(dropout=0.5)
    written = continue_ids(model, ids, 4)
    assert not model.training and written.shape == (len(ids) + 4,) and written[: len(ids)].tolist() == ids.tolist()
    assert torch.equal(continue_ids(model, ids, 4), written) and not written.requires_grad
    assert torch.equal(continue_ids(model, ids, 0), ids)


def test_continue_ids_needs_a_beginning():
    with pytest.raises(ValueError, match="at least one token"):
        continue_ids(small_model(), torch.tensor([], dtype=torch.int64), 1)
