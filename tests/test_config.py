"""ModelConfig: what it accepts, what a None stands for, what its errors say, and that it survives JSON."""
import dataclasses
import json
import math

import pytest
import torch

from tinylm.transformer import ModelConfig, TransformerLM

SMALL = dict(vocab_size=11, context_length=8, d_model=24, n_layers=1, n_heads=4)
PRESETS = ("tiny", "reference", "gpt2-mini", "base", "large")


def test_defaults_are_the_documented_ones():
    assert ModelConfig(vocab_size=100).to_dict() == dict(
        vocab_size=100, context_length=256, d_model=256, n_layers=6, n_heads=8, n_kv_heads=None, d_ff=None,
        position="rope", norm="rmsnorm", ffn="swiglu", tie_embeddings=True, bias=False, dropout=0.0,
        rope_theta=10000.0, norm_eps=1e-5, backend="math",
    )


def test_the_vocabulary_has_no_default_and_may_be_given_first():
    with pytest.raises(TypeError, match="vocab_size"):
        ModelConfig()
    assert ModelConfig(100) == ModelConfig(vocab_size=100)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="n_head"):
        ModelConfig(100, n_head=4)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_a_config_is_frozen(field):
    config = ModelConfig(100)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, getattr(config, field))


def test_equal_configs_are_equal_and_hash_alike():
    assert ModelConfig(100, d_model=64) == ModelConfig(100, d_model=64) != ModelConfig(100, d_model=128)
    assert len({ModelConfig(100), ModelConfig(100), ModelConfig(101)}) == 2


# --- what a None stands for -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_heads, kv_heads", [(None, 8), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_kv_heads_default_to_the_query_heads(n_kv_heads, kv_heads):
    config = ModelConfig(100, n_heads=8, n_kv_heads=n_kv_heads)
    assert config.kv_heads == kv_heads and config.n_kv_heads == n_kv_heads, "the field stays as given"


@pytest.mark.parametrize("d_model, n_heads, head_dim", [(256, 8, 32), (384, 6, 64), (24, 4, 6), (8, 8, 1)])
def test_head_dim_is_the_width_divided_by_the_heads(d_model, n_heads, head_dim):
    assert ModelConfig(100, d_model=d_model, n_heads=n_heads, position="none").head_dim == head_dim


@pytest.mark.parametrize(
    "d_model, swiglu, gelu",
    [(256, 704, 1024), (384, 1024, 1536), (96, 256, 384), (24, 64, 96), (8, 64, 32), (48, 128, 192), (768, 2048, 3072), (1024, 2752, 4096)],
)
def test_the_feed_forward_width(d_model, swiglu, gelu):
    "SwiGLU: 8/3·C up to a multiple of 64 (24, 48, 96, 384 and 768 are multiples already). GELU: 4·C."
    assert ModelConfig(100, d_model=d_model, n_heads=4).ffn_width == swiglu
    assert ModelConfig(100, d_model=d_model, n_heads=4, ffn="gelu").ffn_width == gelu
    for ffn in ("swiglu", "gelu"):
        given = ModelConfig(100, d_model=d_model, n_heads=4, ffn=ffn, d_ff=10)
        assert given.ffn_width == 10 and given.d_ff == 10
        assert ModelConfig(100, d_model=d_model, n_heads=4, ffn=ffn).d_ff is None, "the field stays as given"


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_has_the_widths_the_config_says(name):
    config = ModelConfig.preset(name, n_layers=1, vocab_size=11)
    model = TransformerLM(config)
    F, C, D = config.ffn_width, config.d_model, config.head_dim
    assert model.blocks[0].ffn.down_proj.weight.shape == (C, F)
    assert model.blocks[0].attention.qkv_proj.weight.shape == ((config.n_heads + 2 * config.kv_heads) * D, C)
    assert model.blocks[0].attention.out_proj.weight.shape == (C, C) and C == config.n_heads * D


# --- presets ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, fields",
    [
        ("reference", dict(vocab_size=1000, context_length=512, d_model=256, n_layers=4, n_heads=4, kv_heads=4, ffn_width=704)),
        ("base", dict(vocab_size=8192, context_length=256, d_model=256, n_layers=6, n_heads=8, kv_heads=8, ffn_width=704, tie_embeddings=True)),
        ("large", dict(vocab_size=8192, d_model=384, n_layers=8, n_heads=6, kv_heads=2, ffn_width=1024)),
        ("gpt2-mini", dict(vocab_size=50257, context_length=512, d_model=128, n_layers=4, n_heads=4, ffn_width=512,
                           position="learned", norm="layernorm", ffn="gelu", bias=True)),
    ],
)
def test_presets_are_exact(name, fields):
    config = ModelConfig.preset(name)
    assert {field: getattr(config, field) for field in fields} == fields


