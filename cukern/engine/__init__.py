"""Text generation: sampling parameters, tokenizer and chat template, KV blocks, scheduler, and `LLM` on top."""

from __future__ import annotations

import importlib
from typing import Any

# public name -> module that holds it, imported on first use
_EXPORTS = {
    "ChatTemplate": "chat",
    "Completion": "sequence",
    "LLM": "llm",
    "SamplingParams": "params",
    "Score": "score",
    "Stream": "llm",
    "Tokenizer": "tokenizer",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"cukern.engine.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'cukern.engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
