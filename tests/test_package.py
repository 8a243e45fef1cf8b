"""The package as an importer meets it."""

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
