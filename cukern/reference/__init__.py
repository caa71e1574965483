"""NumPy oracles of the operators: same names and signatures as cukern.ops, written to be read."""

from __future__ import annotations

# Eager: an operator has the name of its module, and importing a submodule later would rebind the name to the module.
# A new operator adds a line here and in cukern/ops/__init__.py.
from cukern.reference.advance import advance
from cukern.reference.attention_decode import attention_decode
from cukern.reference.attention_prefill import attention_prefill
from cukern.reference.embedding import embedding
from cukern.reference.kv_cache_write import kv_cache_write
from cukern.reference.linear import linear
from cukern.reference.penalties import apply_penalties
from cukern.reference.qk_norm_rope_cache import qk_norm_rope_cache
from cukern.reference.rms_norm import rms_norm
from cukern.reference.rope import rope
from cukern.reference.sampling import argmax, sample, top_logprobs
from cukern.reference.softmax import log_softmax, softmax, token_logprobs
from cukern.reference.swiglu import swiglu

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
    "sample",
    "softmax",
    "swiglu",
    "token_logprobs",
    "top_logprobs",
]
