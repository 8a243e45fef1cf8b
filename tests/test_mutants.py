"""Every test of the course is itself proved: each fault in mutants.toml is planted in a copy of the package, and the test named beside it must fail.

A survivor is a hole in the tests. An entry with `survives = true` is a control: it changes the code, nothing that is promised, and
its test must pass. A test that a fault ends by another exception than an assertion counts only if the entry names that `error`.

Importing torch takes seconds, so one worker process (this file, run as a script) imports it once and forks for each run.
"""
import ast
import builtins
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings the same parser along
    import tomli as tomllib

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SECONDS = 120  # for one run: a fault may also loop for ever
MUTANTS = tomllib.loads((TESTS / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
KILLERS = sorted({mutant["killed_by"] for mutant in MUTANTS})


# --- the worker: imports what the tests import, then forks ----------------------------------------------------------------------------


def serve():
    "Read jobs (JSON lines with the folder of a package and a test) from stdin; answer each when its `result.json` is written."
    for file in sorted({killer.split("::")[0] for killer in KILLERS}):
        import_what_is_imported_by(ROOT / file)
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(["-o", "addopts=", "--version"])  # imports pytest's own plugins
    gc.collect(), gc.freeze()  # the children's collector passes over what is imported here
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            run_one_test(Path(job["folder"]), job["test"])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}), flush=True)


def import_what_is_imported_by(file):
    "Everything but tinylm, of which each child imports its own copy, and other files of this folder, which may import tinylm."
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            top = name.split(".")[0]
            if top == "tinylm" or (TESTS / f"{top}.py").exists():
                continue
            try:
                module = importlib.import_module(name)
                [getattr(module, alias.name, None) for alias in node.names if isinstance(node, ast.ImportFrom)]  # some modules load names on use
            except ImportError:
                pass  # the test will skip, or fail, by itself


def run_one_test(folder, test):
    "In the child: the test against folder/tinylm; writes log.txt, and what became of it to result.json."
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(ROOT)
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", HYPOTHESIS_STORAGE_DIRECTORY=str(folder / "hypothesis"),
                      PYTHONPATH=str(folder), PYTHONSAFEPATH="1")  # for tests that start a Python of their own
    if "hypothesis" in sys.modules:
        sys.modules["hypothesis"].configuration.set_hypothesis_home_dir(folder / "hypothesis")
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    recorder = Recorder()
    code = pytest.main(["-o", "addopts=", "-p", "no:cacheprovider", "--assert=plain", "-x", "-q", test], plugins=[recorder])
    result = {"code": int(code), "passed": recorder.passed, "stops": recorder.stops}
    if "tinylm" in sys.modules:
        result["package"] = sys.modules["tinylm"].__file__
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush(), sys.stderr.flush()


class Recorder:
    "A pytest plugin that notes how each phase of each test ended."

    def __init__(self):
        self.passed, self.stops = 0, []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None:
            self.stops.append({"when": call.when, "kinds": [type(error).__name__ for error in leaves(call.excinfo.value)],
                               "asserts": all(isinstance(error, (AssertionError, pytest.fail.Exception)) for error in leaves(call.excinfo.value)),
                               "text": str(call.excinfo.value)[:300]})
        elif call.when == "call":
            self.passed += 1


def leaves(error):
    "The errors inside an exception group, or the error itself."
    group = getattr(builtins, "BaseExceptionGroup", ())
    return [leaf for part in error.exceptions for leaf in leaves(part)] if isinstance(error, group) else [error]


