"""Every wrapper of kernels_src/ptx: against its meaning on both backends, and the emulated body against an H200.

tests/conformance/golden.npz holds what the PTX did on the card; ``python -m tests.conformance.generate`` writes it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conformance import cases, generate, rules

import cukern

GOLDEN, DEVICE = generate.load()
EXACT = [k for k in GOLDEN if not k.startswith(("exp2", "scalar"))]


@pytest.fixture(scope="module")
def emulated() -> dict[str, np.ndarray]:
    return cases.emulated()


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want) if want.dtype.kind == "f" else np.zeros(want.shape, bool)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])
    if nan.any():
        assert np.isnan(got[nan]).all()


# ---- what the card did


def test_the_file_holds_every_experiment(emulated: dict[str, np.ndarray]) -> None:
    assert "sm_" in DEVICE
    assert {k: v.shape for k, v in GOLDEN.items()} == {k: v.shape for k, v in emulated.items()}
    assert generate.GOLDEN.stat().st_size < 300_000


@pytest.mark.parametrize("name", EXACT)
def test_emulated_bits_are_those_of_the_card(emulated: dict[str, np.ndarray], name: str) -> None:
    same_bits(emulated[name], GOLDEN[name])


def test_exp2_is_within_two_ulp_of_the_card(emulated: dict[str, np.ndarray]) -> None:
    got, want = emulated["exp2_approx"], GOLDEN["exp2_approx"]
    distance = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))
    assert (distance[~np.isnan(want)] <= 2).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    x = cases.exp2_inputs()
    whole = np.floor(x) == x
    same_bits(got[whole], want[whole])  # powers of two are exact on both, and so are the limits


@pytest.mark.parametrize(("name", "ulp"), [("expf", 2), ("logf", 2), ("rsqrtf", 2), ("__expf", 2), ("reciprocal", 0)])
def test_functions_of_the_c_library_against_the_card(emulated: dict[str, np.ndarray], name: str, ulp: int) -> None:
    got, want = emulated[f"scalar/{name}"], GOLDEN[f"scalar/{name}"]
    distance = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))
    assert (distance[~np.isnan(want)] <= ulp).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_fast_logarithm_against_the_card(emulated: dict[str, np.ndarray]) -> None:
    """__logf has an absolute error bound near 1."""
    got, want = emulated["scalar/__logf"], GOLDEN["scalar/__logf"]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    np.testing.assert_allclose(got[finite], want[finite], rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_rule_explains_the_card_and_no_neighbour_does(dtype: str) -> None:
    kinds = [k for k in cases.mma_data(dtype) if k != "special"]
    found = rules.Rule(group=16, kept=25)
    assert sum(rules.mismatches(found, GOLDEN, dtype, kinds).values()) == 0
    others = [
        rules.Rule(8, 25),
        rules.Rule(16, 24),
        rules.Rule(16, 26),
        rules.Rule(16, 25, align="nearest"),
        rules.Rule(16, 25, final="nearest"),
        rules.Rule(16, 25, normalised=True),
    ]
    for rule in others:
        assert sum(rules.mismatches(rule, GOLDEN, dtype, kinds, tiles=4).values()) > 100, rule


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_emulators_shortcut_equals_the_rule(dtype: str) -> None:
    """The vector code of the emulator and its path for extreme exponents, on other data than the card saw."""
    low, high = (-14, 15) if dtype == "half" else (-126, 60)
    shape = (24, 16, 16), (24, 16, 8), (24, 16, 8)
    for seed in range(4):
        a = cases.floats(dtype, 9000 + seed, shape[0], low, high if seed % 2 else low + 20)
        b = cases.floats(dtype, 9100 + seed, shape[1], low // 2, high // 2)
        c = cases.floats32(9200 + seed, shape[2], -127 if seed < 2 else -20, 30 if seed % 2 else 0)
        a[::3, :, 5:] = 0  # few products, none at all, negative zeros
        a[::6] = np.uint16(0x8000)
        b[1::4] = 0
        c[2::5] = np.float32(-0.0)
        with np.errstate(over="ignore"):
            want = rules.accumulate(rules.Rule(16, 25), dtype, a, b, c)
        fa, fb, fc = cases.to_fragments(a, b, c)
        d = np.full_like(fc, np.nan)
        with cukern.emulate(check=False):
            cukern.Kernel(cases.SOURCE, "mma_tiles", template=(dtype,))((24,), (32,), (fa, fb, fc, d))
        same_bits(cases.from_fragments(d), want)


# ---- what the wrappers mean


def launch(backend: Any, name: str, grid: int, *args: Any) -> list[np.ndarray]:
    moved = [backend.put(a) if isinstance(a, np.ndarray) else a for a in args]
    cukern.Kernel(cases.SOURCE, name)((grid,), (256 if "values" in name else 32,), tuple(moved))
    return [backend.get(m) for m in moved if not isinstance(m, int)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_mma(backend: Any, dtype: str) -> None:
    """Small integers: every order of summation gives the same bits."""
    narrow = np.float16 if dtype == "half" else ml_dtypes.bfloat16
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(-8, 9, (3, *s)).astype(np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    fa, fb, fc = cases.to_fragments(a.astype(narrow).view(np.uint16), b.astype(narrow).view(np.uint16), c)
    out = launch(backend, f"mma_tiles<{dtype}>", 3, fa, fb, fc, np.full_like(fc, np.nan))
    np.testing.assert_array_equal(cases.from_fragments(out[-1]), a @ b + c)


@pytest.mark.parametrize("matrices", [4, 2])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(backend: Any, matrices: int, trans: bool) -> None:
    data, row = cases.rows(1, 64), cases.permutation(2, 64)[:32].copy()
    name = f"ldmatrix_rows<{matrices}, {str(trans).lower()}>"
    out = launch(backend, name, 1, data, row, np.zeros((matrices, 32), np.uint32))[-1]
    halves = data.view(np.uint16).reshape(64, 8)
    for m in range(matrices):
        block = halves[row[8 * m : 8 * m + 8]]
        block = block.T if trans else block
        np.testing.assert_array_equal(out[m].view(np.uint16).reshape(8, 8), block)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_at_a_distance(backend: Any, trans: bool) -> None:
    data, row = cases.rows(7, 64), cases.permutation(8, 48)[:32].copy()
    near, far = (
        launch(backend, f"{name}{str(trans).lower()}>", 1, data, rows, np.zeros((4, 32), np.uint32))[-1]
        for name, rows in (("ldmatrix_rows<4, ", row + 16), ("ldmatrix_distant_rows<", row))
    )
    np.testing.assert_array_equal(far, near)


def test_cp_async(backend: Any) -> None:
    data, to = cases.rows(3, 64), cases.permutation(4, 32)
    out = launch(backend, "cp_async_groups", 1, data, to, np.zeros((64, 4), np.uint32))[-1]
    first = np.empty((32, 4), np.uint32)
    first[to] = data[:32]
    second = data[32 + to]
    second[1::2] = 0  # not valid: zero bytes
    swapped = np.arange(32) ^ 1
    np.testing.assert_array_equal(out[:32], first[swapped])
    np.testing.assert_array_equal(out[32:], second[swapped])


def test_exp2_approx(backend: Any) -> None:
    x = cases.exp2_inputs()
    y = launch(backend, "exp2_values", -(-x.size // 256), x, np.zeros_like(x), x.size)[-1]
    with np.errstate(over="ignore"):
        exact = np.exp2(x.astype(np.float64))
    normal = np.isfinite(exact) & (exact >= 2.0**-126) & (exact < 2.0**128)
    assert (np.abs(y[normal] / exact[normal] - 1) <= 2.0**-22).all()
    assert (y[exact < 2.0**-127] == 0).all()
    assert np.isinf(y[exact >= 2.0**128]).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))


def test_load_streaming(backend: Any) -> None:
    data, row = cases.rows(5, 64), cases.permutation(6, 64)[:32].copy()
    out = launch(backend, "load_streaming_rows", 1, data, row, np.zeros((32, 4), np.uint32))[-1]
    np.testing.assert_array_equal(out, data[row])
