"""tinylm: a decoder-only transformer language model written by hand, taught in ordered notebooks."""

import importlib

__version__ = "0.1.0"

_HOME = {
    "ModelConfig": "tinylm.transformer",
    "TransformerLM": "tinylm.transformer",
    "KVCache": "tinylm.kv_cache",
    "generate": "tinylm.sampling",
    "load_checkpoint": "tinylm.training",
    "load_pretrained": "tinylm.pretrained",
}
__all__ = list(_HOME)


def __getattr__(name):
    # PEP 562: `import tinylm` stays instant, torch is loaded by the first name that needs it.
    if name not in _HOME:
        raise AttributeError(f"module 'tinylm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *_HOME])
