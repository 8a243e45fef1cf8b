"""A measuring program cannot be judged by a real clock. Here the clock and the device are ours, so every number of a result is known beforehand."""

import json
import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinylm import benchmark, sampling
from tinylm.benchmark import (SETUPS, CacheMismatch, Machine, Result, Samples, benchmark_generation, check_cache, device_sync, generate_carelessly,
                              lengths_to_time, load_results, machine_facts, measure_machine, plot_results, predict_generation, predict_step,
                              results_table, save_results, setup_for, spread_text, step_bytes, step_flops, time_calls, time_once, weights_of_a_step)
from tinylm.kv_cache import KVCache
from tinylm.sampling import decoding_twin, generate
from tinylm.transformer import ModelConfig, TransformerLM

FIVE = (5.0, 0.1, 0.1, 0.1, 0.4)  # the first one compiles, the last one was disturbed


class FakeClock:
    "Shows `now`; each call of `work` takes the next duration."

    def __init__(self, *durations):
        self.now, self.durations = 0.0, iter(durations)

    def __call__(self):
        return self.now

    def work(self):
        self.now += next(self.durations)


class FakeDevice:
    "Orders are taken at once; their time passes when somebody waits."

    def __init__(self):
        self.now, self.ordered = 0.0, 0.0

    def order(self, seconds):
        self.ordered += seconds

    def wait(self):
        self.now, self.ordered = self.now + self.ordered, 0.0

    def clock(self):
        return self.now


