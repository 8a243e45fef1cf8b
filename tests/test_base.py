"""The model that comes with the course: complete, small, as good as its evaluation says."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tinylm.corpus import gutenberg
from tinylm.kv_cache import cache_error
from tinylm.training import evaluate, load_checkpoint, read_log, token_stream

DATA = Path(__file__).parents[1] / "data"
FOLDER = DATA / "checkpoints" / "base"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="data/checkpoints/base is not here (an installed package has no data)")


@pytest.fixture(scope="module")
def shipped():
    return load_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def evaluation():
    return json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))


def test_it_is_complete_and_small(shipped):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 15_000_000
    assert shipped.model.num_parameters() == 6_917_376 and shipped.model.embedding.weight.dtype == torch.float32
    assert shipped.tokenizer.vocab_size == shipped.model_config.vocab_size == 8192
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}


def test_its_logs_end_where_its_evaluation_was_made(shipped, evaluation):
    ends = [[line for line in read_log(DATA / "runs" / name / "log.jsonl") if "loss" in line][-1] for name in ("base-8m", "base-18m")]
    halfway = evaluation["after_the_first_leg"]
    assert ends[0]["step"] == halfway["updates"] and ends[0]["tokens"] == halfway["tokens_seen"]
    assert ends[1]["step"] == shipped.step and sum(end["step"] for end in ends) == evaluation["updates"]
    assert sum(end["tokens"] for end in ends) == evaluation["tokens_seen"]


def test_it_knows_english_when_it_sees_it(shipped):
    "A sentence of our own, and the same words in alphabetical order."
    tokenizer = shipped.tokenizer
    sentence = "He put the letter on the table, and looked at her for a long time without saying a word."
    shuffled = " ".join(sorted(sentence.split()))
    losses = [evaluate(shipped.model, torch.tensor([tokenizer.eot_id, *tokenizer.encode(text)])).loss for text in (sentence, shuffled)]
    assert losses[0] < 5 and losses[1] > losses[0] + 1


def test_the_cache_writes_what_the_model_writes(shipped):
    ids = torch.tensor([shipped.tokenizer.encode("It was a bright cold morning, and the two of them walked down to the sea.")])
    assert cache_error(shipped.model, ids, [4] + [1] * (ids.shape[1] - 4)) < 1e-4


def test_the_score_is_measured_again(shipped, evaluation, local_data):
    texts = list(gutenberg("val", raw_dir=local_data / "gutenberg_raw").values())
    streams = [np.concatenate(list(token_stream(shipped.tokenizer, [text]))) for text in texts]
    n_bytes = sum(len(text.encode()) for text in texts)
    again = evaluate(shipped.model, streams, n_bytes=n_bytes)
    assert n_bytes == evaluation["held_out"]["n_bytes"] and again.n_tokens == evaluation["held_out"]["n_tokens"]
    assert again.bits_per_byte == pytest.approx(evaluation["held_out"]["bits_per_byte"], abs=1e-4)
