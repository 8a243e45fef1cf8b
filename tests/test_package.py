"""The package as an importer and a person at a terminal meet it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tinylm


def run(*command, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=300, **kwargs)


def test_names_come_lazily():
    code = "import sys, tinylm; assert 'torch' not in sys.modules; tinylm.TransformerLM; assert 'torch' in sys.modules"
    assert run(sys.executable, "-c", code).returncode == 0


def test_all_names_resolve_and_unknown_ones_do_not():
    assert {"ModelConfig", "TransformerLM", "KVCache"} <= set(tinylm.__all__) <= set(dir(tinylm))
    for name in tinylm.__all__:
        assert getattr(tinylm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        tinylm.Transformer


def test_the_example_of_the_readme_runs():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    result = run(sys.executable, "-c", example + "\nassert model.num_parameters() == 6_917_376 and logits.shape == (1, 3, 8192)")
    assert result.returncode == 0, result.stderr


def test_the_version_is_the_one_in_settings():
    from importlib.metadata import version

    assert tinylm.__version__ == version("tinylm")


def demo(*options, **kwargs):
    return run(sys.executable, "-m", "tinylm", "demo", *options, **kwargs)


def test_demo_on_stories_prints_the_ladder_and_stories():
    result = demo("--steps", "3")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if "█" in line]
    bits = {" ".join(row[:-2]): float(row[-2]) for row in rows}
    assert set(bits) == {"unigram", "bigram", "5-gram", "this model", "floor"}
    assert min(bits, key=bits.get) == "floor"
    assert "3/3" in result.stderr  # the progress bar
    assert "it writes" in result.stdout


def test_demo_on_a_file(tmp_path):
    book = tmp_path / "größe.txt"
    book.write_text("Der Drache stieg, und niemand sah ihn fallen. „Komm“, rief sie. " * 100, encoding="utf-8")
    result = demo("--text", str(book), "--steps", "2")
    assert result.returncode == 0, result.stderr
    assert "this model" in result.stdout and "floor" not in result.stdout


def test_demo_is_the_same_for_the_same_seed():
    first, again, other = (demo("--steps", "2", "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert first == again != other


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "No such file"),
        (b"caf\xe9 " * 100, "not UTF-8 text: byte 3 is 0xe9"),
        (b"PK\x03\x04\0" * 500, "not text: byte 4 is 0x00"),
        (b"too short", "has 9 bytes"),
        (b"", "has 0 bytes"),
    ],
    ids=["missing", "latin-1", "binary", "short", "empty"],
)
def test_a_file_that_will_not_do_is_one_line_and_exit_code_2(tmp_path, content, said):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    result = demo("--text", str(path))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr and "input.txt" in result.stderr
    assert result.stdout == ""


def test_a_folder_is_not_a_file(tmp_path):
    result = demo("--text", str(tmp_path))
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_help_names_the_command_and_its_options():
    assert "demo" in run(sys.executable, "-m", "tinylm", "--help").stdout
    for option in ("--text", "--steps", "--seed"):
        assert option in demo("--help").stdout


def test_ctrl_c_ends_the_training_not_the_demo(monkeypatch, capsys):
    from tinylm import cli

    def interrupted(model, batches, learning_rate):
        yield 5.0
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "fit", interrupted)
    cli.demo(text=None, steps=100, seed=0)
    out, err = capsys.readouterr()
    assert "stopped after 1 of 100 steps" in err and "this model" in out
