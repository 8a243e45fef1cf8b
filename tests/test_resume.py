"""A run that was stopped goes on bit for bit as if nothing had happened, and a checkpoint is whole or refused.

Stopped means: by Ctrl-C, by an exception, by the end of the process at any file operation, by a real kill at a random moment.
"""
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import tinylm
from tinylm import training
from tinylm.tokenizer import train_tokenizer
from tinylm.training import CheckpointError, Run, RunFolder, TrainConfig, load_checkpoint, read_log, save_checkpoint, train, weights_of
from tinylm.transformer import ModelConfig, TransformerLM

V, T = 11, 8
IDS = torch.randint(V, (90,), generator=torch.Generator().manual_seed(1))
CONFIG = TrainConfig(steps=8, batch_size=2, context_length=T, lr=1e-2, warmup_steps=2, grad_accumulation=2, eval_every=2, eval_tokens=12, checkpoint_every=3)


def build(seed=0, **fields):
    torch.manual_seed(seed)
    fields = {**dict(vocab_size=V, context_length=T, d_model=12, n_layers=1, n_heads=2, d_ff=10, dropout=0.2), **fields}
    return TransformerLM(ModelConfig(**fields))


def another_process():
    "What a new process has: other random streams, and a model that knows nothing of the old one."
    torch.rand(3), random.seed(99), np.random.seed(99)
    return build(seed=random.randrange(1000))


def go(out, config=CONFIG, model=None, **options):
    options = {**dict(resume=False, progress=False, n_bytes=50), **options}
    return train(build() if model is None else model, IDS, IDS[:30], config, out_dir=out, **options)


def content(out, step=None):
    "Everything a run leaves that may not depend on how often it was stopped: bytes of files, and what is written in JSON."
    folder = training.find_checkpoint(out)
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    info = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    info["state"]["progress"].pop("seconds")
    return dict(found, info=info, log=(Path(out) / "log.jsonl").read_text(encoding="utf-8"), name=folder.name)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name] == expected[name], name


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    "Drawing takes longer than these runs."
    monkeypatch.setattr(training, "plot_log", lambda path: None)


class PowerCut(BaseException):
    "The end of a process: nothing after it happens."


@contextmanager
def after_update(step, act):
    "act() is called when that update has been made, before it is logged."
    real = Run.update

    def update(run, ids):
        line = real(run, ids)
        if line["step"] == step:
            act()
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "update", update)
        yield


def power_cut():
    raise PowerCut


@contextmanager
def cut_after(step):
    "The run ends without a word when that update has been made."
    with after_update(step, power_cut), pytest.raises(PowerCut):
        yield


def ctrl_c_after(step):
    "Ctrl-C arrives at the end of that update."
    return after_update(step, lambda: signal.raise_signal(signal.SIGINT))


# --- exact resume -------------------------------------------------------------------------------------------------------------------------

KINDS = {
    "adamw": dict(),
    "muon": dict(optimizer="muon"),
    "normuon-held": dict(optimizer="normuon", hold_steps=3),
    "no-accumulation": dict(grad_accumulation=1, clip_norm=0),
    "bf16": dict(precision="bf16"),
    "epochs": dict(windows="epochs", count_first=True),
    "fp16-muon": dict(precision="fp16", optimizer="muon"),
}


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_a_run_cut_off_three_times_ends_bit_for_bit_like_one_that_was_not(tmp_path, fields):
    config = replace(CONFIG, **fields)
    go(tmp_path / "whole", config)
    for i, step in enumerate((2, 5, 8)):
        with cut_after(step):
            go(tmp_path / "cut", config, another_process() if i else None, resume=i > 0)
        assert load_checkpoint(tmp_path / "cut").step == 3 * ((step - 1) // 3)
    result = go(tmp_path / "cut", config, another_process(), resume=True)
    assert (result.step, result.tokens) == (8, 8 * 2 * T * config.grad_accumulation)
    assert_same(content(tmp_path / "cut"), content(tmp_path / "whole"))


def test_a_run_from_before_a_field_existed_goes_on(tmp_path):
    with cut_after(5):
        go(tmp_path)
    path = training.find_checkpoint(tmp_path) / "checkpoint.json"
    info = json.loads(path.read_text(encoding="utf-8"))
    for name in ("windows", "count_first", "hold_steps"):
        del info["train_config"][name]
    path.write_text(json.dumps(info), encoding="utf-8")
    assert go(tmp_path, model=another_process(), resume=True).step == 8


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_run_stopped_by_ctrl_c_goes_on_bit_for_bit(tmp_path, step):
    go(tmp_path / "whole")
    with ctrl_c_after(step):
        result = go(tmp_path / "cut")
    assert result.interrupted and load_checkpoint(tmp_path / "cut").step == step
    assert go(tmp_path / "cut", model=another_process(), resume=True).interrupted is False
    assert_same(content(tmp_path / "cut"), content(tmp_path / "whole"))


def test_the_model_that_is_trained_is_the_one_that_was_passed(tmp_path):
    config = replace(CONFIG, steps=4)
    go(tmp_path, config)
    model = another_process()
    go(tmp_path, config, model, resume=True)
    for name, weight in load_file(tmp_path / "checkpoints" / "step-00000004" / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), weight), name