class Ticking:
    "10 ms pass between the two looks of each call."

    def __init__(self):
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return 0.01 * (self.looks // 2)


def tiny(kind=TransformerLM, **fields):
    torch.manual_seed(0)
    small = dict(vocab_size=11, context_length=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)
    return kind(ModelConfig(**small | fields)).eval().requires_grad_(False)


class Nudged(TransformerLM):
    "Every logit of a cached decode step a thousandth larger: no token can change. `generate` meets it in `hidden`."

    def hidden(self, ids, *, cache=None, **options):
        decoding = cache is not None and cache.length > 0
        return super().hidden(ids, cache=cache, **options) * (1 + 1e-3 * decoding)


class Forgetful(TransformerLM):
    "Cached decode steps that lose the text: other tokens, which `generate` meets in `hidden`."

    def hidden(self, ids, *, cache=None, **options):
        out = super().hidden(ids, cache=cache, **options)
        return -out if cache is not None and cache.length > ids.shape[1] else out


# --- the clock --------------------------------------------------------------------------------------------------------------------------


def test_bench_2_median_spread_and_n_are_of_the_timed_samples_only():
    clock = FakeClock(*FIVE)
    found = time_calls({"work": clock.work}, repeats=4, warmup=1, clock=clock)["work"]
    assert found.values == pytest.approx(FIVE[1:]) and found.warmup == (5.0,)
    assert found.n == 4 and found.median == pytest.approx(0.1) and found.range == pytest.approx((0.1, 0.4))
    assert found.quartiles == pytest.approx(tuple(np.quantile(FIVE[1:], [0.25, 0.75])))


@pytest.mark.parametrize("repeats", [1, 2, 5, 9])
def test_bench_2_ten_milliseconds_are_ten_whatever_the_number_of_runs(repeats):
    clock = FakeClock(*[0.01] * 99)
    found = time_calls({"work": clock.work}, repeats=repeats, warmup=3, clock=clock)["work"]
    assert found.median == pytest.approx(0.01) and found.n == repeats and len(found.warmup) == 3
    assert found.range == pytest.approx((0.01, 0.01)) == found.quartiles


def test_bench_1_the_clock_stops_when_the_device_is_done():
    device = FakeDevice()
    assert time_once(lambda: device.order(2.0), device.clock, device.wait) == 2.0
    found = time_calls({"work": lambda: device.order(2.0)}, repeats=3, clock=device.clock, sync=device.wait)["work"]
    assert found.values == (2.0, 2.0, 2.0) and found.warmup == (2.0,)


def test_bench_1_what_was_ordered_before_is_done_before_the_clock_starts():
    device = FakeDevice()
    device.order(7.0)
    assert time_once(lambda: device.order(2.0), device.clock, device.wait) == 2.0


def test_without_a_wait_the_fake_device_takes_no_time():
    device = FakeDevice()  # the instrument itself: it can show the fault
    assert time_once(lambda: device.order(2.0), device.clock, lambda: None) == 0.0


def test_functions_take_turns_and_the_warm_up_comes_before_all():
    calls = []
    time_calls({name: partial(calls.append, name) for name in "abc"}, repeats=3, warmup=2)
    assert "".join(calls) == "abc" * 5
    calls = []
    found = time_calls({name: partial(calls.append, name) for name in "ab"}, repeats=2, warmup=0)
    assert "".join(calls) == "abab" and found["a"].warmup == ()


def test_a_machine_that_slows_down_meets_all_programs_alike():
    clock = FakeClock(*(1 + 0.1 * i for i in range(18)))
    found = time_calls({"a": clock.work, "b": clock.work}, repeats=9, warmup=0, clock=clock)
    assert found["b"].median / found["a"].median == pytest.approx(1.9 / 1.8)


def test_progress_is_shown_after_every_call_and_outside_the_measurement():
    clock = FakeClock(*[1.0] * 20)

    def slow_bar():
        clock.now += 50.0
        seen.append(clock.now)

    seen = []
    found = time_calls({"a": clock.work, "b": clock.work}, repeats=3, warmup=1, clock=clock, on_sample=slow_bar)
    assert len(seen) == 8 and found["a"].values == found["b"].values == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("options, error", [(dict(repeats=0), ValueError), (dict(repeats=2.0), TypeError), (dict(warmup=-1), ValueError), (dict(repeats=True), TypeError)])
def test_counts_are_checked_before_anything_is_called(options, error):
    with pytest.raises(error, match="repeats|warmup"):
        time_calls({"a": lambda: pytest.fail("called")}, **options)


def test_a_cpu_needs_no_wait_and_others_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(str(device)))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for device in ("cpu", "cuda", "cuda:1", "mps", torch.device("cpu")):
        device_sync(device)()
    assert waited == ["cuda", "cuda:1", "mps"]
    with pytest.raises(ValueError, match="device='meta' must be one of cpu, cuda, mps"):
        device_sync("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_wait_changes_what_is_measured():
    a = torch.randn(4096, 4096, device="cuda")
    call = lambda: [a @ a for _ in range(20)]  # noqa: E731
    call(), torch.cuda.synchronize()
    with_wait, without = (time_calls({"x": call}, repeats=5, sync=sync)["x"].median for sync in (device_sync("cuda"), lambda: None))
    assert with_wait > 2 * without


# --- the gate ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal", "none"])
def test_the_gate_lets_the_right_model_pass_and_tells_the_difference(dtype, position):
    model = tiny(position=position).to(dtype)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    error = check_cache(model, ids, 6)
    text = generate(model, ids, 6)[:, :-1]
    writer, cache, parts = decoding_twin(model, 6), KVCache.for_model(model, 2, 8), []
    with torch.inference_mode():
        for part in text.split([3, 1, 1, 1, 1, 1], dim=1):
            parts.append(model.head(writer.hidden(part, cache=cache)[:, -1:]))
        assert error == pytest.approx((torch.cat(parts, dim=1) - model(text)[:, 2:]).abs().max().item(), abs=1e-13 if dtype == torch.float64 else 1e-6)
    assert error <= {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gate_refuses_logits_nudged_by_a_thousandth_though_tokens_agree(dtype):
    model, ids = tiny(Nudged).to(dtype), torch.tensor([[1, 2, 3]])
    assert generate(model, ids, 8).equal(generate(model, ids, 8, use_cache=False))
    with torch.no_grad():
        largest = model(generate(model, ids, 8)[:, :-1])[:, 3:].abs().max().item()  # the first word is chosen by the prefill
    with pytest.raises(CacheMismatch, match=f"logits differ by {1e-3 * largest:.1e}"):
        check_cache(model, ids, 8)


def test_the_gate_looks_at_what_generate_writes_with(monkeypatch):
    "The twin, not the model: a norm that is slightly wrong there is in no pass of the model itself."
    model, ids, real = tiny(), torch.tensor([[1, 2, 3]]), sampling.one_row_rms_norm
    monkeypatch.setattr(sampling, "one_row_rms_norm", lambda norm: lambda x: real(norm)(x) * 1.001)
    assert generate(model, ids, 8).equal(generate(model, ids, 8, use_cache=False))
    with pytest.raises(CacheMismatch, match="logits differ by"):
        check_cache(model, ids, 8)


def test_the_careless_rival_must_write_the_same_text(monkeypatch):
    model, ids, clock = tiny(), torch.tensor([[1, 2, 3]]), Ticking()
    check_cache(model, ids, 5, careless=True)
    monkeypatch.setattr(benchmark, "generate_carelessly", lambda model, ids, new_tokens: ids)  # very fast
    with pytest.raises(CacheMismatch, match="the careless rival writes another text"):
        benchmark_generation(model, 3, 5, careless=True, clock=clock)
    assert clock.looks == 0 and benchmark_generation(model, 3, 5, repeats=1, clock=clock)[0].careless is None


def test_the_gate_refuses_other_tokens_and_says_from_where():
    model, ids = tiny(Forgetful), torch.tensor([[1, 2, 3]])
    cached, uncached = (generate(model, ids, 8, use_cache=use_cache)[0].tolist() for use_cache in (True, False))
    first = next(i for i, (a, b) in enumerate(zip(cached, uncached)) if a != b)
    with pytest.raises(CacheMismatch, match=f"tokens differ from number {first} on"):
        check_cache(model, ids, 8)


def test_the_gate_refuses_nan_logits(monkeypatch):
    class Broken(TransformerLM):
        def hidden(self, ids, *, cache=None, **options):
            return super().hidden(ids, cache=cache, **options) * (math.nan if cache is not None and cache.length else 1.0)

    model, ids = tiny(Broken), torch.tensor([[1, 2, 3]])
    monkeypatch.setattr(benchmark, "generate", lambda model, ids, new_tokens, use_cache=True: torch.cat((ids, ids.new_zeros(1, new_tokens)), dim=1))
    with pytest.raises(CacheMismatch, match="logits differ by nan"):
        check_cache(model, ids, 4)


def test_rounding_that_is_allowed_grows_with_the_logits():
    class Loud(TransformerLM):
        def hidden(self, ids, *, cache=None, **options):
            decoding = cache is not None and cache.length > 0
            return super().hidden(ids, cache=cache, **options) * 1e4 * (1 + 3e-6 * decoding)

    assert check_cache(tiny(Loud), torch.tensor([[1, 2, 3]]), 4) > 1e-3  # a few millionths of logits that are thousands


@pytest.mark.parametrize("kind", [Nudged, Forgetful])
def test_nothing_is_timed_before_every_set_up_has_passed(kind):
    clock = Ticking()
    with pytest.raises(CacheMismatch, match="nothing is timed"):
        benchmark_generation(tiny(kind), 3, (1, 8), clock=clock)  # one new token needs no decode step: that set-up passes
    assert clock.looks == 0


def test_a_training_model_is_gated_and_timed_in_evaluation_mode():
    model = tiny(dropout=0.5).train()
    (result,) = benchmark_generation(model, 3, 4, repeats=1, warmup=0)
    assert result.logit_error < 1e-5 and model.training  # and is given back as it was


# --- results ----------------------------------------------------------------------------------------------------------------------------


def test_only_new_tokens_count_whatever_the_prompt():
    results = benchmark_generation(tiny(), (2, 20), (5, 10), repeats=3, clock=Ticking(), sync=lambda: None)
    assert [(r.prompt_length, r.new_tokens) for r in results] == [(2, 5), (2, 10), (20, 5), (20, 10)]
    for result in results:
        for kind in ("cached", "uncached"):
            assert result.rate(kind).values == pytest.approx((result.new_tokens / 0.01,) * 3)


def test_a_speed_that_was_not_measured_is_refused():
    (result,) = benchmark_generation(tiny(), 2, 5, repeats=2, clock=Ticking(), sync=lambda: None)
    for kind, complaint in (("prefill", "a wait, not a speed"), ("careless", "'careless' was not measured"), ("fast", "'fast' was not measured")):
        with pytest.raises(ValueError, match=complaint):
            result.rate(kind)
    with pytest.raises(ValueError, match="'careless' was not measured"):
        result.speedup("careless")
    assert result.speedup("prefill").n == 2  # of waits there is a ratio


def test_repeats_are_refused_before_the_gate():
    for options, error in ((dict(repeats="9"), TypeError), (dict(warmup=-1), ValueError)):
        with pytest.raises(error, match="repeats|warmup"):
            benchmark_generation(tiny(Forgetful), 3, 8, **options)  # which would not pass the gate


def test_tokens_of_all_rows_count():
    (result,) = benchmark_generation(tiny(), 4, 5, batch_size=3, repeats=2, clock=Ticking())
    assert result.rows == 3 and result.rate().median == pytest.approx(3 * 5 / 0.01)


@pytest.fixture
def calls_of_generate(monkeypatch):
    "What is timed, as (way, prompt, new) in order; the gate's own calls left out."
    calls, gate = [], benchmark.check_cache

    def spied(model, ids, new_tokens, use_cache=True):
        calls.append(("cached" if use_cache else "uncached", ids.shape[1], new_tokens))
        return generate(model, ids, new_tokens, use_cache=use_cache)

    def quiet_gate(*arguments):
        before = len(calls)
        error = gate(*arguments)
        del calls[before:]
        return error

    monkeypatch.setattr(benchmark, "generate", spied)
    monkeypatch.setattr(benchmark, "check_cache", quiet_gate)
    return calls


def test_uncached_cached_and_prefill_are_timed_in_turns_over_all_lengths(calls_of_generate):
    benchmark_generation(tiny(), (2, 6), 5, repeats=2, warmup=1, clock=Ticking())
    one_round = [("uncached", 2, 5), ("cached", 2, 5), ("cached", 2, 1), ("uncached", 6, 5), ("cached", 6, 5), ("cached", 6, 1)]
    assert calls_of_generate == one_round * 3


def test_prefill_is_not_taken_from_the_cached_time():
    durations = iter([1.0, 0.5, 0.1] * 4)
    clock = FakeClock(*durations)
    looks = []

    def ticking():  # every second look, the next duration has passed
        looks.append(0)
        if len(looks) % 2 == 0:
            clock.work()
        return clock.now

    (result,) = benchmark_generation(tiny(), 3, 8, repeats=3, clock=ticking)
    assert result.uncached.values == pytest.approx((1.0,) * 3) and result.cached.values == pytest.approx((0.5,) * 3)
    assert result.prefill.values == pytest.approx((0.1,) * 3) and result.careless is None
    assert result.rate().median == pytest.approx(16) and result.speedup().values == pytest.approx((2.0,) * 3)


def test_the_speed_up_is_a_ratio_within_each_round():
    result = Result(1, 1, 1, 0.0, uncached=Samples((4.0, 40.0, 4.0)), cached=Samples((2.0, 20.0, 1.0)), prefill=Samples((1.0,) * 3), careless=Samples((8.0, 40.0, 4.0)))
    assert result.speedup().values == (2, 2, 4) and result.speedup().median == 2
    assert result.speedup("careless").values == (4, 2, 4)


def test_the_careless_loop_writes_the_same_text_and_is_timed_only_if_asked():
    model, ids = tiny(), torch.tensor([[1, 2, 3], [3, 2, 1]])
    assert generate_carelessly(model, ids, 7).equal(generate(model, ids, 7))
    (result,) = benchmark_generation(model, 3, 4, repeats=2, careless=True)
    assert result.careless.n == 2


@pytest.mark.parametrize(
    "prompts, news, error, said",
    [(8, 25, ValueError, "new_tokens=25 after a prompt of 8 goes beyond context_length=32"), ((1, 30), (1, 3), ValueError, "beyond context_length=32"),
     (0, 4, ValueError, "prompt_lengths=0"), (4, 0, ValueError, "new_tokens=0"), ([], 4, ValueError, "prompt_lengths"), (4, (), ValueError, "new_tokens"),
     (4, 2.0, TypeError, "new_tokens=2.0"), (True, 4, TypeError, "prompt_lengths")],
)
def test_lengths_that_cannot_be_are_refused_before_any_work(prompts, news, error, said):
    model = tiny()
    model.forward = model.hidden = None
    with pytest.raises(error, match=said):
        benchmark_generation(model, prompts, news)
    assert lengths_to_time(model, range(1, 3), 4) == [(1, 4), (2, 4)]


def test_every_set_up_fits_its_context_and_the_public_ones_are_there():
    for name, setup in SETUPS.items():
        lengths_to_time(_meta(name), setup["prompt_lengths"], setup["new_tokens"])
    assert SETUPS["reference"]["prompt_lengths"] == 8 and SETUPS["reference"]["new_tokens"] == (128, 256)
    assert SETUPS["base"]["new_tokens"][0] == 32 and SETUPS["base"]["new_tokens"][-1] == 232
    assert SETUPS["gpt2-mini"]["prompt_lengths"] == (16, 64, 256) and SETUPS["gpt2-mini"]["new_tokens"] == 40


def _meta(name):
    with torch.device("meta"):
        return TransformerLM(ModelConfig.preset(name))


@pytest.mark.parametrize("length", [2, 3, 5, 12, 32, 96, 257, 1024])
def test_any_context_has_a_set_up_inside_it(length):
    setup = setup_for(ModelConfig.preset("tiny", context_length=length))
    P, news = setup["prompt_lengths"], setup["new_tokens"]
    assert P >= 1 and min(news) >= 1 and P + max(news) == length and list(news) == sorted(set(news))


# --- the cost model ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("fields", [{}, dict(n_kv_heads=1, tie_embeddings=False), dict(ffn="gelu", norm="layernorm", bias=True, position="learned")])
def test_operations_are_those_that_torch_counts(cached, fields):
    wide = dict(d_model=64, d_ff=192, vocab_size=301)
    model, S = tiny(**wide | fields), 20
    ids = torch.randint(301, (1, S), generator=torch.Generator().manual_seed(0))
    cache = KVCache.for_model(model, 1, S)
    if cached:
        model(ids[:, :-1], cache=cache)
    with FlopCounterMode(display=False) as counter:
        model.head(model.hidden(ids[:, -1:], cache=cache)[:, -1] if cached else model.hidden(ids)[:, -1])
    assert counter.get_total_flops() == pytest.approx(step_flops(model.config, S, cached), rel=0.02)


def test_bytes_are_every_weight_once_and_the_filled_part_of_the_cache():
    model = tiny()
    cache = KVCache.for_model(model, 1, 20)
    table = model.embedding.weight.numel()  # tied: fetched as the head
    assert step_bytes(model.config, 20, False) == 4 * model.num_parameters()
    assert step_bytes(model.config, 20, True) == 4 * model.num_parameters() + cache.nbytes
    assert step_bytes(model.config, 20, True, number=2) == step_bytes(model.config, 20, True) / 2
    apart = tiny(tie_embeddings=False)
    assert step_bytes(apart.config, 20, False) == 4 * (apart.num_parameters() - table)  # one row of the table is nothing


def test_the_numbers_on_paper():
    base, paper = ModelConfig.preset("base"), Machine(76e9, 10e9)
    assert weights_of_a_step(base) == (4_820_224, 2_097_152)
    assert step_flops(base, 0, True) == 13_834_752 and step_flops(base, 1, True) - step_flops(base, 0, True) == 6_144
    assert step_bytes(base, 0, True) == 27_669_504
    assert predict_step(base, 0, True, paper) == pytest.approx(27_669_504 / 10e9)
    assert predict_step(base, 256, False, paper) == pytest.approx((2 * 4_820_224 * 256 + 2 * 2_097_152 + 6_144 * 256**2) / 76e9)


def test_a_generation_is_the_sum_of_its_steps_and_the_first_reads_the_prompt():
    base, slow = ModelConfig.preset("base"), Machine(1e9, 1e15)  # arithmetic alone
    uncached = sum(step_flops(base, S, False) for S in range(24, 28))
    cached = step_flops(base, 24, False) + sum(step_flops(base, S, True) for S in range(25, 28))
    assert predict_generation(base, 24, 4, False, slow) == pytest.approx(uncached / 1e9)
    assert predict_generation(base, 24, 4, True, slow) == pytest.approx(cached / 1e9)


def test_the_two_constants_come_from_the_products_alone():
    model = tiny(d_ff=24)
    numbers = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    machine = measure_machine(model, rows=32, repeats=3, clock=Ticking())
    assert machine.flops == pytest.approx(2 * 32 * numbers / 0.01) and machine.bandwidth == pytest.approx(4 * numbers / 0.01)
    assert measure_machine(model.double(), repeats=1, clock=Ticking()).bandwidth == pytest.approx(8 * numbers / 0.01)


# --- what is kept and shown -------------------------------------------------------------------------------------------------------------


def test_the_json_holds_machine_model_and_every_duration(tmp_path):
    model = tiny()
    results = benchmark_generation(model, (2, 6), 5, repeats=3, warmup=2, clock=Ticking(), careless=True)
    save_results(tmp_path / "new" / "log", results, model, "small")
    report = json.loads((tmp_path / "new" / "log" / "bench.json").read_text(encoding="utf-8"))
    machine = report["machine"]
    assert machine["threads"] == torch.get_num_threads() and machine["torch"] == torch.__version__ and machine["python"].count(".") == 2
    assert machine["cpu"] and machine["cores"] >= 1 and machine["device"] == "cpu" and machine["dtype"] == "torch.float32" and "load" in machine
    assert report["name"] == "small" and report["parameters"] == model.num_parameters() and ModelConfig(**report["model"]) == model.config
    for row in report["results"]:
        assert row["new_tokens"] == 5 and row["logit_error"] < 1e-5
        for way in ("uncached", "cached", "prefill", "careless"):
            assert row[way]["values"] == pytest.approx([0.01] * 3) and len(row[way]["warmup"]) == 2
        assert row["tokens_per_second"] == pytest.approx(500) and row["speedup"] == pytest.approx(1)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    model = tiny()
    results = benchmark_generation(model, 2, (3, 4), repeats=2)
    save_results(tmp_path, results, model, "small")
    report, again = load_results(tmp_path)
    assert again == results and "results" not in report and report["name"] == "small"
    (tmp_path / "bench.json").write_text('{"kind": "a diary"}', encoding="utf-8")
    with pytest.raises(ValueError, match="not written by save_results"):
        load_results(tmp_path)


def test_facts_name_dtype_device_and_threads_of_now():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        facts = machine_facts(tiny().to(torch.bfloat16))
    finally:
        torch.set_num_threads(before)
    assert facts["threads"] == 3 and facts["dtype"] == "torch.bfloat16" and facts["device_name"] is None
    assert json.loads(json.dumps(facts)) == facts


def test_the_table_shows_median_spread_and_n():
    result = Result(7, 30, 1, 0.0, uncached=Samples((3.0, 6.0, 2.0)), cached=Samples((1.0, 1.0, 2.0), (9.0,)), prefill=Samples((0.5, 0.25, 0.5)))
    head, row, foot = results_table([result]).splitlines()
    assert row.split("  ")[-1].strip() == "500.0 (250.0…500.0)" and "  " in row.strip() and "7 + 30" in row
    assert "10 (5…15)" in row and "30 (15…30)" in row and "3.0 (1.0…6.0)" in row
    assert "of 3 rounds in turns, 1 before them apart" in foot and len(head) == len(row) <= 100
    other = Result(**{**vars(result), "careless": Samples((4.0, 12.0, 2.0))})
    assert results_table([other, other]).splitlines()[3] == "times faster than a loop that makes all logits: 4.0, 4.0"
    assert spread_text(Samples((1234.5, 1.0, 2000.0)), 1) == "1,234.5 (1.0…2,000.0)"


def test_the_plot_has_error_bars_from_lowest_to_highest(tmp_path):
    result = Result(7, 30, 1, 0.0, uncached=Samples((3.0, 6.0, 2.0)), cached=Samples((1.0, 1.0, 2.0)), prefill=Samples((0.5,) * 3), careless=Samples((4.0, 6.0, 3.0)))
    figure = plot_results([result, result], "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert left.get_ylabel() and right.get_ylabel() and [len(axes.containers) for axes in (left, right)] == [2, 2]
    (bars,) = left.containers[0].lines[2]  # uncached
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((5.0, 15.0))
    assert left.containers[0].lines[0].get_ydata() == pytest.approx([10.0, 10.0])
    (bars,) = right.containers[1].lines[2]  # over the careless one
    assert bars.get_segments()[0][:, 1] == pytest.approx([1.5, 6.0])


def test_samples_agree_with_the_statistics_module_and_numpy():
    values = (3.0, 1.0, 4.0, 1.5, 9.0, 2.6)
    samples = Samples(values)
    assert samples.median == statistics.median(values) and samples.quartiles == pytest.approx(tuple(np.quantile(values, [0.25, 0.75])))
    assert Samples((2.0,)).quartiles == Samples((2.0,)).range == (2.0, 2.0) and samples.n == 6
