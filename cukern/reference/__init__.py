"""NumPy oracles of the operators: same names and signatures as cukern.ops, written to be read."""

from __future__ import annotations

import importlib
from typing import Any

# operator -> module; a new operator adds a line here and in cukern/ops/__init__.py
_EXPORTS = {
    "embedding": "embedding",
    "rms_norm": "rms_norm",
    "rope": "rope",
    "qk_norm_rope_cache": "qk_norm_rope_cache",
    "kv_cache_write": "kv_cache_write",
    "swiglu": "swiglu",
    "softmax": "softmax",
    "log_softmax": "softmax",
    "token_logprobs": "softmax",
    "linear": "linear",
    "attention_prefill": "attention_prefill",
    "attention_decode": "attention_decode",
    "argmax": "sampling",
    "sample": "sampling",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"cukern.reference.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'cukern.reference' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