def test_ckpt_2_every_stream_of_random_numbers_goes_on(tmp_path):
    def drawing(model, draws):
        model.register_forward_hook(lambda *_: draws.append((random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item())))
        return model

    random.seed(5), np.random.seed(5)
    whole, cut = [], []
    go(tmp_path / "whole", model=drawing(build(), whole))
    random.seed(5), np.random.seed(5)
    with cut_after(6):
        go(tmp_path / "cut", model=drawing(build(), cut))
    cut = cut[: 3 * 2 + 1]  # forward passes of three updates and one evaluation; what came after the checkpoint is forgotten
    go(tmp_path / "cut", model=drawing(another_process(), cut), resume=True)
    assert len(whole) == len(cut) and cut == whole


def test_ckpt_2_a_random_state_that_cannot_be_restored_is_told(tmp_path):
    go(tmp_path, replace(CONFIG, steps=2))
    folder = training.find_checkpoint(tmp_path)
    info = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    info["state"]["random"]["numpy"][1] = info["state"]["random"]["numpy"][1][:-1]
    (folder / "checkpoint.json").write_text(json.dumps(info), encoding="utf-8")
    with pytest.raises((ValueError, LookupError)):
        go(tmp_path, replace(CONFIG, steps=2), resume=True)


def test_counts_and_the_best_score_go_on(tmp_path):
    with cut_after(8):
        go(tmp_path)
    saved = json.loads((training.find_checkpoint(tmp_path) / "checkpoint.json").read_text(encoding="utf-8"))["state"]["progress"]
    scores = [line["val_loss"] for line in read_log(tmp_path) if "val_loss" in line]
    assert saved["best_val_loss"] == min(scores) and saved["tokens"] == 6 * 2 * 2 * T and saved["seconds"] > 0
    result = go(tmp_path, model=another_process(), resume=True)
    assert result.seconds > saved["seconds"] and result.tokens == 8 * 2 * 2 * T


def test_the_scale_of_float16_goes_on(tmp_path, monkeypatch):
    config, real = replace(CONFIG, precision="fp16"), Run._loss
    with monkeypatch.context() as patch:  # the second update overflows: skipped, and the scale is halved
        patch.setattr(Run, "_loss", lambda run, *args: real(run, *args) * (torch.inf if run.progress["step"] == 1 else 1))
        with cut_after(5):
            go(tmp_path, config)
    state = json.loads((training.find_checkpoint(tmp_path) / "checkpoint.json").read_text(encoding="utf-8"))["state"]
    assert state["scaler"]["scale"] == 32768 and state["progress"]["skipped"] == 1
    seen, update = [], Run.update
    monkeypatch.setattr(Run, "update", lambda run, ids: seen.append(run.scaler.get_scale()) or update(run, ids))
    go(tmp_path, config, another_process(), resume=True)
    assert seen == [32768] * 5


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path):
    go(tmp_path)
    before = content(tmp_path)
    result = go(tmp_path, model=another_process(), resume=True)
    assert result.step == 8 and result.evaluation.n_tokens == 29
    assert_same(content(tmp_path), before)


def test_what_was_logged_after_the_checkpoint_is_forgotten_also_half_a_line(tmp_path):
    go(tmp_path / "whole")
    with cut_after(6):
        go(tmp_path / "cut")
    log = tmp_path / "cut" / "log.jsonl"
    assert [line["step"] for line in read_log(log)] == [1, 2, 2, 3, 4, 4, 5]
    with open(log, "a", encoding="utf-8") as file:
        file.write('{"step": 6, "loss": 2.3')
    go(tmp_path / "cut", model=another_process(), resume=True)
    assert_same(content(tmp_path / "cut"), content(tmp_path / "whole"))


