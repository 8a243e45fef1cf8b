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


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_example_of_the_readme_runs():
    result = run(sys.executable, "-c", EXAMPLES[0] + "\nassert model.num_parameters() == 6_917_376 and logits.shape == (1, 3, 8192)")
    assert result.returncode == 0, result.stderr


def test_the_second_example_of_the_readme_writes_with_the_model_of_the_demo(tmp_path, monkeypatch, capsys):
    import torch
    from tinylm.tokenizer import train_tokenizer
    from tinylm.training import save_checkpoint

    tokenizer = train_tokenizer(["a kite and a boat"], 260)
    torch.manual_seed(0)  # an untrained model may also end at once
    model = tinylm.TransformerLM(tinylm.ModelConfig(tokenizer.vocab_size, context_length=41, d_model=8, n_layers=1, n_heads=1))
    save_checkpoint(tmp_path / "tinylm-demo", model, tokenizer=tokenizer)
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 2
    exec(EXAMPLES[1], {"torch": torch})
    assert len(capsys.readouterr().out) > 1


def test_who_only_writes_does_not_load_what_trains_and_draws():
    result = run(sys.executable, "-c", "import sys; from tinylm import generate; print({'tinylm.training', 'matplotlib', 'safetensors'} & set(sys.modules))")
    assert result.returncode == 0 and result.stdout.strip() == "set()", result.stdout + result.stderr


def test_the_version_is_the_one_in_settings():
    from importlib.metadata import version

    assert tinylm.__version__ == version("tinylm")
