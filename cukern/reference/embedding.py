"""Oracle of the embedding look-up."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.reference._common import finish

__all__ = ["embedding"]


def embedding(ids: np.ndarray, weight: np.ndarray, *, dtype: Any = None, out: np.ndarray | None = None) -> np.ndarray:
    """Row ``ids[i]`` of ``weight`` for each id; IndexError for an id outside [0, V). See cukern.ops.embedding."""
    ids = np.asarray(ids)
    rows = weight.shape[0]
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise IndexError(f"embedding: ids contains {bad}, expected 0 to {rows - 1} (weight has {rows} rows)")
    return finish(weight[ids], dtype or weight.dtype, out)