# --- what may change, what may not --------------------------------------------------------------------------------------------------------

OTHER = dict(batch_size=3, context_length=7, lr=0.02, min_lr=0.001, warmup_steps=1, grad_accumulation=1, weight_decay=0.2, betas=(0.9, 0.99),
             clip_norm=2.0, optimizer="muon", muon_lr=0.03, precision="bf16", seed=1, windows="epochs", count_first=True)
FREE = dict(steps=9, hold_steps=3, compile=False, eval_every=3, eval_tokens=None, checkpoint_every=2, keep_checkpoints=5)


def test_these_are_all_fields():
    assert OTHER.keys() | FREE.keys() == asdict(CONFIG).keys() and not OTHER.keys() & FREE.keys()
    assert set(training.MAY_CHANGE) == FREE.keys()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    "A run that was cut off after five updates; its checkpoint is that of step 3. To be copied, never changed."
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch, cut_after(5):
        patch.setattr(training, "plot_log", lambda path: None)
        go(out, tokenizer=train_tokenizer(["red kite, blue boat. "] * 3, 262))
    return out


@pytest.fixture
def copy(half, tmp_path):
    shutil.copytree(half, tmp_path / "copy")
    return tmp_path / "copy"


def folder_of(out):
    return out / "checkpoints" / "step-00000003"


@pytest.mark.parametrize("name, value", OTHER.items(), ids=OTHER.keys())
def test_another_training_configuration_is_refused_by_the_name_of_its_field(copy, name, value):
    with pytest.raises(CheckpointError, match=rf"step-00000003 was made with {name}=.*, this run has {name}="):
        go(copy, replace(CONFIG, **{name: value}), resume=True)
    assert [line["step"] for line in read_log(copy)] == [1, 2, 2, 3, 4, 4], "nothing was touched"


@pytest.mark.parametrize("fields", [dict(n_layers=2), dict(dropout=0.1), dict(position="none"), dict(tie_embeddings=False), dict(vocab_size=V + 1)], ids=str)
def test_another_model_is_refused_by_the_name_of_its_field(copy, fields):
    name, = fields
    with pytest.raises(CheckpointError, match=rf"was made with {name}=.*, this run has {name}="):
        go(copy, model=build(**fields), resume=True)


@pytest.mark.parametrize("name, value", FREE.items(), ids=FREE.keys())
def test_how_long_and_how_often_may_change(copy, name, value):
    assert go(copy, replace(CONFIG, **{name: value}), another_process(), resume=True).step == (9 if name == "steps" else 8)


def test_the_latest_plan_is_written_down_and_one_that_lies_in_the_past_is_refused(copy):
    def planned():
        return json.loads((copy / "config.json").read_text(encoding="utf-8"))["train"]["steps"]

    assert planned() == CONFIG.steps
    go(copy, replace(CONFIG, steps=11), another_process(), resume=True)
    assert planned() == load_checkpoint(copy).train_config.steps == 11
    with pytest.raises(ValueError, match="steps=10, but the run has made 11 updates already"):
        go(copy, replace(CONFIG, steps=10), another_process(), resume=True)
    assert planned() == 11


