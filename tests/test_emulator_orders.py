"""Every operator gives the same bits whichever thread, warp and block goes first, with any number of workers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from operator_runs import CASES, Case

import cukern


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_same_bits_in_every_order(case: Case, dtype: Any) -> None:
    run = case.build(dtype)
    ways: list[dict[str, Any]] = [
        {"order": "up", "workers": 1},
        {"order": "down", "workers": 2},
        {"order": "random", "seed": 1, "workers": 3},
    ]
    results = []
    for options in ways:
        with cukern.emulate(check=True, **options):
            results.append([np.asarray(a).tobytes() for a in run(np.array)])
    for options, other in zip(ways[1:], results[1:]):
        assert other == results[0], options
