"""Operators on arrays: CuPy arrays run a CUDA kernel, NumPy arrays its reference (docs/operators.md)."""

from __future__ import annotations

# Eager: an operator has the name of its module, and importing a submodule later would rebind the name to the module.
# A new operator adds a line here, in cukern/reference/__init__.py and in docs/operators.md.
from cukern.ops.advance import advance
from cukern.ops.attention_decode import attention_decode
from cukern.ops.attention_prefill import attention_prefill
from cukern.ops.embedding import embedding
from cukern.ops.kv_cache_write import kv_cache_write
from cukern.ops.linear import linear
from cukern.ops.penalties import apply_penalties
from cukern.ops.qk_norm_rope_cache import qk_norm_rope_cache
from cukern.ops.rms_norm import rms_norm
from cukern.ops.rope import rope, rope_table
from cukern.ops.sampling import argmax, sample, top_logprobs
from cukern.ops.softmax import log_softmax, softmax, token_logprobs
from cukern.ops.swiglu import swiglu

__all__ = [
    "advance",
    "apply_penalties",
    "argmax",
    "attention_decode",
    "attention_prefill",
    "embedding",
    "kv_cache_write",
    "linear",
    "log_softmax",
    "qk_norm_rope_cache",
    "rms_norm",
    "rope",
    "rope_table",
    "sample",
    "softmax",
    "swiglu",
    "token_logprobs",
    "top_logprobs",
]