def test_a_log_whose_last_line_was_cut_can_be_read_and_drawn(copy):
    whole = read_log(copy)
    with open(copy / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "lo')
    assert read_log(copy) == whole
    training.plot_log(copy)


def test_a_folder_may_have_dollars_in_its_name(tmp_path):
    go(tmp_path / "run$_$x", replace(CONFIG, steps=1))
    training.plot_log(tmp_path / "run$_$x")


def test_a_job_in_the_background_does_not_hear_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with training.first_interrupt_waits() as asked:
            signal.raise_signal(signal.SIGINT)
        assert asked == [] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_weights_alone_can_be_loaded_not_resumed(tmp_path):
    save_checkpoint(tmp_path / "w", build(), step=4, train_config=CONFIG)
    assert load_checkpoint(tmp_path / "w").step == 4
    with pytest.raises(CheckpointError, match="w holds weights only"):
        go(tmp_path / "w", resume=True)


@pytest.mark.parametrize("there", [True, False])
def test_without_a_run_there_is_nothing_to_resume(tmp_path, there):
    if there:
        (tmp_path / "run").mkdir()
    for call in (load_checkpoint, lambda path: go(path, resume=True)):
        with pytest.raises(CheckpointError, match=r"run is no checkpoint and no run: " + ("it holds no checkpoint.json" if there else "there is no such folder")):
            call(tmp_path / "run")
    assert not there or not list((tmp_path / "run").iterdir())


def test_a_run_can_go_on_from_one_of_its_checkpoints_moved_elsewhere(copy, tmp_path):
    "Run.load takes a checkpoint folder as well."
    shutil.copytree(folder_of(copy), tmp_path / "moved")
    run = Run(another_process(), CONFIG)
    run.load(tmp_path / "moved")
    assert run.progress["step"] == 3


# --- the end of a process at any file operation -------------------------------------------------------------------------------------------


class Operations:
    "Counts what is done to files; at number `last` the process ends in the middle of it, and nothing after it happens."

    def __init__(self, patch, last):
        self.last, self.count, self.dead = last, 0, False
        for owner, name, half in ((training, "save_file", self.half_a_file), (Path, "write_text", self.half_a_text), (os, "replace", self.maybe),
                                  (shutil, "rmtree", self.half_a_folder), (RunFolder, "log", self.half_a_line)):
            patch.setattr(owner, name, self.watched(getattr(owner, name), half))

    def watched(self, real, half):
        def call(*args, **kwargs):
            if self.dead:
                raise PowerCut
            self.count += 1
            if self.count == self.last:
                half(real, *args, **kwargs)
                self.dead = True
                raise PowerCut
            return real(*args, **kwargs)

        return call

    def half_a_file(self, real, tensors, path):
        real(tensors, path)
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)

    def half_a_text(self, real, path, text, **kwargs):
        real(path, text[: len(text) // 2], **kwargs)

    def maybe(self, real, old, new):
        if self.last % 2:
            real(old, new)

    def half_a_folder(self, real, folder, **kwargs):
        for file in sorted(Path(folder).glob("*"))[:1]:
            file.unlink()

    def half_a_line(self, real, folder, **line):
        with open(folder.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line)[:9])


def live(out, config, last):
    "One process: starts the run or goes on with it; True if it came to the end, False if it died at operation number `last`."
    begun = RunFolder(out).latest.exists()
    with pytest.MonkeyPatch.context() as patch:
        number = next(PROCESS_NUMBERS)
        patch.setattr(os, "getpid", lambda: number)
        Operations(patch, last)
        try:
            go(out, config, another_process() if begun else None, resume=begun)
        except PowerCut:
            return False
    return True


PROCESS_NUMBERS = itertools.count(100_000)


@pytest.mark.parametrize("keep", [1, 2])
def test_ckpt_3_a_process_may_end_at_any_file_operation(tmp_path, keep):
    config = replace(CONFIG, steps=4, checkpoint_every=2, eval_every=0, grad_accumulation=1, keep_checkpoints=keep)
    go(tmp_path / "whole", config)
    expected, deaths = content(tmp_path / "whole"), 0
    for first in itertools.count(1):
        out = tmp_path / str(first)
        if live(out, config, first):
            break
        deaths += 1
        for last in (1 + 5 * first % 17, 0):  # the second process dies as well, the third lives
            if RunFolder(out).latest.exists():
                load_checkpoint(out), "what stands under `latest` is whole at every moment"
            if live(out, config, last):
                break
        assert_same(content(out), expected)
        shutil.rmtree(out)
    assert deaths > 30


def test_ckpt_3_a_process_may_have_the_number_of_one_that_died(tmp_path):
    save_checkpoint(tmp_path / "c", build(), step=1)
    shutil.copytree(tmp_path / "c", tmp_path / f".tmp-old-c-{os.getpid()}")
    shutil.copytree(tmp_path / "c", tmp_path / f".tmp-c-{os.getpid()}")
    save_checkpoint(tmp_path / "c", build(), step=2)
    assert load_checkpoint(tmp_path / "c").step == 2 and [path.name for path in tmp_path.iterdir()] == ["c"]


def test_ckpt_3_an_interrupted_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    old, new = build(1), build(2)
    save_checkpoint(tmp_path / "c", old, step=1)

    def save_half(tensors, path):
        Path(path).write_bytes(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_file", save_half)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path / "c", new, step=2)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path / "d", new, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.step == 1 and torch.equal(loaded.model.embedding.weight, old.embedding.weight)
    save_checkpoint(tmp_path / "c", new, step=2)
    assert load_checkpoint(tmp_path / "c").step == 2 and [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training, "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*No space left"):
        save_checkpoint(tmp_path / "c", build())
    assert list(tmp_path.iterdir()) == []


def test_ckpt_3_when_the_new_folder_cannot_take_its_place_the_old_one_comes_back(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", build(), step=1)
    real, calls = os.replace, []

    def locked(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise PermissionError("another program has a file open")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", locked)
        with pytest.raises(PermissionError):
            save_checkpoint(tmp_path / "c", build(), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"] and load_checkpoint(tmp_path / "c").step == 1


def test_ckpt_3_what_a_kill_left_is_never_picked_up_and_goes_with_the_next_save(copy):
    checkpoints = copy / "checkpoints"
    shutil.copytree(folder_of(copy), checkpoints / ".tmp-step-00000009-4711")
    shutil.copytree(folder_of(copy), checkpoints / ".tmp-old-step-00000002")
    (checkpoints / ".tmp-latest").write_text("step-000", encoding="utf-8")
    assert load_checkpoint(copy).step == 3
    go(copy, model=another_process(), resume=True)
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-00000006", "step-00000008"}


def test_ckpt_3_a_checkpoint_that_latest_does_not_name_is_not_taken(copy):
    shutil.copytree(folder_of(copy), copy / "checkpoints" / "step-00000006")
    (copy / "checkpoints" / "step-00000006" / "model.safetensors").unlink()
    assert load_checkpoint(copy).step == 3
    assert go(copy, model=another_process(), resume=True).step == 8
    assert load_checkpoint(copy / "checkpoints" / "step-00000006").step == 6


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_that_latest_names_is_never_swept_away(copy, keep):
    "A killed process may leave newer folders than the one that `latest` names; Ctrl-C then saves between them."
    for step in (6, 7):
        shutil.copytree(folder_of(copy), copy / "checkpoints" / f"step-{step:08d}")
    with ctrl_c_after(4):
        go(copy, replace(CONFIG, keep_checkpoints=keep), another_process(), resume=True)
    assert load_checkpoint(copy).step == 4


def test_a_lost_run_that_raises_leaves_its_last_checkpoint(tmp_path, monkeypatch):
    real = Run._loss
    monkeypatch.setattr(Run, "_loss", lambda run, *args: real(run, *args) * (torch.nan if run.progress["step"] >= 4 else 1))
    with pytest.raises(FloatingPointError):
        go(tmp_path, replace(CONFIG, steps=40))
    assert load_checkpoint(tmp_path).step == 9 and [line["step"] for line in read_log(tmp_path) if "loss" in line] == list(range(1, 12))
    assert read_log(tmp_path)[-1]["loss"] is None
    for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# --- real processes -----------------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
import random
import numpy as np
import torch
torch.set_num_threads(1), torch.manual_seed(0), random.seed(0), np.random.seed(0)
from tinylm import training
from tinylm.training import TrainConfig, train
from tinylm.transformer import ModelConfig, TransformerLM
out, config, model = Path(sys.argv[1]), TrainConfig(**json.loads(sys.argv[2])), ModelConfig(**json.loads(sys.argv[3]))
training.plot_log = lambda path: None
model = TransformerLM(model)
ids = torch.randint(model.config.vocab_size, (90,), generator=torch.Generator().manual_seed(1))
result = train(model, ids, ids[:30], config, out_dir=out, resume=(out / "checkpoints" / "latest").exists(), n_bytes=50, progress=False)
print(json.dumps([result.step, result.interrupted]))
"""


def start(out, config):
    environment = {**os.environ, "PYTHONPATH": str(Path(tinylm.__file__).parents[1]), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", SCRIPT, str(out), json.dumps(asdict(config)), json.dumps(build().config.to_dict())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_lines(process, log, n):
    "Until the log holds n lines; False if the process ended before."
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") >= n:
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    process.kill()
    raise AssertionError(f"no sign of life: {process.communicate()[1][-2000:]}")


def test_a_run_killed_twenty_times_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    config = replace(CONFIG, steps=200, checkpoint_every=1, eval_every=5, keep_checkpoints=1, optimizer="muon")
    random.seed(0), np.random.seed(0)
    go(tmp_path / "whole", config, build(seed=0))
    out, moments, kills, in_a_save, lines = tmp_path / "killed", random.Random(7), 0, 0, 0
    while True:
        process = start(out, config)
        if kills < 20 and wait_for_lines(process, out / "log.jsonl", lines + moments.randint(1, 6)):
            time.sleep(moments.uniform(0, 0.03))
            process.kill()
        output, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert not errors, errors
        kills += 1
        in_a_save += any((out / "checkpoints").glob(".tmp-*"))
        lines = load_checkpoint(out).step * 6 // 5  # that the next process keeps, evaluations included
    assert json.loads(output) == [200, False] and kills == 20
    assert in_a_save >= 3, f"only {in_a_save} of {kills} kills fell into a save"
    assert_same(content(out), content(tmp_path / "whole"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a single process")
def test_a_process_stopped_by_ctrl_c_ends_cleanly_and_can_go_on(tmp_path):
    config = replace(CONFIG, steps=5000, checkpoint_every=0, eval_every=0)
    process = start(tmp_path, config)
    assert wait_for_lines(process, tmp_path / "log.jsonl", 3), process.communicate()[1]
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    step, interrupted = json.loads(output)
    assert process.returncode == 0 and not errors and interrupted and 3 <= step < 5000
    assert load_checkpoint(tmp_path).step == step == read_log(tmp_path)[-1]["step"]
    resumed = go(tmp_path, replace(config, steps=step + 2), another_process(), resume=True)
    assert resumed.step == step + 2


# --- a checkpoint is whole or refused -----------------------------------------------------------------------------------------------------

FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "tokenizer.json")


def test_what_lies_in_a_checkpoint(half):
    folder = folder_of(half)
    assert {path.name for path in folder.iterdir()} == {*FILES, "checkpoint.json"}
    info = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    assert info["files"].keys() == set(FILES) and info["format"] == 1 and info["kind"] == "tinylm checkpoint" and info["step"] == 3
    assert ModelConfig(**info["model_config"]) == build().config and TrainConfig(**info["train_config"]) == CONFIG


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_seen(copy, name, where, bit):
    file = folder_of(copy) / name
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[int(where * len(whole))] ^= 1 << bit
    file.write_bytes(damaged)
    try:
        with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
            load_checkpoint(copy)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 1, -1])
def test_a_truncated_file_is_seen_by_name(copy, name, left):
    file = folder_of(copy) / name
    file.write_bytes(file.read_bytes()[:left])
    for call in (load_checkpoint, lambda path: go(path, resume=True)):
        with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
            call(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_seen_by_name(copy, name):
    (folder_of(copy) / name).unlink()
    for call in (load_checkpoint, lambda path: go(path, resume=True)):
        with pytest.raises(CheckpointError, match=f"step-00000003 is incomplete: {name} is missing"):
            call(copy)


@pytest.mark.parametrize("text, match", [
    ("", "checkpoint.json cannot be read"),
    ('{"kind": "tinylm chec', "checkpoint.json cannot be read"),
    ("\udcff", "checkpoint.json cannot be read"),
    ("[1, 2]", "checkpoint.json was not written by tinylm"),
    ('{"model": {"n_layers": 2}}', "checkpoint.json was not written by tinylm"),
    ('{"kind": "tinylm tokens", "format": 1}', "checkpoint.json was not written by tinylm"),
    ('{"kind": "tinylm checkpoint", "format": 2}', "has format 2; this tinylm reads format 1"),
    ('{"kind": "tinylm checkpoint"}', "has format None"),
    ('{"kind": "tinylm checkpoint", "format": 1}', "checkpoint.json .*files"),
])
def test_a_foreign_or_newer_description_is_refused(copy, text, match):
    (folder_of(copy) / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for path in (copy, folder_of(copy)):
        with pytest.raises(CheckpointError, match=match):
            load_checkpoint(path)


def described(folder, change):
    "Change what checkpoint.json says."
    info = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    change(info)
    (folder / "checkpoint.json").write_text(json.dumps(info), encoding="utf-8")


@pytest.mark.parametrize("change, match", [
    (lambda info: info["model_config"].update(n_heads=5), "checkpoint.json: n_heads=5 must divide d_model=12"),
    (lambda info: info["model_config"].update(colour="red"), "checkpoint.json: .*colour"),
    (lambda info: info["train_config"].update(lr=-1), "checkpoint.json: lr=-1"),
    (lambda info: info["model_config"].update(d_model=16), r"model.safetensors: embedding.weight has shape \(11, 12\), the model \(11, 16\)"),
    (lambda info: info["model_config"].update(n_layers=2), r"model.safetensors does not fit its configuration: blocks.1.\S+ is missing"),
    (lambda info: info["model_config"].update(position="learned"), "model.safetensors does not fit its configuration: position_embedding.weight is missing"),
    (lambda info: info["model_config"].update(norm="layernorm", bias=True), "does not fit its configuration: .*bias is missing"),
], ids=["value", "field", "training", "shape", "missing", "table", "bias"])
def test_a_description_that_does_not_fit_is_refused_by_file_and_name(copy, change, match):
    described(folder_of(copy), change)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(copy)


def refresh(folder, name):
    "Make the checksum right again."
    described(folder, lambda info: info["files"].update({name: training.checksum(folder / name)}))


def test_a_file_that_is_no_safetensors_is_refused_by_name(copy):
    file = folder_of(copy) / "model.safetensors"
    file.write_bytes(b"no tensors here")
    refresh(file.parent, file.name)
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        load_checkpoint(copy)


@pytest.mark.parametrize("change, match", [
    (lambda w: w.pop("norm.weight"), "norm.weight is missing"),
    (lambda w: w.update(extra=torch.zeros(2)), "extra is unknown"),
    (lambda w: w.update({"norm.weight": torch.zeros(13)}), r"norm.weight has shape \(13,\), the model \(12,\)"),
    (lambda w: w.update({"module.norm.weight": w.pop("norm.weight")}), "module.norm.weight is unknown"),
], ids=["missing", "unknown", "shape", "prefix"])
def test_weights_of_another_model_are_never_loaded_in_part(copy, change, match):
    file = folder_of(copy) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    refresh(file.parent, file.name)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{match}"):
        load_checkpoint(copy)


@pytest.mark.parametrize("change, match", [
    (lambda s: [s.pop(key) for key in list(s) if key.startswith("norm.")], "optimizer.safetensors: .*other parameters"),
    (lambda s: s.update({"norm.weight/exp_avg": torch.zeros(13)}), r"optimizer.safetensors: norm.weight/exp_avg has shape \(13,\)"),
], ids=["missing", "shape"])
def test_the_state_of_another_optimiser_is_refused_by_file(copy, change, match):
    file = folder_of(copy) / "optimizer.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    refresh(file.parent, file.name)
    with pytest.raises(CheckpointError, match=match):
        go(copy, resume=True)


@pytest.mark.parametrize("text", ["step-00000099", "../elsewhere"])
def test_a_latest_that_leads_nowhere_is_refused(copy, text):
    (copy / "checkpoints" / "latest").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="checkpoint.json cannot be read"):
        load_checkpoint(copy)


def test_a_checkpoint_error_is_a_value_error():
    assert issubclass(CheckpointError, ValueError)


# --- what is saved comes back -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "default": dict(),
    "gpt-2-like": dict(position="learned", norm="layernorm", ffn="gelu", bias=True),
    "untied": dict(tie_embeddings=False, n_kv_heads=1),
    "sinusoidal": dict(position="sinusoidal"),
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES.keys())
def test_a_loaded_model_gives_the_same_logits_bit_for_bit(tmp_path, fields):
    model = build(**fields).eval()
    save_checkpoint(tmp_path / "c", model)
    loaded = load_checkpoint(str(tmp_path / "c"))
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS[None, :T]), model(IDS[None, :T]))
    assert loaded.model_config == model.config and (loaded.train_config, loaded.tokenizer, loaded.step) == (None, None, 0)
    assert not loaded.model.training and all(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["saved as", "model in"])
def test_weights_load_in_float32_whatever_they_were_saved_in(tmp_path, dtype, how):
    model = build(tie_embeddings=False)
    if how == "saved as":
        save_checkpoint(tmp_path / "c", model, dtype=dtype)
    else:
        save_checkpoint(tmp_path / "c", build(tie_embeddings=False).to(dtype))
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    for name, weight in load_checkpoint(tmp_path / "c").model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.get_parameter(name).to(dtype).float()), name
    assert all(weight.dtype == (torch.float32 if how == "saved as" else weight.dtype) for weight in model.parameters())


def test_x_3_a_tied_head_is_not_stored_and_an_untied_one_is(tmp_path):
    for tied in (True, False):
        model = build(tie_embeddings=tied)
        save_checkpoint(tmp_path / str(tied), model)
        stored = load_file(tmp_path / str(tied) / "model.safetensors")
        assert ("head.weight" in stored) is not tied and stored.keys() == dict(model.named_parameters()).keys()
        loaded = load_checkpoint(tmp_path / str(tied)).model
        assert (loaded.head.weight is loaded.embedding.weight) is tied
        assert torch.equal(loaded.head.weight, model.head.weight)


def test_x_3_what_is_tied_is_decided_by_the_tensors_not_by_the_configuration(tmp_path):
    model = build(tie_embeddings=True)
    model.head.weight = torch.nn.Parameter(model.head.weight + 1)
    save_checkpoint(tmp_path / "c", model)
    assert "head.weight" in load_file(tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointError, match="head.weight is unknown"):
        load_checkpoint(tmp_path / "c")


class Parallel(torch.nn.Module):
    "Wraps a model as DistributedDataParallel does."

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "compiled": torch.compile,
    "parallel": Parallel,
    "compiled-parallel": lambda model: torch.compile(Parallel(model)),
    "parallel-compiled": lambda model: Parallel(torch.compile(model)),
    "twice": lambda model: Parallel(torch.compile(Parallel(model))),
    "data-parallel": torch.nn.DataParallel,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_ckpt_1_a_wrapped_model_is_saved_under_its_own_names(tmp_path, wrap):
    model = build()
    save_checkpoint(tmp_path / "c", wrap(model))
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.model_config == model.config
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weight), name


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_ckpt_1_the_weights_of_a_wrapped_model(wrap):
    model = build()
    found = weights_of(wrap(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], weight) and not found[name].requires_grad for name, weight in model.named_parameters())


def test_a_matrix_that_is_not_contiguous_is_saved_as_it_reads(tmp_path):
    model = build()
    square = model.blocks[0].attention.out_proj
    square.weight = torch.nn.Parameter(square.weight.detach().T)
    save_checkpoint(tmp_path / "c", model)
    assert torch.equal(load_checkpoint(tmp_path / "c").model.blocks[0].attention.out_proj.weight, square.weight)


def test_the_tokenizer_goes_with_the_weights(half):
    tokenizer = load_checkpoint(half).tokenizer
    assert tokenizer.vocab_size == 262 and tokenizer.decode(tokenizer.encode("a blue kite €")) == "a blue kite €"
    assert load_checkpoint(folder_of(half)).tokenizer.encode("red kite") == tokenizer.encode("red kite")


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a checkpoint must not be executable")

    for owner, name in ((torch, "save"), (torch, "load"), (pickle, "dump"), (pickle, "dumps"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(owner, name, refused)
    go(tmp_path, replace(CONFIG, steps=3))
    go(tmp_path, replace(CONFIG, steps=4), another_process(), resume=True)
    load_checkpoint(tmp_path)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        if file.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", file.read_bytes()[:8])
            json.loads(file.read_bytes()[8 : 8 + length])
        elif file.suffix in (".json", ".jsonl"):
            assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.suffix == ".jsonl" else json.loads(file.read_text(encoding="utf-8"))
        else:
            assert file.name == "latest" and file.read_text(encoding="utf-8") == "step-00000004"


def test_ckpt_2_a_checkpoint_holds_plain_types_only(tmp_path):
    "No numpy number, no path, no dataclass: JSON would refuse them, or a reader could not read them."
    run = Run(build(), replace(CONFIG, optimizer="muon"))
    run.update(IDS)
    tensors, plain = training.random_state(torch.device("cpu"))
    assert json.loads(json.dumps(plain))["numpy"] == plain["numpy"]
    assert all(type(tensor) is torch.Tensor for tensor in [*tensors.values(), *run.optimizer.state().values()])
    assert all(type(value) in (int, float, type(None)) for value in run.progress.values())


def test_a_model_with_another_context_is_another_model(tmp_path):
    "Both configurations have a context_length; rotary weights have the same shapes in either."
    settings = training.TrainConfig(steps=4, batch_size=2, context_length=8, lr=1e-3)
    wide, narrow = (TransformerLM(ModelConfig.preset("tiny", n_layers=1, context_length=n)) for n in (16, 8))
    training.Run(wide, settings).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="was made with context_length=16, this run has context_length=8"):
        training.Run(narrow, settings).load(tmp_path / "saved")


def test_a_checkpoint_takes_no_other_folders_place(tmp_path):
    model = TransformerLM(ModelConfig.preset("tiny", n_layers=1))
    (tmp_path / "papers").mkdir()
    training.save_checkpoint(tmp_path / "papers", model)  # an empty folder may become one
    training.save_checkpoint(tmp_path / "papers", model)  # and a checkpoint may be replaced
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("dear reader", encoding="utf-8")
    for path in (tmp_path / "thesis", tmp_path / "thesis" / "thesis.txt"):
        with pytest.raises(ValueError, match="exists and is no checkpoint"):
            training.save_checkpoint(path, model)
    assert (tmp_path / "thesis" / "thesis.txt").read_text(encoding="utf-8") == "dear reader"


def test_a_latest_without_a_name_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="latest is empty"):
        training.load_checkpoint(tmp_path)
