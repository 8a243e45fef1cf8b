"""Several processes are one run: same gradients, same updates, one writer, and nobody waits for the dead.

Every test here starts real processes that meet over gloo. They are forked where that is possible, because importing torch takes seconds."""
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DDP imports it: once here instead of in every process
import torch.distributed as dist
import torch.distributed.fsdp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tinylm import distributed, training
from tinylm.corpus import KnownEntropyLanguage
from tinylm.distributed import LostProcess, Processes, join, local_bytes, own_device, shard
from tinylm.training import (IGNORE, ONE, Run, TrainConfig, accumulate_gradients, evaluate, find_checkpoint, load_checkpoint, next_token_loss, read_log,
                             sample_batch, train)
from tinylm.transformer import ModelConfig, TransformerLM

V, T, LIMIT = 11, 8, 100
IDS = torch.randint(V, (90,), generator=torch.Generator().manual_seed(1))
CONFIG = TrainConfig(steps=6, batch_size=5, context_length=T, lr=1e-2, warmup_steps=2, grad_accumulation=2, eval_every=2, checkpoint_every=2, optimizer="muon")
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


# --- starting processes -------------------------------------------------------------------------------------------------------------------


def member(rank, world, task, arguments, pipe):
    "What runs in each process: the environment is what torchrun would have set."
    torch.set_num_threads(1)
    port = str(pipe.recv())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    training.plot_log = lambda path: None  # drawing takes longer than these runs
    try:
        answer = task(*arguments)
    except Exception as error:
        answer = error
    pipe.send_bytes(pickle.dumps(answer))  # plain bytes: tensors would be shared, with a process that ends


def team(world, task, *arguments, limit=LIMIT):
    "task(*arguments) in `world` processes at once; what each returned (an exception it ended with, None if it died), and the seconds it took."
    started, pipes = time.monotonic(), [CONTEXT.Pipe() for _ in range(world)]
    processes = [CONTEXT.Process(target=member, args=(rank, world, task, arguments, theirs)) for rank, (_, theirs) in enumerate(pipes)]
    try:
        for process in processes:
            process.start()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it has a thread, and threads are not forked
        for ours, theirs in pipes:
            theirs.close()
            ours.send(store.port)
        answers = []
        for ours, _ in pipes:
            left = limit - (time.monotonic() - started)
            assert ours.poll(max(0, left)), f"no answer within {limit} s"
            try:
                answers.append(pickle.loads(ours.recv_bytes()))
            except (EOFError, ConnectionError):
                answers.append(None)
        return answers, time.monotonic() - started
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def all_well(world, task, *arguments):
    answers, _ = team(world, task, *arguments)
    for answer in answers:
        if isinstance(answer, Exception):
            raise AssertionError(f"{type(answer).__name__}: {answer}")
    return answers


# --- one update ---------------------------------------------------------------------------------------------------------------------------


def build(seed=0, **fields):
    torch.manual_seed(seed)
    return TransformerLM(ModelConfig(**{**dict(vocab_size=V, context_length=T, d_model=12, n_layers=1, n_heads=2, d_ff=10), **fields}))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def micro_batches(kind):
    ids = torch.randint(V, (12, T + 1), generator=torch.Generator().manual_seed(2))
    x, y = ids[:, :-1], ids[:, 1:].clone()
    if kind == "ignored":
        y[torch.rand(12, T, generator=torch.Generator().manual_seed(3)) < 0.4] = IGNORE
        y[0], y[7] = IGNORE, IGNORE
    sizes = {"one": [12], "equal": [6, 6], "unequal": [3, 5, 4], "ignored": [7, 5]}[kind]
    return list(zip(x.split(sizes), y.split(sizes)))


KINDS = ["one", "equal", "unequal", "ignored"]


def gradients(kinds):
    "By kind of micro-batches: the loss, all gradients, and the lengths of what travelled when the same was done again."
    with join(timeout=30) as processes:
        found = {}
        for kind in kinds:
            model = build(seed=processes.rank).double()
            loss_of = processes.parallel(lambda x, y, n: next_token_loss(model(x), y, denominator=n), model)
            (loss,) = processes.sum(accumulate_gradients(loss_of, micro_batches(kind), processes=processes).item())
            gradient = flat(p.grad for p in model.parameters()).clone()
            loss_of.register_comm_hook(lengths := [], note_length)
            accumulate_gradients(loss_of, micro_batches(kind), processes=processes)
            found[kind] = loss, gradient, lengths
        return found


