"""Inputs that only a planted fault has shown to be missing from the operators' own tests (docs/mutation.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern import ops


def test_row_of_more_parts_than_a_warp_has_lanes(backend: Any) -> None:
    """The last reduction over the parts of a row goes round more than once: over 32 * 8192 columns."""
    columns = 300_000
    x = np.zeros((2, columns), np.float16)
    x[0, 290_001] = x[1, 8192 * 34 + 5] = 9
    np.testing.assert_array_equal(backend.get(ops.argmax(backend.put(x))), [290_001, 8192 * 34 + 5])
    drawn = backend.get(ops.sample(backend.put(x), temperature=0.2, seed=1))  # e^45 against 300,000 others
    np.testing.assert_array_equal(drawn, [290_001, 8192 * 34 + 5])
