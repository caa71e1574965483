"""Qwen3: configuration, weights and forward pass.

`Qwen3.from_pretrained` takes a folder as a model hub ships it, or a hub name, and gives a callable model.
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> module that holds it, imported on first use
_EXPORTS = {
    "CheckpointError": "loader",
    "ConfigError": "config",
    "ForwardBatch": "batch",
    "HubError": "hub",
    "PagedKVCache": "kv_cache",
    "Qwen3": "qwen3",
    "Qwen3Config": "config",
    "Weights": "weights",
    "demo_checkpoint": "hub",
    "load_weights": "loader",
    "resolve_checkpoint": "hub",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"cukern.models.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'cukern.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
