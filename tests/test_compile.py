"""A run with `compile=True` is the same run: by torch's own compiler, where there is one, and by its tracer alone, which needs none."""
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tinylm import training
from tinylm.training import Run, TrainConfig, load_checkpoint, read_log, train
from tinylm.transformer import ModelConfig, TransformerLM

V, T = 11, 8
IDS = torch.randint(V, (60,), generator=torch.Generator().manual_seed(1))


def build(**fields):
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(**{**dict(vocab_size=V, context_length=T, d_model=8, n_layers=1, n_heads=2, d_ff=8), **fields}))


def config(**fields):
    return TrainConfig(**{**dict(steps=2, batch_size=2, context_length=T, lr=1e-2, grad_accumulation=2), **fields})


def trained(out, shape, **fields):
    model = build(**shape)
    train(model, IDS, None, config(**fields), out_dir=out, progress=False)
    return model


def check_that_compiling_changes_nothing(folder, monkeypatch, **shape):
    "Log and weights within rounding of an eager run; a checkpoint that knows nothing of it and can be resumed without."
    monkeypatch.setattr(training, "plot_log", lambda path: None)
    eager, compiled = trained(folder / "eager", shape), trained(folder / "compiled", shape, compile=True)
    for mine, theirs in zip(read_log(folder / "compiled"), read_log(folder / "eager")):
        assert mine == pytest.approx(theirs, abs=1e-5)
    for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0, msg=name)
    stored = load_file(folder / "compiled" / "checkpoints" / "step-00000002" / "model.safetensors")
    assert stored.keys() == dict(eager.named_parameters()).keys()
    loaded = load_checkpoint(folder / "compiled")
    assert type(loaded.model) is TransformerLM and torch.equal(loaded.model.norm.weight, compiled.norm.weight)
    assert train(build(**shape), IDS, None, config(steps=3), out_dir=folder / "compiled", resume=True, progress=False).step == 3


def test_ckpt_1_a_traced_run_equals_an_eager_one_and_its_checkpoint_loads_plainly(tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):  # what torch.compile found, run as it is
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend=backend))
    check_that_compiling_changes_nothing(tmp_path, monkeypatch)
    assert len(graphs) == 1, "one graph, not one per update, and no break in it"


def test_without_compile_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    Run(build(), config()).update(IDS)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="this machine has no C++ compiler, which torch.compile needs on a CPU")
def test_ckpt_1_a_compiled_run_equals_an_eager_one_and_its_checkpoint_loads_plainly(tmp_path, monkeypatch):
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):  # without the C++ compiler's optimisations: half the time
        check_that_compiling_changes_nothing(tmp_path, monkeypatch, position="none", ffn="gelu")  # fewer kernels to compile