# --- running tests against a changed package --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def worker():
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork: planting every fault would take an hour of imports")
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = {**os.environ, **one_thread, "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES", "MPLBACKEND": "agg", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    yield process
    process.stdin.close()
    process.wait(timeout=SECONDS)


def package_with(mutant, folder):
    "A copy of tinylm in `folder`, with one mutant planted (None: as it is)."
    shutil.copytree(ROOT / "tinylm", folder / "tinylm", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        file = folder / mutant["file"]
        file.write_text(planted(mutant), encoding="utf-8")
    return folder


def planted(mutant):
    source = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert source.count(mutant["find"]) == 1, f"{mutant['id']}: the text to replace occurs {source.count(mutant['find'])} times in {mutant['file']}"
    return source.replace(mutant["find"], mutant["replace"])


def outcome(worker, folder, test):
    '''"passed", "skipped: …", "failed: …" (an assertion did not hold) or "error: …" (anything else), and the log.'''
    worker.stdin.write(json.dumps({"folder": str(folder), "test": test}) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    assert answer, "the worker has died"
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
    if json.loads(answer)["signal"]:
        return f"error: no end after {SECONDS} s" if json.loads(answer)["signal"] == signal.SIGALRM else f"error: signal {json.loads(answer)['signal']}", log
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert Path(result.get("package", folder)).is_relative_to(folder), "the test imported another package than the copy"
    skips = [stop for stop in result["stops"] if stop["kinds"] == ["Skipped"]]
    if result["code"] == 0 and result["passed"]:
        return "passed", log
    if result["code"] == 0 and skips:
        return f"skipped: {skips[0]['text']}", log
    if result["code"] == 1 and result["stops"] and result["stops"][-1]["when"] == "call":
        stop = result["stops"][-1]
        return ("failed" if stop["asserts"] else "error") + f": {', '.join(stop['kinds'])}: {stop['text']}", log
    return f"error: pytest ended with code {result['code']}", log


def verdict(worker, mutant, folder):
    "None if the mutant does what its entry says; else what is wrong."
    happened, log = outcome(worker, package_with(mutant, folder), mutant["killed_by"])
    if happened.startswith("skipped"):
        pytest.skip(happened)
    if mutant.get("survives"):
        expected, right = "should pass", happened == "passed"
    elif "error" in mutant:
        expected, right = f"should end with {mutant['error']}", happened.startswith((f"error: {mutant['error']}", "failed"))
    else:
        expected, right = "should fail by an assertion", happened.startswith("failed")
    return None if right else f"{mutant['id']} ({mutant['breaks']}): {mutant['killed_by']} {expected}, but {happened}\n{log}"


# --- the tests ---------------------------------------------------------------------------------------------------------------------------


def test_every_id_is_used_once():
    ids = [mutant["id"] for mutant in MUTANTS]
    assert len(ids) == len(set(ids)), sorted(name for name in set(ids) if ids.count(name) > 1)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["id"])
def test_a_mutant_is_well_formed(mutant):
    assert {"id", "chapter", "file", "find", "replace", "breaks", "killed_by"} <= set(mutant) <= {
        "id", "chapter", "file", "find", "replace", "breaks", "killed_by", "survives", "error"}
    assert mutant["find"] != mutant["replace"] and len(mutant["chapter"]) == 2
    ast.parse(planted(mutant))  # the text occurs once, and what results is Python
    file, _, name = mutant["killed_by"].partition("::")
    assert f"def {name.split('::')[-1].split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("killer", KILLERS)
def test_a_killer_passes_on_the_right_code(killer, worker, tmp_path):
    happened, log = outcome(worker, package_with(None, tmp_path), killer)
    if happened.startswith("skipped"):
        pytest.skip(happened)
    assert happened == "passed", f"{killer}: {happened}\n{log}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["id"])
def test_a_mutant_is_killed(mutant, worker, tmp_path):
    wrong = verdict(worker, mutant, tmp_path)
    assert wrong is None, wrong


ADVANCE = dict(id="x", breaks="the cursor stays", file="tinylm/kv_cache.py", find="        self._length += n\n", killed_by="tests/test_kv_cache.py::test_advance_goes_forward_only")


@pytest.mark.parametrize(
    "replace, test, complaint",
    [
        ("        self._length += n  # the same\n", "test_advance_goes_forward_only", "should fail by an assertion, but passed"),
        ("        self._length += n, 0\n", "test_advance_goes_forward_only", "but error: TypeError"),
        ("        self._length += n\n\nimport nothing_of_this_name\n", "test_advance_goes_forward_only", "but error: pytest ended with code"),
        ("        self._length += n\n", "test_of_no_such_name", "but error: pytest ended with code 4"),
        ("        os._exit(0)\n", "test_advance_goes_forward_only", "but error: NameError"),
    ],
    ids=["survivor", "crash", "import", "no-such-test", "name"],
)
def test_the_runner_is_not_content_with_less_than_a_failed_assertion(replace, test, complaint, worker, tmp_path):
    mutant = {**ADVANCE, "replace": replace, "killed_by": f"tests/test_kv_cache.py::{test}"}
    assert complaint in verdict(worker, mutant, tmp_path)


def test_the_runner_knows_a_kill_and_a_control(worker, tmp_path):
    killed = {**ADVANCE, "replace": "        self._length += 2 * n\n"}
    assert verdict(worker, killed, tmp_path / "killed") is None
    assert "should pass, but failed" in verdict(worker, {**killed, "survives": True}, tmp_path / "control")
    harmless = {**ADVANCE, "replace": "        self._length = self._length + n\n", "survives": True}
    assert verdict(worker, harmless, tmp_path / "harmless") is None


if __name__ == "__main__":
    serve()