def test_the_tiny_preset_sees_three_documents():
    assert ModelConfig.preset("tiny").context_length >= 96


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_overrides_and_is_not_changed_by_them(name):
    before = ModelConfig.preset(name)
    changed = ModelConfig.preset(name, vocab_size=77, n_layers=2, dropout=0.1)
    assert changed == dataclasses.replace(before, vocab_size=77, n_layers=2, dropout=0.1)
    assert ModelConfig.preset(name) == before


def test_bad_presets_and_overrides_are_refused():
    with pytest.raises(ValueError, match="(?s)'huge'.*tiny.*reference.*gpt2-mini.*base.*large"):
        ModelConfig.preset("huge")
    with pytest.raises(ValueError, match="n_kv_heads=3"):
        ModelConfig.preset("base", n_kv_heads=3)
    with pytest.raises(TypeError, match="heads"):
        ModelConfig.preset("base", heads=3)


# --- errors name the argument, its value and what is allowed ------------------------------------------------------------------------------

COUNTS = ("vocab_size", "context_length", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff")
BAD = [
    *[(field, value, ValueError, "at least 1") for field in COUNTS for value in (0, -1)],
    *[(field, value, TypeError, "whole number") for field in COUNTS for value in (2.0, "2", True, torch.tensor(2))],
    *[(field, None, TypeError, "whole number") for field in COUNTS if field not in ("n_kv_heads", "d_ff")],
    ("position", "alibi", ValueError, "rope, learned, sinusoidal, none"),
    ("position", None, ValueError, "rope, learned, sinusoidal, none"),
    ("norm", "batchnorm", ValueError, "rmsnorm, layernorm"),
    ("norm", "RMSNorm", ValueError, "rmsnorm, layernorm"),
    ("ffn", "relu", ValueError, "swiglu, gelu"),
    ("backend", "flash", ValueError, "math, fused"),
    ("tie_embeddings", 1, TypeError, "True or False"),
    ("tie_embeddings", None, TypeError, "True or False"),
    ("bias", 0, TypeError, "True or False"),
    ("bias", "no", TypeError, "True or False"),
    *[("dropout", value, ValueError, "[0, 1)") for value in (1, 1.0, -0.1, math.nan, math.inf)],
    *[(field, value, ValueError, "positive") for field in ("rope_theta", "norm_eps") for value in (0, 0.0, -1e-5, math.nan, math.inf)],
    *[(field, value, TypeError, "number") for field in ("dropout", "rope_theta", "norm_eps") for value in ("0.1", None, True)],
    ("n_heads", 5, ValueError, "divide d_model=24"),
    ("n_heads", 48, ValueError, "divide d_model=24"),
    ("n_kv_heads", 3, ValueError, "divide n_heads=4"),
    ("n_kv_heads", 8, ValueError, "divide n_heads=4"),
]


@pytest.mark.parametrize("field, value, error, allowed", BAD, ids=lambda part: None if isinstance(part, type) else str(part))
def test_a_bad_value_is_named_with_what_is_allowed(field, value, error, allowed):
    with pytest.raises(error) as caught:
        ModelConfig(**{**SMALL, field: value})
    message = str(caught.value)
    assert field in message and str(value) in message and allowed in message, message


@pytest.mark.parametrize("fields, fragments", [
    (dict(n_heads=8), ("head_dim=3", "even", "rope")),
    (dict(n_heads=24), ("head_dim=1", "even", "rope")),
    (dict(d_model=25, n_heads=5, position="sinusoidal"), ("d_model=25", "even", "sinusoidal")),
], ids=str)
def test_positions_that_come_in_pairs_need_even_widths(fields, fragments):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**{**SMALL, **fields})
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize("fields", [
    dict(n_heads=8, position="learned"), dict(n_heads=8, position="sinusoidal"), dict(n_heads=24, position="none"),
    dict(d_model=25, n_heads=5, position="none"), dict(d_model=25, n_heads=5, position="learned"),
    dict(vocab_size=1), dict(context_length=1), dict(n_heads=1, n_kv_heads=1), dict(d_ff=1),
    dict(norm_eps=1e-30), dict(norm_eps=1), dict(norm_eps=10.0), dict(rope_theta=1), dict(rope_theta=0.5), dict(dropout=0), dict(dropout=0.999),
], ids=str)
def test_unusual_but_valid_models_run(fields):
    config = ModelConfig(**{**SMALL, **fields})
    assert TransformerLM(config).eval()(torch.zeros(2, 1, dtype=torch.long)).isfinite().all()


# --- JSON -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ModelConfig.preset(name) for name in PRESETS] + [
    ModelConfig(50, n_kv_heads=2, d_ff=100, dropout=0.25, rope_theta=1e6, norm_eps=1e-12, backend="fused", tie_embeddings=False),
], ids=[*PRESETS, "all"])
def test_a_config_survives_json(config):
    stored = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert ModelConfig(**stored) == config
    assert list(stored) == [field.name for field in dataclasses.fields(ModelConfig)]


def test_changing_the_dict_does_not_change_the_config():
    config = ModelConfig(100)
    config.to_dict()["d_model"] = 1
    assert config.d_model == 256
