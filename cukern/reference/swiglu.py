"""Oracle of SwiGLU."""

from __future__ import annotations

import numpy as np

from cukern.reference._common import finish, widen

__all__ = ["swiglu"]


def swiglu(gate_up: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """``silu(gate) * up`` with gate and up the first and second half of the last axis. See cukern.ops.swiglu."""
    h = widen(gate_up)
    half = h.shape[-1] // 2
    gate, up = h[..., :half], h[..., half:]
    with np.errstate(over="ignore", invalid="ignore"):  # exp(-gate) may be inf: silu is then 0, as it should be
        return finish(gate / (1 + np.exp(-gate)) * up, gate_up.dtype, out)
