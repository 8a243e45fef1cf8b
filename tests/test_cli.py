"""The commands as a person at a terminal meets them: what they print, what they leave on the disk, how they end.

Most tests call `main` with the words of a command line in this process; signals, encodings and exit codes of a real one have processes of their own."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from safetensors import SafetensorError
from torch.nn import functional as F

from tinylm import benchmark, cli, corpus, sampling, training
from tinylm.benchmark import load_results
from tinylm.corpus import KnownEntropyLanguage
from tinylm.distributed import own_device
from tinylm.tokenizer import Tokenizer, train_tokenizer
from tinylm.training import load_checkpoint, read_log, save_checkpoint
from tinylm.transformer import ModelConfig, TransformerLM

LANGUAGE = KnownEntropyLanguage()
SMALL = ["--preset", "tiny", "--context-length", "32", "--batch-size", "4"]


class Ended(SimpleNamespace):
    "How a command ended: code, out, err."


def tinylm(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
    return Ended(code=end.value.code, out=out.getvalue(), err=err.getvalue())


def refused(*words):
    "The one line of a command that must be refused."
    ended = tinylm(*words)
    assert ended.code == 2 and ended.out == "", ended
    assert len(ended.err.splitlines()) == 1 and ended.err.startswith("tinylm: "), ended.err
    return ended.err


def process(*words, **environment):
    command = [sys.executable, "-m", "tinylm", *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    "A folder of ten files of ten stories."
    folder = tmp_path_factory.mktemp("text") / "stories"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text("".join(LANGUAGE.documents(10, seed=i)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(stories):
    "A run of six updates, trained once, not to be changed."
    out = stories.parent / "run"
    ended = tinylm("train", "--text", stories, *SMALL, "--steps", 6, "--out", out)
    assert ended.code == 0, ended
    (out.parent / "said.txt").write_text(ended.out, encoding="utf-8")
    return out


@contextlib.contextmanager
def finger(step, times=1):
    "Presses Ctrl-C in the middle of the update with this number."
    update = training.Run.update

    def pressed(self, ids):
        if self.progress["step"] == step - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return update(self, ids)

    training.Run.update = pressed
    try:
        yield
    finally:
        training.Run.update = update


# --- text -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, said",
    [
        (b"caf\xe9 " * 9, "is not UTF-8 text: byte 3 is 0xe9"),
        ("é é ".encode() + b"\xff", "is not UTF-8 text: byte 6 is 0xff"),
        (b"PK\x03\x04\0\0" * 5, "is not text: byte 4 is 0x00"),
        ("é\0".encode(), "is not text: byte 2 is 0x00"),
        (b"\xef\xbb\xbfab\xff and more", "is not UTF-8 text: byte 5 is 0xff"),
        (b"\xef\xbb\xbf\r", "holds no text"),
        (b"", "holds no text"),
        (b" \r\n\t", "holds no text"),
        (None, "No such file"),
    ],
    ids=["latin-1", "bytes-not-characters", "binary", "zero-byte", "behind-a-mark", "mark-alone", "empty", "blank", "missing"],
)
def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path, content, said):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    line = refused("train", "--text", path, "--out", tmp_path / "run")
    assert "input.txt" in line and said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_text_comes_without_mark_and_with_plain_line_ends(tmp_path, end):
    (tmp_path / "a.txt").write_bytes(f"\ufeffKäse{end}{end}und \ufeffBrot{end}".encode())
    assert cli.read_document(tmp_path / "a.txt") == "Käse\n\nund \ufeffBrot\n"


LICENCE = "This eBook is for the use of anyone anywhere.\r\n"
BOOK = "Käse und Brot,\r\nsagte sie."
OPENINGS = ["*** START OF THE PROJECT GUTENBERG EBOOK BREAD ***", "***START OF THIS PROJECT GUTENBERG ETEXT BREAD***", "*END*THE SMALL PRINT! FOR ETEXTS*Ver.04*END*"]


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("encoding, end", [("utf-8", "\r\n"), ("latin-1", "\r\n"), ("utf-8", "\r")], ids=["utf-8", "latin-1", "old-mac"])
def test_of_a_gutenberg_file_only_the_book_is_read(tmp_path, opening, encoding, end):
    text = f"{LICENCE}{opening}\r\n\r\n{BOOK}\r\n\r\nEnd of the Project Gutenberg EBook\r\n{LICENCE}".replace("\r\n", end)
    (tmp_path / "b.txt").write_bytes(text.encode(encoding))
    assert cli.read_document(tmp_path / "b.txt") == "Käse und Brot,\nsagte sie.\n"


def test_a_gutenberg_file_without_a_book_holds_no_text(tmp_path):
    (tmp_path / "shell.txt").write_bytes(f"{LICENCE}{OPENINGS[0]}\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK BREAD ***\r\n{LICENCE}".encode())
    with pytest.raises(cli.UserError, match=r"shell\.txt holds no text"):
        cli.read_document(tmp_path / "shell.txt")


@pytest.mark.parametrize("text", [f"{LICENCE}{OPENINGS[0]}\n{BOOK}", f"{BOOK}\n*** END OF THE PROJECT GUTENBERG EBOOK BREAD ***\n{LICENCE}"])
def test_a_part_of_a_gutenberg_file_is_refused(tmp_path, text):
    (tmp_path / "part.txt").write_bytes(text.encode())
    with pytest.raises(cli.UserError, match=r"part\.txt is a part of a Project Gutenberg file"):
        cli.read_document(tmp_path / "part.txt")


def test_a_text_that_speaks_of_project_gutenberg_is_a_text(tmp_path):
    text = "I read it on the site of THE PROJECT GUTENBERG EBOOK shelf, at the END OF PROJECT GUTENBERG street.\n"
    (tmp_path / "essay.txt").write_text(text, encoding="utf-8")
    assert cli.read_document(tmp_path / "essay.txt") == text


def test_a_folder_stands_for_its_txt_files_each_once(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "folder.txt").mkdir()  # no file, whatever its name says
    for name in ("b.txt", "a.txt", "notes.md", "inner/c.txt"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert [file.name for file in cli.text_files([tmp_path])] == ["a.txt", "b.txt", "c.txt"]
    assert [file.name for file in cli.text_files([tmp_path / "b.txt", tmp_path / "inner" / ".." / "b.txt", tmp_path])] == ["b.txt", "a.txt", "c.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(cli.UserError, match="empty holds no .txt file"):
        cli.text_files([tmp_path / "empty"])


@pytest.mark.parametrize("n, held_out", [(2, 1), (9, 1), (10, 1), (19, 1), (20, 2), (25, 2)])
def test_the_last_tenth_of_the_documents_is_held_out_whole(tmp_path, n, held_out):
    files = [tmp_path / f"{i:02}.txt" for i in range(n)]
    for file in files:
        file.write_text(f"this is {file.name}", encoding="utf-8")
    train, val, said = cli.split_documents(files, [])
    for _ in range(2):  # each may be read again
        assert list(train) == [f"this is {file.name}" for file in files[:-held_out]]
        assert list(val) == [f"this is {file.name}" for file in files[-held_out:]]
    assert f"{n - held_out} documents" in said and f"{held_out} held out: {files[-held_out].name}" in said


def test_of_one_document_the_tail_is_held_out_and_it_is_said(tmp_path):
    text = "".join(chr(0x3B1 + i % 20) for i in range(105))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    train, val, said = cli.split_documents([tmp_path / "one.txt"], [])
    assert train == [text[:94]] and val == [text[94:]]
    assert "last tenth (11 characters)" in said


def test_named_held_out_text_is_what_is_held_out(stories):
    files = cli.text_files([stories])
    train, val, said = cli.split_documents(files[:1], files[7:])
    assert len(list(train)) == 1 and list(val) == [file.read_text(encoding="utf-8") for file in files[7:]]
    assert "3 held out: 7.txt, 8.txt, 9.txt" in said


def test_a_file_on_both_sides_is_refused(stories, tmp_path):
    again = stories / ".." / "stories" / "3.txt"
    assert "3.txt is in both" in refused("train", "--text", stories, "--val-text", again, *SMALL, "--steps", 1, "--out", tmp_path / "run")


# --- tokens -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes, size", [(0, 512), (204_799, 512), (204_800, 1024), (409_599, 1024), (1_638_399, 4096), (1_638_400, 8192), (10**9, 8192)])
def test_a_token_for_every_200_bytes(n_bytes, size):
    assert cli.vocabulary_size(n_bytes) == size


def test_count_first_begins_with_the_vectors_of_the_training_text(stories, tmp_path):
    options = ["--steps", 1, "--lr", "1e-30", "--count-first", "--windows", "epochs", "--out", tmp_path / "run"]
    assert tinylm("train", "--text", stories, *SMALL, *options).code == 0
    made = load_checkpoint(tmp_path / "run")
    table = made.model.embedding.weight.detach()
    torch.manual_seed(0)
    noise = TransformerLM(made.model_config).embedding.weight
    ids = training.open_tokens(tmp_path / "run" / "tokens" / "train.bin", len(table))
    torch.testing.assert_close(table, training.embedding_from_counts(ids, *table.shape, std=noise.std().item()))
    assert made.train_config.windows == "epochs"


def test_the_tokenizer_has_seen_training_documents_only(tmp_path):
    told, secret = ["a red kite. " * 40], ["a zeppelin. " * 40]
    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = cli.prepare_run(tmp_path, told, secret, 300)
    assert len(tokenizer.encode(" zeppelin")) == 9 and len(tokenizer.encode(" kite")) == 1
    assert tokenizer.encode(" zeppelin red") == train_tokenizer_quietly(told, 300).encode(" zeppelin red")


def train_tokenizer_quietly(texts, vocab_size):
    with pytest.warns(UserWarning, match="no more pairs"):
        return train_tokenizer(texts, vocab_size)


def test_the_files_of_tokens_are_the_documents_between_their_ends(tmp_path):
    texts = {"train": ["eins, zwei", "drei"], "val": ["vier Käse"]}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tokenizer = cli.prepare_run(tmp_path, texts["train"], texts["val"], 257)
    for name, documents in texts.items():
        ids = np.fromfile(tmp_path / "tokens" / f"{name}.bin", dtype=np.uint16).tolist()
        assert ids[0] == ids[-1] == tokenizer.eot_id
        assert tokenizer.decode(ids) == "<|endoftext|>" + "".join(text + "<|endoftext|>" for text in documents)
    assert json.loads((tmp_path / "tokens" / "bytes.json").read_text(encoding="utf-8")) == {"train": 14, "val": 10}
    assert "257 kinds of tokens; 17 tokens to train on, 12 held out (0.83 bytes each)" in out.getvalue()


# --- devices ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda, mps, best", [(2, False, "cuda"), (0, True, "mps"), (0, False, "cpu"), (1, True, "cuda")])
def test_auto_takes_the_best_device(monkeypatch, cuda, mps, best):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert cli.choose_device("auto") == torch.device(best)
    assert cli.choose_device("cpu") == torch.device("cpu")  # forced
    if cuda == 2:
        assert cli.choose_device("cuda:1") == torch.device("cuda:1")
    for name in ("cuda:2", "tpu", "cuda:", "cpu:0", "meta", *([] if cuda else ["cuda"]), *([] if mps else ["mps"])):
        with pytest.raises(cli.UserError, match=f"device '{name}' is not here; there is .*cpu"):
            cli.choose_device(name)


@pytest.mark.parametrize("command", ["train", "eval", "sample", "demo"])
def test_every_command_refuses_a_device_that_is_not_here(command, stories, run, tmp_path):
    words = {"train": ["--text", stories, "--out", tmp_path / "x"], "eval": ["--run", run, "--text", stories], "sample": ["--run", run], "demo": ["--out", tmp_path / "x"]}
    assert "device 'tpu' is not here" in refused(command, *words[command], "--device", "tpu")
    assert not (tmp_path / "x").exists()


# --- train ------------------------------------------------------------------------------------------------------------------------------


def bits_by_hand(model, documents, n_bytes):
    "Every token of every document after its EOT, from what stands before it in its window, in float64: loss, bits, targets."
    T, nats, n = model.config.context_length, 0.0, sum(len(ids) - 1 for ids in documents)
    for ids in documents:
        for start in range(0, len(ids) - 1, T):
            window = torch.tensor(ids[start : start + T + 1])
            with torch.no_grad():
                log_p = F.log_softmax(model(window[None, :-1])[0].double(), dim=-1)
            nats -= sum(log_p[t, window[t + 1]].item() for t in range(len(window) - 1))
    return nats / n, nats / math.log(2) / n_bytes, n


def ids_of(tokenizer, text):
    return [tokenizer.eot_id, *tokenizer.encode(text), tokenizer.eot_id]


def test_train_leaves_a_run_and_says_how_good_it_is(run, stories):
    assert {path.name for path in run.iterdir()} == {"tokens", "checkpoints", "config.json", "tokenizer.json", "log.jsonl", "loss.png"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in read_log(run) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    checkpoint = load_checkpoint(run)
    assert checkpoint.step == 6 and checkpoint.model_config.context_length == 32 and checkpoint.model_config.backend == "fused"
    text = (stories / "9.txt").read_text(encoding="utf-8")
    loss, bits, _ = bits_by_hand(checkpoint.model, [ids_of(checkpoint.tokenizer, text)], len(text.encode()))
    said = (run.parent / "said.txt").read_text(encoding="utf-8")
    assert f"held out: loss {loss:.4f} nats per token" in said and f", {bits:.4f} bits per byte" in said
    assert f"perplexity {math.exp(loss):.2f}" in said and "9 documents to train on, 1 held out: 9.txt" in said


def test_a_stream_is_cut_into_documents_at_their_ends():
    stream = np.array([0, 5, 6, 0, 0, 7, 0], dtype=np.uint16)
    assert [document.tolist() for document in cli.each_document(stream, 0)] == [[0, 5, 6, 0], [0, 0], [0, 7, 0]]


@pytest.mark.skipif(os.name == "nt", reason="asks a POSIX shell")
@pytest.mark.parametrize("name", ["run", "my run", "it's", 'a"b', "a&b", "(x)", "$HOME", "", "~"])
def test_a_path_can_be_pasted_into_a_terminal(name):
    command = f"printf %s {cli.pasteable(name, windows=False)}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, encoding="utf-8").stdout == name


@pytest.mark.parametrize("path, pasted", [(r"C:\runs\größe-1", r"C:\runs\größe-1"), (r"D:\my run", r'"D:\my run"'), ("a&b", '"a&b"'), ("it's", '"it\'s"'), ("(x)", '"(x)"')])
def test_a_path_can_be_pasted_on_windows(path, pasted):
    assert cli.pasteable(path, windows=True) == pasted


@pytest.mark.skipif(os.name == "nt", reason="quotes of a POSIX shell")
def test_the_lines_to_type_next_quote_the_folder(stories, tmp_path):
    out = tmp_path / "it's $5 & more"
    with finger(2):
        ended = tinylm("train", "--text", stories, *SMALL, "--steps", 3, "--out", out)
    assert ended.code == 130
    words = shlex.split(ended.err.splitlines()[-1].rpartition("to go on: ")[2])
    assert words == ["tinylm", "train", "--out", str(out), "--resume"] and tinylm(*words[1:]).code == 0
    ended = tinylm("train", "--text", stories, *SMALL, "--steps", 1, "--out", tmp_path / "a b")
    assert shlex.split(ended.out.splitlines()[-1].rpartition("let it write: ")[2]) == ["tinylm", "sample", "--run", str(tmp_path / "a b")]


@pytest.mark.parametrize("step", [1, 4, 6])
def test_stopped_by_ctrl_c_and_resumed_ends_as_if_nothing_had_happened(step, run, stories, tmp_path):
    out = tmp_path / "stopped"
    with finger(step):
        ended = tinylm("train", "--text", stories, *SMALL, "--steps", 6, "--out", out)
    line = ended.err.splitlines()[-1]
    assert ended.code == 130 and "held out: loss" not in ended.out
    assert load_checkpoint(out).step == step
    assert line == f"stopped, {out / 'checkpoints' / f'step-{step:08d}'} is kept; to go on: tinylm train --out {out} --resume"
    ended = tinylm(*line.rpartition("to go on: tinylm ")[2].split())
    assert ended.code == 0 and f"going on after {step} of 6 updates" in ended.out
    assert ended.out.splitlines()[-1] in (run.parent / "said.txt").read_text(encoding="utf-8")
    one, other = load_checkpoint(run), load_checkpoint(out)
    assert one.step == other.step == 6
    assert all(a.equal(b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert read_log(run) == read_log(out)


def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_is_named(stories, tmp_path):
    with finger(4, times=2):
        ended = tinylm("train", "--text", stories, *SMALL, "--steps", 6, "--checkpoint-every", 2, "--out", tmp_path / "run")
    assert ended.code == 130 and "step-00000002 is kept" in ended.err.splitlines()[-1]
    assert load_checkpoint(tmp_path / "run").step == 2


@pytest.mark.parametrize("moment", ["train_tokenizer", "write_tokens", "TransformerLM"])
def test_ctrl_c_before_the_first_checkpoint_says_that_nothing_is_kept(moment, stories, tmp_path, monkeypatch):
    def pressed(*arguments):
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(cli, moment, pressed)
        ended = tinylm("train", "--text", stories, *SMALL, "--steps", 1, "--out", out)
    assert ended.code == 130 and ended.err == "stopped before there was anything to keep\n"
    assert "holds no run to go on with" in refused("train", "--out", out, "--resume")
    assert tinylm("train", "--text", stories, *SMALL, "--steps", 1, "--out", out).code == 0  # the rest is in nobody's way


@pytest.mark.parametrize("option", ["--lr 1", "--text x", "--seed 1", "--preset tiny", "--batch-size 4", "--compile", "--count-first", "--windows epochs"])
def test_resume_refuses_options_that_would_not_count(option, run):
    line = refused("train", "--out", run, "--resume", *option.split())
    assert f"{option.split()[0]} belongs to the run" in line and "--steps" in line


def test_resume_takes_more_updates_but_not_fewer_than_made(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    assert "--steps 5: this run has made 6 updates already" in refused("train", "--out", out, "--resume", "--steps", 5)
    assert tinylm("train", "--out", out, "--resume", "--steps", 8).code == 0
    assert load_checkpoint(out).step == 8
    assert [line["step"] for line in read_log(out) if "loss" in line] == list(range(1, 9))


def test_more_updates_are_not_forgotten_when_stopped_before_the_first(run, tmp_path, monkeypatch):
    out = shutil.copytree(run, tmp_path / "run")

    @contextlib.contextmanager
    def pressed_at_once():
        yield [signal.SIGINT]

    with monkeypatch.context() as patch:
        patch.setattr(training, "first_interrupt_waits", pressed_at_once)
        ended = tinylm("train", "--out", out, "--resume", "--steps", 8)
    assert ended.code == 130 and load_checkpoint(out).step == 6
    ended = tinylm("train", "--out", out, "--resume")
    assert "going on after 6 of 8 updates" in ended.out and load_checkpoint(out).step == 8


def test_a_run_of_train_in_python_is_not_for_resume_here(run, tmp_path):
    whole, ids = load_checkpoint(run), torch.arange(40)
    config = training.TrainConfig(1, 2, 8, 1e-3)
    for name, tokenizer in (("mute", None), ("speaking", whole.tokenizer)):
        training.train(whole.model, ids, None, config, out_dir=tmp_path / name, tokenizer=tokenizer, progress=False)
        assert f"{tmp_path / name} was not made by `tinylm train`" in refused("train", "--out", tmp_path / name, "--resume")
    shutil.copytree(run / "tokens", tmp_path / "mute" / "tokens")
    assert "was not made by `tinylm train`" in refused("train", "--out", tmp_path / "mute", "--resume")


def test_a_run_that_stands_is_never_overwritten(run, stories, small_demo):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "holds a run already" in refused("train", "--text", stories, *SMALL, "--steps", 1, "--out", run)
    assert "holds a run already" in refused("demo", "--steps", 1, "--out", run)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_folder_of_something_else_is_left_alone(command, stories, tmp_path):
    (tmp_path / "diary.txt").write_text("dear", encoding="utf-8")
    (tmp_path / "tokens").mkdir()
    words = ["--text", stories, *SMALL] if command == "train" else []
    assert "already holds diary.txt" in refused(command, *words, "--steps", 1, "--out", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diary.txt", "tokens"}


def test_what_a_file_manager_leaves_is_in_nobodys_way(tmp_path):
    (tmp_path / ".DS_Store").touch()
    assert cli.check_new(tmp_path) is None
    cli.clear_demo(tmp_path, 5, 0)
    (tmp_path / "Thumbs.db").touch()
    cli.clear_demo(tmp_path, 5, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json"}


def test_a_demo_that_was_trained_on_is_not_deleted(tmp_path):
    cli.clear_demo(tmp_path, 5, 0)
    training.write_json(tmp_path / "config.json", dict(train=dict(steps=5)))
    cli.clear_demo(tmp_path, 5, 0)  # an ordinary demo goes
    training.write_json(tmp_path / "config.json", dict(train=dict(steps=50_000)))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(cli.UserError, match="holds a demo that was trained on"):
        cli.clear_demo(tmp_path, 5, 0)
    assert (tmp_path / "checkpoints").exists()


def test_a_rate_without_use_is_refused(stories, tmp_path):
    line = ("train", "--text", stories, *SMALL, "--steps", 1, "--out", tmp_path / "run", "--optimizer", "adamw")
    assert "--muon-lr has no meaning with --optimizer adamw" in refused(*line, "--muon-lr", 9)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error, said", [
    (RuntimeError("[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory"),
    (RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found in"), "--compile needs a C++ compiler"),
    (MemoryError(), "MemoryError"),
])
def test_too_little_memory_and_a_missing_compiler_are_one_line(run, monkeypatch, error, said):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(cli, "load_checkpoint", fails)
    assert said in refused("sample", "--run", run)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_place_that_cannot_be_written_is_one_line(command, stories):
    words = ["--text", stories, *SMALL] if command == "train" else []
    ended = tinylm(command, *words, "--steps", 1, "--out", stories / "1.txt" / "run")
    assert ended.code == 2 and re.fullmatch(r"tinylm: .*1\.txt.*\n", ended.err), ended


@pytest.mark.parametrize(
    "options, said",
    [
        ("--preset huge", "preset 'huge' is none of tiny, reference"),
        ("--optimizer sgd", "optimizer='sgd' must be one of adamw, muon, normuon"),
        ("--windows twice", "windows='twice' must be one of anywhere, epochs"),
        ("--precision fp8", "precision='fp8' must be one of"),
        ("--lr 0", "lr=0.0 must be positive"),
        ("--lr nan", "lr=nan must be positive"),
        ("--dropout 1.5", "dropout=1.5"),
        ("", "give --text FILE_OR_FOLDER, or --resume"),
    ],
)
def test_a_bad_option_is_refused_before_any_text_is_read(options, said, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "read_bytes", lambda path: pytest.fail("text was read"))
    text = ["--text", tmp_path / "x.txt"] if options else []
    assert said in refused("train", *text, "--out", tmp_path / "run", *options.split())
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line(stories, tmp_path, monkeypatch):
    def full(tensors, path, *rest, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training, "save_file", full)
    ended = tinylm("train", "--text", stories, *SMALL, "--steps", 1, "--out", tmp_path / "run")
    assert ended.code == 2 and re.fullmatch(r"tinylm: .*No space left on device.*\n", ended.err), ended


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("A short text.", encoding="utf-8")
    ended = tinylm("train", "--text", tmp_path / "a.txt", "--preset", "tiny", "--out", tmp_path / "run")
    assert ended.code == 2 and re.fullmatch(r"tinylm: the training text has \d+ tokens; a window of context_length=256 needs 257\n", ended.err)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_numbers_that_are_not_finite_end_the_run_in_one_line(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "next_token_loss", lambda logits, *rest, **options: logits.sum() * math.nan)
    ended = tinylm("train", "--text", stories, *SMALL, "--steps", 20, "--out", tmp_path / "run")
    assert ended.code == 2 and "in a row were not finite" in ended.err.splitlines()[-1] and "Traceback" not in ended.err


def test_a_bug_shows_its_traceback(monkeypatch, run):
    monkeypatch.setattr(cli, "load_checkpoint", lambda *arguments, **options: {}["nothing"])
    with pytest.raises(KeyError):
        cli.main(["sample", "--run", str(run)])


# --- eval and sample --------------------------------------------------------------------------------------------------------------------


def test_eval_scores_every_token_of_every_text_once(run, stories):
    checkpoint, files = load_checkpoint(run), sorted(stories.glob("*.txt"))[:3]
    texts = [file.read_text(encoding="utf-8") for file in files]
    documents = [ids_of(checkpoint.tokenizer, text) for text in texts]
    loss, bits, n = bits_by_hand(checkpoint.model, documents, sum(len(text.encode()) for text in texts))
    ended = tinylm("eval", "--run", run, *[word for file in files for word in ("--text", file)])
    assert ended.code == 0 and "in 3 documents; model after 6 updates" in ended.out
    assert f"loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, {bits:.4f} bits per byte ({n:,} tokens)" in ended.out


def test_eval_cleans_a_book_and_refuses_a_bad_stride(run, tmp_path):
    book = f"{LICENCE}{OPENINGS[0]}\n{'Mia made a red kite. ' * 9}\n*** END OF THE PROJECT GUTENBERG EBOOK BREAD ***\n{LICENCE}"
    (tmp_path / "raw.txt").write_text(book, encoding="utf-8")
    (tmp_path / "clean.txt").write_text(cli.read_document(tmp_path / "raw.txt"), encoding="utf-8")
    raw, clean = (tinylm("eval", "--run", run, "--text", tmp_path / f"{name}.txt").out for name in ("raw", "clean"))
    assert raw == clean and "189 bytes in 1 document;" in raw
    assert "stride=33" in tinylm("eval", "--run", run, "--text", tmp_path / "raw.txt", "--stride", 33).err


def test_sample_writes_what_generate_writes(run):
    checkpoint = load_checkpoint(run)
    ids = torch.tensor([ids_of(checkpoint.tokenizer, "Mia made")[:-1]])
    settings = dict(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    expected = sampling.generate(checkpoint.model, ids, 40, stop_ids=[checkpoint.tokenizer.eot_id], overflow="slide",
                                 generator=torch.Generator().manual_seed(5), **settings)
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    ended = tinylm("sample", "--run", run, "--prompt", "Mia made", "--tokens", 40, "--seed", 5, *words)
    assert ended.code == 0
    assert ended.out == checkpoint.tokenizer.decode(expected[0, 1:]).removesuffix("<|endoftext|>") + "\n"


@pytest.fixture
def spoken(monkeypatch):
    "Lets `sample` say given tokens; what it was asked is kept in `asked`."
    said = SimpleNamespace(tokens=[], asked=None, pieces=[])

    def fake(model, ids, n, on_token, **settings):
        said.asked = dict(ids=ids, n=n, **settings)
        for token in said.tokens:
            on_token(torch.tensor([token]))
            said.pieces.append(sys.stdout.getvalue())

    monkeypatch.setattr(cli, "generate", fake)
    return said


def test_sample_streams_whole_characters_and_hides_the_end(run, spoken):
    tokenizer = load_checkpoint(run).tokenizer
    first, second = tokenizer.encode("é")
    spoken.tokens = [first, second, first, tokenizer.eot_id]
    ended = tinylm("sample", "--run", run, "--prompt", "caf")
    assert spoken.pieces == ["caf", "café", "café", "café"]  # shown as they come, never half of one
    assert ended.out == "café\ufffd\n"  # what stays half is said at the end


def test_sample_begins_a_document_and_reads_typed_specials_as_text(run, spoken):
    tokenizer = load_checkpoint(run).tokenizer
    tinylm("sample", "--run", run)
    assert spoken.asked["ids"].tolist() == [[tokenizer.eot_id]]
    tinylm("sample", "--run", run, "--prompt", "<|endoftext|>")
    ids = spoken.asked["ids"][0].tolist()
    assert ids.count(tokenizer.eot_id) == 1 and tokenizer.decode(ids[1:]) == "<|endoftext|>"
    assert spoken.asked["stop_ids"] == (tokenizer.eot_id,) and spoken.asked["overflow"] == "slide"


def test_sample_goes_on_beyond_its_window(run):
    assert load_checkpoint(run).model_config.context_length == 32
    assert tinylm("sample", "--run", run, "--tokens", 50, "--prompt", "kite " * 40).code == 0


def test_sample_draws_by_seed(run):
    one, again, other = (tinylm("sample", "--run", run, "--tokens", 20, "--seed", seed).out for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    "words, said",
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--top-p", "1.5"], "top_p=1.5"),
        (["--top-k", "0"], "0"),
        (["--min-p", "2"], "2.0"),
        (["--repetition-penalty", "0"], "0.0"),
        (["--prompt", "half \ud83d"], "half a character at position 5"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_sample_refuses_in_one_line_and_prints_nothing(words, said, run):
    assert said in refused("sample", "--run", run, "--prompt", "Mia", *words)


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_what_is_no_checkpoint_is_refused_by_name(command, run, stories, tmp_path):
    words = ["--text", stories] if command == "eval" else []
    folder = run / "checkpoints" / "step-00000006"

    def fails(path):
        return refused(command, "--run", path, *words)

    assert "there is no such folder" in fails(tmp_path / "nowhere")
    assert "is no checkpoint and no run" in fails(stories)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "checkpoint.json").write_text('{"model": "gpt"}', encoding="utf-8")
    assert "was not written by tinylm" in fails(tmp_path / "foreign")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert "model.safetensors is corrupt" in fails(broken)
    (broken / "model.safetensors").write_bytes(weights[:-100])
    assert "model.safetensors is corrupt" in fails(broken)
    (broken / "model.safetensors").unlink()
    assert "model.safetensors is missing" in fails(broken)
    (broken / "checkpoint.json").write_text("{", encoding="utf-8")
    assert "checkpoint.json cannot be read" in fails(broken)
    save_checkpoint(tmp_path / "mute", TransformerLM(ModelConfig.preset("tiny")))
    assert "holds no tokenizer" in fails(tmp_path / "mute")
    assert tinylm(command, "--run", folder, *words).code == 0  # a checkpoint of a run is as good as the run


# --- demo -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(cli, "N_STORIES", 600)
    monkeypatch.setattr(cli, "N_HELD_OUT", 40)
    monkeypatch.setattr(cli, "DEMO", {**cli.DEMO, "batch_size": 4})
    monkeypatch.setattr(cli, "DEMO_TIMING", {**cli.DEMO_TIMING, "new_tokens": (3, 6)})


def offline(*arguments, **options):
    raise AssertionError("the network was asked for")


def rungs(printed):
    found = re.findall(r"^  (\S.*?) +([\d.]+)  (█+)$", printed, re.M)
    return {name.strip(): float(bits) for name, bits, _ in found}, {name.strip(): len(bar) for name, _, bar in found}


def test_demo_needs_nothing_and_prints_the_ladder_and_three_marked_stories(small_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "socket", offline)
    monkeypatch.chdir(tmp_path)
    ended = tinylm("demo", "--steps", 3, "--device", "cpu")
    assert ended.code == 0 and "3/3" in ended.err, ended  # the progress bar
    bits, bars = rungs(ended.out)
    assert list(bits) == sorted(bits, key=bits.get, reverse=True) and set(bits) == {"unigram", "bigram", "5-gram", "this model", "floor"}
    assert max(bars.values()) == 36 and min(bars, key=bars.get) == "floor"
    held_out = LANGUAGE.documents(40, 2)
    assert bits["floor"] == pytest.approx(-sum(map(LANGUAGE.log_prob, held_out)) / math.log(2) / sum(map(len, held_out)), abs=5e-5)
    out = tmp_path / "tinylm-demo"
    tokenizer, model = Tokenizer.load(out / "tokenizer.json"), load_checkpoint(out).model
    documents = [ids_of(tokenizer, story) for story in held_out]
    assert bits["this model"] == pytest.approx(bits_by_hand(model, documents, sum(map(len, held_out)))[1], abs=2e-4)
    above = float(re.search(r"([\d.]+) % above the floor; leak test: passed", ended.out)[1])
    assert above == pytest.approx(100 * (bits["this model"] / bits["floor"] - 1), rel=2e-3)
    marked = ended.out.split("it writes\n")[1].splitlines()[:3]
    assert [line[:4] in ("  ✓ ", "  ✗ ") for line in marked] == [True] * 3
    assert {"loss.png", "log.jsonl", "checkpoints"} <= {path.name for path in out.iterdir()}
    timing = ended.out.split("how fast it writes\n")[1].split("\n\n")[0].splitlines()
    assert len(timing) == 5
    gate, head, *rows, foot = timing
    assert float(re.search(r"tokens equal, largest difference of a logit (\S+)$", gate)[1]) < 1e-4
    assert [row.split()[:3] for row in rows] == [["8", "+", "3"], ["8", "+", "6"]] and "of 3 rounds in turns" in foot


def test_the_tables_count_training_tokens_and_are_scored_on_held_out_ones(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = cli.prepare_run(tmp_path, LANGUAGE.documents(50, 1), LANGUAGE.documents(5, 2), 300)
    train, val = (np.fromfile(tmp_path / "tokens" / f"{name}.bin", dtype=np.uint16).tolist() for name in ("train", "val"))
    kinds, n = len(set(train)), len(train)
    unigram = -sum(math.log2((train.count(id) + kinds / (kinds + 1)) / (n + kinds)) for id in val[1:])  # Witten–Bell
    rows = cli.ladder(tmp_path, tokenizer, n_bytes=1000)
    assert rows["unigram"] == pytest.approx(unigram / 1000, rel=1e-9)
    assert list(rows) == ["unigram", "bigram", "5-gram"] and rows["unigram"] > rows["bigram"] > rows["5-gram"]


def test_the_leak_test_allows_one_chance_in_a_million():
    assert math.log(1e6) == pytest.approx(13.8155, abs=1e-4)
    assert not cli.leaks(100.0, 100.0) and not cli.leaks(86.2, 100.0) and cli.leaks(86.1, 100.0)


@pytest.mark.parametrize("nats, verdict", [(20.0, "leak test: LEAK"), (900.0, "leak test: passed")])
def test_compare_says_leak_where_there_is_one(nats, verdict, tmp_path, capsys, monkeypatch):
    held_out = LANGUAGE.documents(10, 2)
    tokenizer = cli.prepare_run(tmp_path, LANGUAGE.documents(50, 1), held_out, 300)
    drawn = []
    monkeypatch.setattr(cli, "plot_log", lambda out, floor: drawn.append((out, floor)))
    n_bytes = sum(map(len, held_out))
    cli.compare(tmp_path, LANGUAGE, held_out, tokenizer, SimpleNamespace(nats=nats, n_tokens=1000, bits_per_byte=nats / math.log(2) / n_bytes))
    assert verdict in capsys.readouterr().out
    assert drawn == [(tmp_path, pytest.approx(-sum(map(LANGUAGE.log_prob, held_out)) / 1000))]  # nats per token, as the curve


def test_a_story_is_marked_by_whether_it_is_in_the_language(capsys):
    story = LANGUAGE.documents(1, 3)[0]
    cli.show_stories([story, story[:-2] + "!\n", story.rstrip("\n"), "a\x1b[2J\n"], LANGUAGE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["✓", "✗", "✗", "✗"]
    assert lines[0] == f"  ✓ {story.strip()}" and lines[3] == "  ✗ a�[2J"


def test_stories_are_drawn_from_the_models_own_distribution():
    tokenizer = train_tokenizer_quietly(["ab\n" * 9], 300)
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig.preset("tiny", vocab_size=tokenizer.vocab_size, context_length=16))
    stories = cli.write_stories(model, tokenizer, 3, seed=4)
    for i, story in enumerate(stories):
        start = torch.tensor([[tokenizer.eot_id]])
        alone = sampling.generate(model, start, 15, temperature=1.0, stop_ids=[tokenizer.eot_id], generator=torch.Generator().manual_seed(4 + i))
        assert story == tokenizer.decode(alone[0, 1:]).removesuffix("<|endoftext|>")


def test_demo_is_the_same_for_the_same_seed_and_replaces_only_a_demo(small_demo, tmp_path):
    out = tmp_path / "demo"
    one, again, other = (tinylm("demo", "--steps", 1, "--seed", seed, "--out", out) for seed in (7, 7, 8))
    assert one.code == again.code == other.code == 0
    texts = [ended.out.split("how fast it writes")[0] for ended in (one, again, other)]
    assert texts[0] == texts[1] != texts[2]
    (out / "diary.txt").write_text("dear", encoding="utf-8")
    assert "holds" in refused("demo", "--out", out)
    assert (out / "diary.txt").exists() and load_checkpoint(out).step == 1


def test_demo_stopped_by_ctrl_c_leaves_a_checkpoint_that_can_be_resumed(small_demo, tmp_path):
    with finger(2):
        ended = tinylm("demo", "--steps", 3, "--out", tmp_path / "demo")
    assert ended.code == 130 and load_checkpoint(tmp_path / "demo").step == 2
    assert f"tinylm train --out {tmp_path / 'demo'} --resume" in ended.err.splitlines()[-1]
    ended = tinylm("train", "--out", tmp_path / "demo", "--resume")
    assert ended.code == 0 and load_checkpoint(tmp_path / "demo").step == 3


# --- books ------------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def attic(tmp_path, monkeypatch):
    "A folder with three books as published, which are all the books there are."
    library = []
    (tmp_path / "attic").mkdir()
    for number, (slug, split) in enumerate({"kites": "train", "boats": "train", "clouds": "val"}.items(), 1):
        raw = published(slug).encode()
        (tmp_path / "attic" / f"{number}.txt").write_bytes(raw)
        library.append(corpus.BOOKS[0]._replace(gutenberg_id=number, slug=slug, split=split, sha256=hashlib.sha256(raw).hexdigest()))
    monkeypatch.setattr(corpus, "BOOKS", library)
    return tmp_path / "attic"


def published(slug):
    return f"*** START OF THIS PROJECT GUTENBERG EBOOK {slug.upper()} ***\r\n\r\nOf {slug}, née “{slug}”.\r\n\r\n*** END OF THIS PROJECT GUTENBERG EBOOK ***\r\nLicence"


def test_books_are_laid_out_for_train_and_eval(attic, tmp_path):
    ended = tinylm("books", "--out", tmp_path / "books", "--raw-dir", attic)
    found = {path.relative_to(tmp_path / "books").as_posix(): path.read_bytes() for path in (tmp_path / "books").rglob("*.txt")}
    assert found == {f"{place}.txt": f"Of {Path(place).name}, née “{Path(place).name}”.\n".encode() for place in ("train/kites", "train/boats", "val/clouds")}
    assert ended.code == 0 and [line.split(": ")[1] for line in ended.out.splitlines()] == [f"2 books, {sum(len(b) for n, b in found.items() if 'train' in n)} bytes", f"1 books, {len(found['val/clouds.txt'])} bytes"]
    for split, names in (("train", ["boats", "kites"]), ("val", ["clouds"])):
        files = cli.text_files([tmp_path / "books" / split])
        assert [cli.read_document(file).encode() for file in files] == [found[f"{split}/{name}.txt"] for name in names]


def test_books_are_all_there_or_none(attic, tmp_path):
    (attic / "3.txt").write_bytes(b"another book")
    assert "3.txt" in refused("books", "--out", tmp_path / "books", "--raw-dir", attic)
    assert not (tmp_path / "books").exists()


def test_books_go_to_an_empty_place_only(attic, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").write_text("It was")
    assert "novel.txt" in refused("books", "--out", tmp_path / "mine", "--raw-dir", attic)


# --- bench ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_tiny(monkeypatch):
    monkeypatch.setattr(cli, "SETUPS", {**cli.SETUPS, "tiny": dict(prompt_lengths=3, new_tokens=(2, 4), careless=True)})
    yield
    torch.set_num_threads(1)


def test_bench_prints_gate_and_table_and_keeps_every_duration(short_tiny, tmp_path):
    out = tmp_path / "new" / "bench"
    ended = tinylm("bench", "--preset", "tiny", "--device", "cpu", "--threads", 2, "--repeats", 3, "--out", out)
    assert ended.code == 0 and "32/32" in ended.err, ended  # 2 lengths, 4 ways, 1 + 3 rounds
    first, gate, head, *rows, careless, foot, last = ended.out.splitlines()
    parameters = TransformerLM(ModelConfig.preset("tiny")).num_parameters()
    assert first == f"tiny: {parameters:,} parameters on cpu, 2 threads"
    assert float(re.search(r"tokens equal, largest difference of a logit (\S+)$", gate)[1]) < 1e-5
    assert [row.split()[:3] for row in rows] == [["3", "+", "2"], ["3", "+", "4"]] and "of 3 rounds in turns, 1 before them apart" in foot
    assert re.fullmatch(r"times faster than a loop that makes all logits: [\d.]+, [\d.]+", careless)
    report, results = load_results(out)
    assert last.endswith(str(out / "bench.json")) and (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert report["name"] == "tiny" and report["machine"]["threads"] == 2 and report["machine"]["dtype"] == "torch.float32"
    for result in results:
        for samples in (result.uncached, result.cached, result.prefill, result.careless):
            assert samples.n == 3 and len(samples.warmup) == 1 and min(samples.values) > 0


def test_bench_of_a_run_measures_its_weights_inside_its_context(run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "benchmark_generation", lambda model, **setup: seen.append(model) or benchmark.benchmark_generation(model, **setup))
    ended = tinylm("bench", "--run", run, "--device", "cpu", "--repeats", 1)
    assert ended.code == 0 and ended.out.startswith("run: ") and ended.out.count("…") == 4 * 3 + 1
    rows = re.findall(r"^ *(\d+) \+ (\d+) ", ended.out, re.M)
    assert [tuple(map(int, row)) for row in rows] == [(2, 8), (2, 16), (2, 30)]  # of a context of 32
    expected = load_checkpoint(run).model.state_dict()
    assert all(tensor.equal(expected[name]) for name, tensor in seen[0].state_dict().items())


def test_bench_without_words_takes_reference_as_published(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "timed", lambda model, setup, repeats: asked.append((model, setup, repeats)) or [])
    monkeypatch.setattr(cli, "results_table", lambda results: "a table")
    assert tinylm("bench", "--device", "cpu").code == 0
    ((model, setup, repeats),) = asked
    assert model.config == ModelConfig.preset("reference", backend="fused") and repeats == 9 and not model.training
    assert setup == dict(prompt_lengths=8, new_tokens=(128, 256))


@pytest.mark.parametrize(
    "words, said",
    [("--preset huge", "'huge' is none of"), ("--preset tiny --run {run}", "--preset and --run"), ("--run nowhere", "there is no such folder"),
     ("--preset tiny --device tpu", "'tpu' is not here"), ("--preset tiny --out {file}", "File exists")],
)
def test_bench_refuses_before_it_measures(words, said, run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli, "benchmark_generation", lambda *arguments, **options: pytest.fail("measured"))
    assert said in refused("bench", *words.format(run=run, file=tmp_path / "file").split())


def test_bench_does_not_time_a_cache_that_lies(short_tiny, monkeypatch):
    def lies(self, ids, *, cache=None, hidden=TransformerLM.hidden, **options):
        return hidden(self, ids, cache=cache, **options) * (1.001 if cache is not None else 1.0)

    monkeypatch.setattr(TransformerLM, "hidden", lies)
    monkeypatch.setattr(cli, "results_table", lambda results: pytest.fail("timed"))
    with pytest.raises(benchmark.CacheMismatch, match="nothing is timed"), contextlib.redirect_stderr(io.StringIO()):
        cli.main(["bench", "--preset", "tiny", "--device", "cpu"])


# --- the door ---------------------------------------------------------------------------------------------------------------------------

COMMANDS = typer.main.get_command(cli.app).commands


def test_there_are_seven_commands_and_help_names_them():
    assert set(COMMANDS) == {"demo", "train", "books", "eval", "sample", "student", "bench"}
    ended = tinylm("--help")
    assert ended.code == 0 and all(re.search(rf"^  {name}  +\S", ended.out, re.M) for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_explains_every_option(name):
    ended = tinylm(name, "--help")
    assert ended.code == 0 and "Usage: tinylm" in ended.out
    for option in COMMANDS[name].params:
        if option.name != "help":
            assert option.help and option.help[0].isalnum() and option.help.endswith("."), option.name
            assert option.opts[0] in ended.out


def test_help_names_every_optimizer():
    options = {option.name: option.help for option in COMMANDS["train"].params}
    assert re.findall(r"\w+", options["optimizer"]) == list(training.OPTIMIZERS)
    assert options["muon_lr"] == "Peak learning rate of Muon and NorMuon."


@pytest.mark.parametrize("text, said", [("\n\n  what is wrong\nand why", "what is wrong"), ("one\n", "one"), ("", "ValueError"), (" \n", "ValueError")])
def test_of_an_error_its_first_words_are_said(text, said, monkeypatch, run):
    def fails(*arguments, **options):
        raise ValueError(text)

    monkeypatch.setattr(cli, "load_checkpoint", fails)
    assert refused("sample", "--run", run) == f"tinylm: {said}\n"


def test_torchrun_is_for_train_alone(tmp_path, monkeypatch, run):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for line in (["demo", "--out", tmp_path / "demo"], ["eval", "--run", run, "--text", tmp_path], ["sample", "--run", run], ["bench"], ["student"], ["books", "--out", tmp_path / "books"]):
        assert "only train" in refused(*line)
    assert list(tmp_path.iterdir()) == []


def test_every_process_meets_the_others_on_its_own_card(stories, tmp_path, monkeypatch):
    asked = []

    def joined(device, timeout):
        asked.append(own_device(device))  # as `join` does
        raise cli.UserError("as far as this")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cli, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(cli, "join", joined)
    assert "as far as this" in refused("train", "--out", tmp_path / "run", "--text", stories)
    assert asked == [torch.device("cuda", 1)]


@pytest.mark.parametrize("line", ["fly", "train", "demo --stepz 3", "demo --steps 0", "demo --steps many", "sample", "train --out x --vocab-size 256", "eval --run x", "demo --seed -1", "bench --repeats 0", "bench --threads 0"])
def test_a_line_that_cannot_be_understood_ends_with_code_2(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = tinylm(*line.split())
    assert ended.code == 2 and ended.out == "" and ended.err.startswith("Usage: tinylm") and ended.err.count("Error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_installed():
    (command,) = [point for point in entry_points(group="console_scripts") if point.name == "tinylm"]
    assert command.load() is cli.main


def test_a_real_process_ends_with_code_2_and_one_line(tmp_path):
    ended = process("train", "--text", tmp_path / "größe.txt", "--out", tmp_path / "run", PYTHONIOENCODING="cp1252")
    assert ended.returncode == 2 and ended.stdout == b""
    assert ended.stderr.decode("utf-8").splitlines() == [f"tinylm: cannot read {tmp_path / 'größe.txt'}: No such file or directory"]


def test_output_is_utf8_whatever_the_terminal_believes(run, monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="cp1252"))
    with pytest.raises(SystemExit):
        cli.main(["sample", "--run", str(run), "--prompt", "▢ é", "--tokens", "3"])
    sys.stdout.flush()
    assert terminal.getvalue().startswith("▢ é".encode("utf-8"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_on_a_real_process(stories, tmp_path):
    words = ["train", "--text", stories, *SMALL, "--steps", 100_000, "--out", tmp_path / "run"]
    running = subprocess.Popen([sys.executable, "-m", "tinylm", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = threading.Timer(60, running.kill)
    deadline.start()
    log = tmp_path / "run" / "log.jsonl"
    while running.poll() is None and not (log.exists() and log.read_text(encoding="utf-8").count("\n") > 3):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    deadline.cancel()
    assert running.returncode == 130, errors
    assert b"Traceback" not in errors and b"--resume" in errors.splitlines()[-1]
    assert load_checkpoint(tmp_path / "run").step == len([line for line in read_log(tmp_path / "run") if "loss" in line])