def note_length(lengths, bucket):
    lengths.append(bucket.buffer().numel())
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def by_torch(kind):
    "The same in one process by torch alone: the mean over all real targets."
    model = build().double()
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(kind)))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), flat(p.grad for p in model.parameters())


@pytest.fixture(scope="module", params=[2, 3])
def shared(request):
    return all_well(request.param, gradients, KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_1_gradients_and_loss_are_those_of_one_process(shared, kind):
    loss, gradient = by_torch(kind)
    for answer in shared:
        assert answer[kind][0] == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(answer[kind][1], gradient, atol=1e-12, rtol=0)


def test_all_processes_hold_the_same_bits(shared):
    for answer in shared[1:]:
        assert all(torch.equal(answer[kind][1], shared[0][kind][1]) for kind in KINDS)


def test_gradients_travel_once_with_the_last_micro_batch(shared):
    size = build().num_parameters()
    assert [answer[kind][2] for answer in shared for kind in KINDS] == [[size]] * len(KINDS) * len(shared)


# --- a run --------------------------------------------------------------------------------------------------------------------------------


def press(step):
    "Ctrl-C in this process during that update."
    real = Run.update

    def update(run, ids):
        if run.progress["step"] == step - 1:
            signal.raise_signal(signal.SIGINT)
        return real(run, ids)

    Run.update = update


def spy(written):
    "Note every file that this process opens to write, makes or renames."
    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            written.add(str(arguments[0]))
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            written.add(str(arguments[0]))
        if event == "os.rename":
            written.add(str(arguments[1]))
    sys.addaudithook(note)


def go(out, config=CONFIG, resume=False, dropout=0.0, finger=None):
    "A run: its weights, its result, and what this process wrote into the folder."
    written = set()
    spy(written)
    with join(timeout=30) as processes:
        if finger is not None and processes.rank == finger[0]:
            press(finger[1])
        model = build(seed=processes.rank if processes.world_size > 1 else 0, dropout=dropout)
        result = train(model, IDS, IDS[:30], config, out_dir=out, resume=resume, progress=False, n_bytes=50, processes=processes)
    return flat(model.parameters()), result._replace(seconds=0.0), {path for path in written if str(out) in path}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr(training, "plot_log", lambda path: None)


def close(some, others, atol=1e-5):
    torch.testing.assert_close(some, others, atol=atol, rtol=0)


def same_log(path, other):
    for mine, theirs in zip(read_log(path), read_log(other), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The same run with one process, with two and with three; without dropout."
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "plot_log", lambda path: None)
        return folder, {1: [go(folder / "1")], **{world: all_well(world, go, folder / str(world)) for world in (2, 3)}}


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_is_that_of_one_process_up_to_rounding(runs, world):
    folder, answers = runs
    for weights, result, _ in answers[world]:
        assert torch.equal(weights, answers[world][0][0]) and result == answers[world][0][1]
        close(weights, answers[1][0][0])
        assert (result.step, result.tokens, result.evaluation.n_tokens) == (6, 6 * 2 * 5 * T, 29)
    same_log(folder / str(world), folder / "1")
    close(flat(load_checkpoint(folder / str(world)).model.parameters()), answers[world][0][0], atol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_one_process_writes(runs, world):
    folder, answers = runs
    (_, _, first), *others = answers[world]
    assert {"log.jsonl", "config.json", "checkpoint.json"} <= {Path(path).name for path in first}
    assert [written for _, _, written in others] == [set()] * (world - 1)
    files = {n: {path.relative_to(folder / str(n)) for path in (folder / str(n)).rglob("*")} for n in (1, world)}
    assert files[1] == files[world]


@pytest.mark.parametrize("fingered", [0, 1])
def test_ctrl_c_in_one_process_stops_all_after_the_same_update(tmp_path, fingered):
    answers = all_well(2, go, tmp_path, CONFIG, False, 0.1, (fingered, 3))
    assert [(result.step, result.interrupted, result.evaluation) for _, result, _ in answers] == [(3, True, None)] * 2
    assert load_checkpoint(tmp_path).step == 3


def test_a_resumed_run_of_as_many_processes_is_the_same_to_the_bit_with_dropout(tmp_path):
    through = all_well(2, go, tmp_path / "through", CONFIG, False, 0.2)
    all_well(2, go, tmp_path / "cut", CONFIG, False, 0.2, (0, 3))
    again = all_well(2, go, tmp_path / "cut", CONFIG, True, 0.2)
    assert torch.equal(again[0][0], through[0][0]) and again[0][1] == through[0][1]
    assert read_log(tmp_path / "cut") == read_log(tmp_path / "through")
    for name in ("model", "optimizer"):
        assert len({(find_checkpoint(tmp_path / run) / f"{name}.safetensors").read_bytes() for run in ("cut", "through")}) == 1


@pytest.mark.parametrize("before, after", [(2, 3), (3, 1), (1, 2)])
def test_the_number_of_processes_may_change_at_resume(runs, tmp_path, before, after):
    folder, answers = runs
    all_well(before, go, tmp_path, CONFIG, False, 0.0, (0, 3))
    assert load_checkpoint(tmp_path).step == 3
    weights, result, _ = all_well(after, go, tmp_path, CONFIG, True)[0]
    close(weights, answers[1][0][0])
    assert result.step == 6 and not result.interrupted
    same_log(tmp_path, folder / "1")


def noise():
    "What dropout draws first in two updates of a run, and in the second one again."
    with join(timeout=30) as processes:
        drawn = []
        for step in (0, 1, 1):
            processes.seed_dropout(7, step)
            drawn.append(tuple(torch.rand(4).tolist()))
        return drawn


def test_every_process_and_update_has_its_own_dropout_that_can_be_found_again():
    drawn = [noises for answer in all_well(2, noise) for noises in answer]
    assert drawn[1] == drawn[2] and drawn[4] == drawn[5] and len(set(drawn)) == 4


def test_one_process_keeps_its_stream_of_dropout():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ONE.seed_dropout(7, 1)
    assert torch.equal(torch.get_rng_state(), before)


def rows_read():
    "The rows of the text that this process trains on in one update, by their first place."
    with join(timeout=30) as processes:
        run, seen = Run(build(vocab_size=100), replace(CONFIG, batch_size=6), processes), []
        run.loss_of = lambda x, y, n: seen.extend(x[:, 0].tolist()) or next(run.model.parameters()).sum() * 0
        run.processes.local = nullcontext
        run.update(torch.arange(100))
        return seen


def test_x_10_processes_read_different_rows_and_together_those_of_one():
    alone = rows_read()
    assert len(alone) == 12
    for world in (2, 3):
        shares = all_well(world, rows_read)
        assert sorted(row for share in shares for row in share) == sorted(alone)
        assert [len(share) for share in shares] == [12 // world] * world and len({tuple(share) for share in shares}) == world


class Table(torch.nn.Module):
    "Row i costs i nats: five items with known losses."
    config = ModelConfig(vocab_size=6, context_length=1, d_model=2, n_heads=1)
    device = torch.device("cpu")

    def forward(self, ids):
        cost = ids.double()
        rest = torch.log1p(-torch.exp(-cost.clamp(min=1e-3))) - torch.log(torch.tensor(5.0))
        logits = rest[..., None].repeat(1, 1, 6)
        logits[..., 0] = -cost
        return logits


def exam(n):
    with join(timeout=30) as processes:
        streams = [torch.tensor([i, 0]) for i in range(n)]
        return evaluate(Table(), streams, processes=processes, batch_size=2)


@pytest.mark.parametrize("n", [5, 2])
def test_ddp_2_every_target_is_scored_by_one_process_only(n):
    for result in all_well(3, exam, n):
        assert result.n_tokens == n and type(result.n_tokens) is int
        assert result.loss == pytest.approx(sum(range(n)) / n, abs=1e-3) and result.nats == pytest.approx(exam(n).nats, abs=1e-12)


def spoilt(rank):
    "An update in which one process has a loss that is no number, and one after it."
    with join(timeout=30) as processes:
        run = Run(build(), CONFIG, processes)
        before, honest = flat(run.model.parameters()), run.loss_of
        if processes.rank == rank:
            run.loss_of = lambda *batch: honest(*batch) * float("nan")
        bad = run.update(IDS)
        stayed = torch.equal(before, flat(run.model.parameters()))
        run.loss_of = honest
        good = run.update(IDS)
        return bad["loss"], stayed, run.progress["skipped"], good["loss"], flat(run.model.parameters())


def test_an_update_is_skipped_by_all_or_by_none():
    answers = all_well(2, spoilt, 1)
    for bad, stayed, skipped, good, weights in answers:
        assert bad is None and stayed and skipped == 1 and 0 < good < 4 and torch.equal(weights, answers[0][-1])


def compiled(out):
    import torch._dynamo
    real = torch.compile
    torch.compile = lambda f: real(f, backend="eager")
    return go(out, replace(CONFIG, compile=True))


def test_compile_and_processes_together(runs, tmp_path):
    for weights, *_ in all_well(2, compiled, tmp_path):
        close(weights, runs[1][1][0][0])


def precision(out, kind):
    return go(out, replace(CONFIG, precision=kind))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_precision_keeps_the_processes_together(runs, tmp_path, kind):
    answers = all_well(2, precision, tmp_path, kind)
    assert torch.equal(answers[0][0], answers[1][0])
    close(answers[0][0], runs[1][1][0][0], atol=0.05)


# --- refusals and losses ------------------------------------------------------------------------------------------------------------------


def too_small(out):
    with join(timeout=30) as processes:
        train(build(), IDS, None, replace(CONFIG, batch_size=2), out_dir=out, progress=False, processes=processes)


def test_a_batch_with_fewer_rows_than_processes_is_refused_by_all(tmp_path):
    answers, _ = team(3, too_small, tmp_path / "run")
    assert all(type(error) is ValueError and "batch_size=2 must be at least 3" in str(error) for error in answers) and not (tmp_path / "run").exists()


def vanish(out, rank):
    real = Run.update

    def update(run, ids):
        if run.progress["step"] == 3 and run.processes.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(run, ids)

    Run.update = update
    go(out)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize("world, rank", [(2, 0), (3, 1)])
def test_a_killed_process_ends_the_others_within_seconds_and_they_say_why(tmp_path, world, rank):
    answers, seconds = team(world, vanish, tmp_path, rank)
    assert seconds < 30
    for i, answer in enumerate(answers):
        assert answer is None if i == rank else type(answer) is LostProcess and "another process of this run has gone" in str(answer)
    assert load_checkpoint(tmp_path).step == 2


def asleep():
    with join(timeout=2) as processes:
        if processes.rank == 1:
            time.sleep(6)
        processes.sum(1)


def test_a_process_that_does_not_answer_is_given_up():
    answers, seconds = team(2, asleep)
    assert type(answers[0]) is LostProcess and "not answered for 2 s" in str(answers[0]) and seconds < 30


def too_few(rank):
    "One process of two; the other is never started."
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the first process opens the place to meet
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), MASTER_PORT=str(free_port()))
    with join(timeout=2):
        pass


def one_stays_away():
    if os.environ["RANK"] == "0":
        with join(timeout=2):
            pass


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@pytest.mark.parametrize("world, task, arguments, rank", [(1, too_few, (0,), 0), (1, too_few, (1,), 1), (2, one_stays_away, (), 0)], ids=["no-second", "no-first", "torchrun"])
def test_a_process_that_waits_in_vain_at_the_start_says_so(world, task, arguments, rank):
    (error, *_), seconds = team(world, task, *arguments)
    assert type(error) is LostProcess and f"process {rank} ends" in str(error) and "not answered for 2 s" in str(error) and seconds < 30


def bug():
    with join(timeout=30):
        raise RuntimeError("a bug of this program")


def test_a_bug_is_not_taken_for_a_lost_process():
    assert all(type(error) is RuntimeError and str(error) == "a bug of this program" for error in team(2, bug)[0])


def late(seconds):
    "One process is still busy with messages when the other is done."
    with join(timeout=20) as processes:
        if processes.rank == 1:
            time.sleep(seconds)
            DistributedDataParallel(torch.nn.Linear(2, 2))
        else:
            DistributedDataParallel(torch.nn.Linear(2, 2))
    return not dist.is_initialized()


def test_nobody_parts_while_another_still_needs_it():
    assert all_well(2, late, 0.5) == [True, True]


def test_a_process_that_is_alone_joins_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join() as processes:
        assert (processes.rank, processes.world_size, processes.sum(1, 2.5)) == (0, 1, (1, 2.5)) and not dist.is_initialized()


@pytest.mark.parametrize("device, world, expected", [("cpu", 2, "cpu"), ("cuda", 1, "cuda"), ("mps", 1, "mps"), ("cuda:1", 1, "cuda:1")])
def test_devices_that_fit(monkeypatch, device, world, expected):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert own_device(device) == torch.device(expected)


def test_every_process_gets_a_card_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for local, card in (("0", "cuda:0"), ("1", "cuda:1")):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert own_device("cuda") == torch.device(card)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this machine needs a card of its own; there are 2"):
        own_device("cuda")
    for device in ("mps", "cuda:0"):
        with pytest.raises(ValueError, match=f"device='{device}' must be 'cpu' or 'cuda'"):
            own_device(device)


# --- FSDP ---------------------------------------------------------------------------------------------------------------------------------


def sharded(tied):
    "Three steps of AdamW in pieces: the bytes of this process, and the whole weights."
    with join(timeout=30) as processes:
        model = shard(build(n_layers=2, tie_embeddings=tied).double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first, second = micro_batches("ignored")
        for batches in ([first], [second], [first, second]):
            optimizer.zero_grad()
            accumulate_gradients(lambda x, y, n: next_token_loss(model(x), y, denominator=n), batches, processes=processes)
            optimizer.step()
        parameters, moments = list(model.parameters()), [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        gradient = flat(p.grad.full_tensor() for p in parameters)
        return [local_bytes(t) for t in (parameters, [p.grad for p in parameters], moments)], gradient, flat(p.full_tensor() for p in parameters)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_pieces_makes_the_steps_of_one_that_is_whole(tied):
    model = build(n_layers=2, tie_embeddings=tied).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second = micro_batches("ignored")
    for x, y in (first, second, tuple(map(torch.cat, zip(first, second)))):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
    answers = all_well(2, sharded, tied)
    whole = 8 * model.num_parameters()
    for held, gradient, weights in answers:
        torch.testing.assert_close(gradient, flat(p.grad for p in model.parameters()), atol=1e-12, rtol=0)
        torch.testing.assert_close(weights, flat(model.parameters()), atol=1e-10, rtol=0)
        assert all(0.4 * size < part < 0.6 * size for part, size in zip(held, (whole, whole, 2 * whole)))
    assert [sum(parts) for parts in zip(*(held for held, _, _ in answers))] == [whole, whole, 2 * whole]


def trained_in_pieces(out):
    with join(timeout=30) as processes:
        train(shard(build()), IDS, None, CONFIG, out_dir=out, progress=False, processes=processes)


def test_a_model_in_pieces_is_refused_by_train_before_anything_is_written(tmp_path):
    answers, _ = team(2, trained_in_pieces, tmp_path / "run")
    assert all(type(error) is ValueError and "model is in pieces" in str(error) for error in answers) and not (tmp_path / "run").exists()


# --- torchrun -----------------------------------------------------------------------------------------------------------------------------


def torchrun(folder, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc_per_node", "2",
               "-m", "tinylm", "train", "--out", str(folder / "run"), "--device", "cpu", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", start_new_session=True)


def finish(process, seconds=LIMIT):
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("it did not end: " + process.communicate()[0])


@pytest.fixture
def stories(tmp_path):
    (tmp_path / "stories").mkdir()
    for i in range(4):
        (tmp_path / "stories" / f"{i}.txt").write_text("".join(KnownEntropyLanguage().documents(20, seed=i)), encoding="utf-8")
    return tmp_path


WORDS = ["--text", "stories", "--preset", "tiny", "--context-length", "32", "--batch-size", "4", "--checkpoint-every", "2"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="torchrun is run on Linux")


@linux
def test_torchrun_trains_says_everything_once_and_a_killed_process_ends_the_job(stories):
    said = finish(torchrun(stories, *WORDS, "--steps", "4"))
    assert load_checkpoint(stories / "run").step == 4, said
    assert [line["step"] for line in read_log(stories / "run") if "loss" in line] == [1, 2, 3, 4]
    assert said.count("held out: loss") == 1 and said.count("kinds of tokens") == 1 and said.count("| 0/4 [00:00<?") == 1 and "4/4" in said
    job = torchrun(stories, "--resume", "--steps", "100000")
    victim = wait_for_worker(stories / "run", job)
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    said = finish(job, 60)
    assert job.returncode != 0 and time.monotonic() - started < 45
    assert "SIGKILL" in said and f"pid: {victim}" in re.sub(r"pid\s*:\s*", "pid: ", said)
    assert load_checkpoint(stories / "run").step >= 4


def wait_for_worker(run, job):
    "A worker of the job, other than the first, when the run goes on."
    lines = len(read_log(run))
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and job.poll() is None:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = {int(child): dict(pair.split("=", 1) for pair in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in pair).get("RANK") for child in children}
        log = (run / "log.jsonl").read_text(encoding="utf-8")
        if log.count("\n") > lines + 1:
            return next(child for child, rank in ranks.items() if rank == "1")
        time.sleep(0.2)
    raise AssertionError("the run did not go on")


@linux
def test_torchrun_stops_at_ctrl_c_with_a_checkpoint(stories):
    job = torchrun(stories, *WORDS, "--steps", "100000")
    (stories / "run").mkdir(exist_ok=True)
    deadline = time.monotonic() + LIMIT
    while not (stories / "run" / "checkpoints" / "step-00000004").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(job.pid, signal.SIGINT)
    said = finish(job, 60)
    step = load_checkpoint(stories / "run").step
    assert step >= 4 and said.count("to go on: tinylm train") == 1 and f"step-{step:08d} is kept" in said
