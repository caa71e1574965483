"""cukern: CUDA kernels kept as source text, compiled at first use, and a Qwen3 that needs no PyTorch.

Everything is imported on first use, so ``import cukern`` is fast and needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that holds it
_EXPORTS = {
    "Kernel": "cukern.jit",
    "CompileError": "cukern.jit",
    "LLM": "cukern.engine",
    "SamplingParams": "cukern.engine",
    "Qwen3": "cukern.models",
    "Qwen3Config": "cukern.models",
    "emulate": "cukern.emulator",
}
_MODULES = ("bench", "emulator", "engine", "jit", "models", "ops", "reference", "testing")

__all__ = ["__version__", *_EXPORTS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"cukern.{name}")
    raise AttributeError(f"module 'cukern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
