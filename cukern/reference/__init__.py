"""NumPy oracles of the operators: same names and signatures as cukern.ops, written to be read."""

from __future__ import annotations

import importlib
from typing import Any

# Imported eagerly: an operator has the name of its module, and importing a submodule later would rebind the name.
# A new operator adds a line here and in cukern/ops/__init__.py.
from cukern.reference.embedding import embedding
from cukern.reference.kv_cache_write import kv_cache_write
from cukern.reference.qk_norm_rope_cache import qk_norm_rope_cache
from cukern.reference.rms_norm import rms_norm
from cukern.reference.rope import rope
from cukern.reference.swiglu import swiglu

# operators that move to the imports above as their modules land
_PENDING = {
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

__all__ = ["embedding", "kv_cache_write", "qk_norm_rope_cache", "rms_norm", "rope", "swiglu"]


def __getattr__(name: str) -> Any:
    if name in _PENDING:
        return getattr(importlib.import_module(f"cukern.reference.{_PENDING[name]}"), name)
    raise AttributeError(f"module 'cukern.reference' has no attribute {name!r}")
