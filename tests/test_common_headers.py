"""The shared device code of kernels_src/common: conversions, reductions with a fixed order, the walk over rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import Kernel

HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CTYPES = {HALF: "half", BF16: "bf16"}
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16], ids=lambda d: d.name)


def floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Normal and random bit patterns, the halfway cases of both 16-bit types, and special values."""
    halfway = np.arange(65536, dtype=np.uint32)
    special = np.array([0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 6e-8, 2.9e-8, 3e-8, 1e-40, 3.4e38], np.float32)
    with np.errstate(all="ignore"):
        parts = [
            special,
            rng.standard_normal(count).astype(np.float32),
            rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32),
            (halfway << 16 | 0x8000).view(np.float32),  # between two bf16
            halfway.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(1 + 2**-11),
        ]
    x = np.concatenate(parts)
    x = x[~np.isnan(x)]
    return x[: len(x) // 2 * 2]


TYPES = """
#include "common/types.cuh"
template <class T> __global__ void widen(const T *x, float *y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = to_float(x[i]);
}
template <class T> __global__ void narrow(const float *x, T *y, u32 *packed, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  y[i] = from_float<T>(x[i]);
  y[i + 1] = from_float<T>(x[i + 1]);
  packed[i / 2] = pack2<T>(x[i], x[i + 1]);
}
template <class T, int N> __global__ void move(const T *x, T *y, int n) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i < n) store_vec<T, N>(y + i, load_vec<T, N>(x + i));
}
__global__ void constants(float *y, int *z) {
  y[0] = CUKERN_INF;
  y[1] = CUKERN_NAN;
  y[2] = CUKERN_LOG2E;
  y[3] = CUKERN_LN2;
  z[0] = ceil_div(9, 4);
  z[1] = ceil_div(8, 4);
}
"""


@DTYPES
def test_to_float(backend: Any, dtype: np.dtype) -> None:
    """All 65536 values, exactly."""
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    y = backend.put(np.zeros(65536, np.float32))
    Kernel(TYPES, "widen", template=(CTYPES[dtype],))(256, 256, (backend.put(x), y, 65536))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(backend.get(y), x.astype(np.float32))


@DTYPES
def test_from_float_rounds_to_nearest_even(backend: Any, rng: np.random.Generator, dtype: np.dtype) -> None:
    x = floats(rng, 4096)
    y, packed = backend.put(np.zeros(len(x), dtype)), backend.put(np.zeros(len(x) // 2, np.uint32))
    narrow = Kernel(TYPES, "narrow", template=(CTYPES[dtype],))
    narrow(-(-len(x) // 512), 256, (backend.put(x), y, packed, len(x)))
    with np.errstate(over="ignore"):
        want = x.astype(dtype).view(np.uint16)
    np.testing.assert_array_equal(backend.get(y).view(np.uint16), want)
    np.testing.assert_array_equal(backend.get(packed).view(np.uint16), want)  # the first in the low half


@pytest.mark.parametrize(("ctype", "n"), [("half", 8), ("bf16", 4), ("half", 2), ("float", 4), ("float", 1)])
def test_vectors(backend: Any, rng: np.random.Generator, ctype: str, n: int) -> None:
    dtype = {"half": HALF, "bf16": BF16, "float": np.dtype(np.float32)}[ctype]
    x = rng.standard_normal(64 * n).astype(dtype)
    y = backend.put(np.zeros_like(x))
    Kernel(TYPES, "move", template=(ctype, n))(2, 32, (backend.put(x), y, x.size))
    np.testing.assert_array_equal(backend.get(y), x)


def test_constants(backend: Any) -> None:
    y, z = backend.put(np.zeros(4, np.float32)), backend.put(np.zeros(2, np.int32))
    Kernel(TYPES, "constants")(1, 1, (y, z))
    y = backend.get(y)
    assert y[0] == np.inf
    assert np.isnan(y[1])
    np.testing.assert_array_equal(y[2:], np.array([np.log2(np.e), np.log(2)], np.float32))
    assert backend.get(z).tolist() == [3, 2]


REDUCE = """
#include "common/reduce.cuh"
template <class Op, int Width> __global__ void in_warp(const float *x, float *y) {
  y[threadIdx.x] = warp_reduce<Op, Width>(x[threadIdx.x]);
}
template <class Op, int Warps> __global__ void in_block(const float *x, float *y, float *z) {
  __shared__ float scratch[Warps];
  y[threadIdx.x] = block_reduce<Op, Warps>(x[threadIdx.x], scratch);
  z[threadIdx.x] = block_reduce<Op, Warps>(-x[threadIdx.x], scratch);  // the scratch is free again
}
"""


def butterfly(x: np.ndarray, width: int, op: Any) -> np.ndarray:
    lanes = np.arange(x.shape[-1])
    while width > 1:
        width //= 2
        x = op(x, x[..., lanes ^ width])
    return x


@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize(("name", "op"), [("Sum", np.add), ("Max", np.maximum)])
def test_warp_reduce(backend: Any, rng: np.random.Generator, name: str, op: Any, width: int) -> None:
    """Widest step first, bit for bit (values of very different sizes, so that every order has its own bits)."""
    x = (rng.standard_normal(32) * 10.0 ** rng.integers(-4, 5, 32)).astype(np.float32)
    y = backend.put(np.zeros(32, np.float32))
    Kernel(REDUCE, "in_warp", template=(name, width))(1, 32, (backend.put(x), y))
    np.testing.assert_array_equal(backend.get(y), butterfly(x, width, op))


@pytest.mark.parametrize("warps", [1, 3, 8])
@pytest.mark.parametrize(("name", "op"), [("Sum", np.add), ("Max", np.maximum)])
def test_block_reduce(backend: Any, rng: np.random.Generator, name: str, op: Any, warps: int) -> None:
    """A butterfly in each warp, then the warps ascending; every thread has the result."""
    x = (rng.standard_normal(32 * warps) * 10.0 ** rng.integers(-4, 5, 32 * warps)).astype(np.float32)
    y, z = (backend.put(np.zeros(x.size, np.float32)) for _ in "yz")
    Kernel(REDUCE, "in_block", template=(name, warps))(1, x.size, (backend.put(x), y, z))
    for result, values in ((y, x), (z, -x)):
        total = None
        for warp in butterfly(values.reshape(warps, 32), 32, op)[:, 0]:
            total = warp if total is None else op(total, warp)
        np.testing.assert_array_equal(backend.get(result), np.full(x.size, total))


ROWS = """
#include "common/rows.cuh"
__global__ void quotients(const i64 *a, const i64 *b, i64 *y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = divide(a[i], b[i]);
}
__global__ void walk(i64 start, u32 step, u32 width, i64 *rows, u32 *columns, int n) {
  RowWalk at(start, step, width);
  for (int i = 0; i < n; ++i, at.next()) {
    rows[i] = at.row;
    columns[i] = at.column;
  }
}
template <class T, int N> __global__ void copy(const T *x, const float *w, T *y) {
  const Vec<T, N> a = load_vec_once<T, N>(x + threadIdx.x * N);
  float b[N];
  load_floats(b, w + threadIdx.x * N);
  for (int i = 0; i < N; ++i) b[i] += to_float(a.v[i]);
  store_floats<T, N>(y + threadIdx.x * N, b);
}
"""


def test_divide(backend: Any) -> None:
    edge = [0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 5, 2**62, 2**63 - 1]
    a, b = (np.array(v, np.int64) for v in zip(*((p, q) for p in edge for q in edge[1:])))
    y = backend.put(np.zeros_like(a))
    Kernel(ROWS, "quotients")(1, 256, (backend.put(a), backend.put(b), y, a.size))
    np.testing.assert_array_equal(backend.get(y), a // b)


@pytest.mark.parametrize(
    ("start", "step", "width"),
    [(0, 256, 1), (5, 256, 384), (1000, 256, 7), (2**40 + 3, 256, 1000), (2**33, 4, 2**32 - 1), (3, 7, 7)],
)
def test_row_walk(backend: Any, start: int, step: int, width: int) -> None:
    rows, columns = backend.put(np.zeros(9, np.int64)), backend.put(np.zeros(9, np.uint32))
    Kernel(ROWS, "walk")(1, 1, (start, step, width, rows, columns, 9))
    at = [start + i * step for i in range(9)]
    assert backend.get(rows).tolist() == [i // width for i in at]
    assert backend.get(columns).tolist() == [i % width for i in at]


@pytest.mark.parametrize(("ctype", "n"), [("half", 8), ("half", 1), ("float", 4), ("float", 8), ("bf16", 4)])
def test_row_vectors(backend: Any, rng: np.random.Generator, ctype: str, n: int) -> None:
    dtype = {"half": HALF, "bf16": BF16, "float": np.dtype(np.float32)}[ctype]
    x, w = rng.standard_normal(32 * n).astype(dtype), rng.standard_normal(32 * n).astype(np.float32)
    y = backend.put(np.zeros_like(x))
    Kernel(ROWS, "copy", template=(ctype, n))(1, 32, (backend.put(x), backend.put(w), y))
    np.testing.assert_array_equal(backend.get(y), (x.astype(np.float32) + w).astype(dtype))
