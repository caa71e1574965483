"""Every operator on a GPU and emulated, from the same inputs: equal bits where no instruction is approximate.

Needs a GPU and a C++ compiler. tests/test_ptx.py compares the instructions themselves, on recorded results.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from operator_runs import CASES, Case

import cukern
from cukern.testing import TOLERANCES, to_float64

pytestmark = pytest.mark.gpu


def both(case: Case, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (GPU, emulated) of a case's results."""
    import cupy

    run = case.build(dtype)
    device = [cupy.asnumpy(a) for a in run(cupy.asarray)]
    with cukern.emulate(check=False):
        emulated = [np.asarray(a) for a in run(np.array)]
    return list(zip(device, emulated))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in CASES if c.exact], ids=lambda c: c.name)
def test_same_bits(case: Case, dtype: Any) -> None:
    """Products too: the emulator adds inside an mma step as the card does."""
    for device, emulated in both(case, dtype):
        assert device.dtype == emulated.dtype
        width = f"u{device.dtype.itemsize}"
        nan = np.isnan(device.astype(np.float32)) & np.isnan(emulated.astype(np.float32))
        different = (device.view(width) != emulated.view(width)) & ~nan
        assert not different.any(), f"{different.sum()} of {different.size} elements differ"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in CASES if c.operator], ids=lambda c: c.name)
def test_close(case: Case, dtype: Any) -> None:
    """Within the operator's tolerance and one unit in the last place of the results' dtype."""
    for device, emulated in both(case, dtype):
        a, b = to_float64(device), to_float64(emulated)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        finite = np.isfinite(a)
        ulp = float(ml_dtypes.finfo(device.dtype).eps)
        assert (np.abs(a - b)[finite] <= TOLERANCES[case.operator] + ulp * np.abs(a)[finite]).all()
