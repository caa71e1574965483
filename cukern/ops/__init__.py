"""Operators on arrays: CuPy arrays run a CUDA kernel, NumPy arrays its reference (docs/operators.md)."""

from __future__ import annotations

import importlib
from typing import Any

# operator -> module; a new operator adds a line here, in cukern/reference/__init__.py and in docs/operators.md
_EXPORTS = {
    "embedding": "embedding",
    "rms_norm": "rms_norm",
    "rope": "rope",
    "rope_table": "rope",
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
    "top_logprobs": "sampling",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"cukern.ops.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'cukern.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
