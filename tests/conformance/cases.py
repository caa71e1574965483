"""The experiments: one-warp kernels around each PTX wrapper, and their inputs.

Inputs are built from raw generator bits, whose stream NumPy guarantees, so that only results need to be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
# run(name expression, grid, arguments) launches on a GPU or emulated; arguments are host arrays, written in place
Run = Callable[[str, int, tuple[Any, ...]], None]

DTYPES = {"half": (5, 10, 15), "bf16": (8, 7, 127)}  # exponent bits, fraction bits, bias
TILES = 20  # of 16 x 8 results for each kind of data

SOURCE = r"""
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

// registers in, registers out: [tile][register][lane]
template <class T>
__global__ void __launch_bounds__(32) mma_tiles(const u32 *a, const u32 *b, const float *c, float *d) {
  const int lane = threadIdx.x, tile = blockIdx.x;
  u32 fa[4], fb[2];
  float acc[4];
  for (int r = 0; r < 4; ++r) fa[r] = a[(tile * 4 + r) * 32 + lane], acc[r] = c[(tile * 4 + r) * 32 + lane];
  for (int r = 0; r < 2; ++r) fb[r] = b[(tile * 2 + r) * 32 + lane];
  mma_m16n8k16<T>(acc, fa, fb[0], fb[1]);
  for (int r = 0; r < 4; ++r) d[(tile * 4 + r) * 32 + lane] = acc[r];
}

// row[lane]: which 16-byte row of `data` (64 of them) the lane names
template <int Matrices, bool Trans>
__global__ void __launch_bounds__(32) ldmatrix_rows(const uint4 *data, const int *row, u32 *out) {
  __shared__ uint4 rows[64];
  const int lane = threadIdx.x;
  rows[lane] = data[lane], rows[lane + 32] = data[lane + 32];
  __syncthreads();
  u32 r[Matrices];
  const void *p = rows + row[lane];
  if constexpr (Matrices == 4) {
    if constexpr (Trans) ldmatrix_x4_trans(r, p);
    else ldmatrix_x4(r, p);
  } else {
    if constexpr (Trans) ldmatrix_x2_trans(r, p);
    else ldmatrix_x2(r, p);
  }
  for (int m = 0; m < Matrices; ++m) out[m * 32 + lane] = r[m];
}

// the same, each row 16 rows (256 bytes) behind the one that the lane names
template <bool Trans>
__global__ void __launch_bounds__(32) ldmatrix_distant_rows(const uint4 *data, const int *row, u32 *out) {
  __shared__ uint4 rows[64];
  const int lane = threadIdx.x;
  rows[lane] = data[lane], rows[lane + 32] = data[lane + 32];
  __syncthreads();
  u32 r[4];
  ldmatrix_x4_at<Trans>(r, shared_place(rows + row[lane]), 256);
  for (int m = 0; m < 4; ++m) out[m * 32 + lane] = r[m];
}

// two groups in flight; the first is read while the second is pending; odd lanes of the second are not valid
extern "C" __global__ void __launch_bounds__(32) cp_async_groups(const uint4 *data, const int *to, uint4 *out) {
  __shared__ uint4 first[32], second[32];
  const int lane = threadIdx.x;
  cp_async_16(first + to[lane], data + lane);
  cp_async_commit();
  cp_async_16(second + lane, data + 32 + to[lane], lane % 2 == 0);
  cp_async_commit();
  cp_async_wait<1>();
  __syncwarp();
  out[lane] = first[lane ^ 1];
  cp_async_wait<0>();
  __syncwarp();
  out[32 + lane] = second[lane ^ 1];
}

extern "C" __global__ void __launch_bounds__(256) exp2_values(const float *x, float *y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = exp2_approx(x[i]);
}

extern "C" __global__ void __launch_bounds__(32) load_streaming_rows(const uint4 *data, const int *row, uint4 *out) {
  out[threadIdx.x] = load_streaming(data + row[threadIdx.x]);
}

// not PTX, but what the emulator replaces by the C library; `which` is an index into SCALARS below
extern "C" __global__ void __launch_bounds__(256) scalar_values(const float *x, float *y, int n, int which) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  switch (which) {
    case 0: y[i] = expf(v); break;
    case 1: y[i] = logf(v); break;
    case 2: y[i] = rsqrtf(v); break;
    case 3: y[i] = __expf(v); break;
    case 4: y[i] = __logf(v); break;
    default: y[i] = 1.f / v;
  }
}
"""


def bits(seed: int, n: int) -> Array:
    """`n` uniform 64-bit words."""
    return np.random.PCG64(seed).random_raw(n).astype(np.uint64)


def floats(dtype: str, seed: int, shape: tuple[int, ...], low: int, high: int) -> Array:
    """Bit patterns (uint16) of `dtype` with random sign and fraction and an exponent in low..high."""
    width, fraction, bias = DTYPES[dtype]
    w = bits(seed, int(np.prod(shape)))
    sign = (w & 1) << np.uint64(15)
    mantissa = (w >> np.uint64(8)) & np.uint64((1 << fraction) - 1)
    exponent = (w >> np.uint64(32)) % np.uint64(high - low + 1) + np.uint64(low + bias)
    if low + bias < 1 or high + bias >= (1 << width) - 1:
        raise ValueError(f"{dtype} has no normal numbers with all exponents {low}..{high}")
    return (sign | exponent << np.uint64(fraction) | mantissa).astype(np.uint16).reshape(shape)


def floats32(seed: int, shape: tuple[int, ...], low: int, high: int) -> Array:
    """float32 values with random sign and fraction and an exponent in low..high (-127: subnormal)."""
    w = bits(seed, int(np.prod(shape)))
    exponent = (w >> np.uint64(32)) % np.uint64(high - low + 1) + np.uint64(low + 127)
    sign, fraction = (w & np.uint64(1)) << np.uint64(31), (w >> np.uint64(8)) & np.uint64((1 << 23) - 1)
    pattern = sign | exponent << np.uint64(23) | fraction
    return pattern.astype(np.uint32).view(np.float32).reshape(shape)


def exact(dtype: str, pattern: Array) -> Array:
    """The value of bit patterns, as float64."""
    if dtype == "half":
        return pattern.view(np.float16).astype(np.float64)
    return (pattern.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def mma_data(dtype: str) -> dict[str, tuple[Array, Array, Array]]:
    """Kinds of data: A [tiles, 16, 16] and B [tiles, 16, 8] as bit patterns, C [tiles, 16, 8] float32."""
    a_shape, b_shape, c_shape = (TILES, 16, 16), (TILES, 16, 8), (TILES, 16, 8)
    base = 1000 if dtype == "half" else 2000
    wide = 12 if dtype == "half" else 40
    tiny = -14 if dtype == "half" else -64
    zero = np.zeros(c_shape, np.float32)

    def pair(k: int, low: int, high: int) -> tuple[Array, Array]:
        return floats(dtype, base + k, a_shape, low, high), floats(dtype, base + k + 1, b_shape, low, high)

    out = {
        "normal": (*pair(0, -2, 1), zero),
        "accumulate": (*pair(10, -2, 1), floats32(base + 12, c_shape, -3, 4)),
        "wide": (*pair(20, -wide, 2), floats32(base + 22, c_shape, -2 * wide, 4)),
        "medium": (*pair(30, -7, 0), floats32(base + 32, c_shape, -26, 2)),
        "large_c": (*pair(40, -6, 0), floats32(base + 42, c_shape, 8, 16)),
        "small_c": (*pair(50, -2, 1), floats32(base + 52, c_shape, -34, -20)),
        "tiny": (*pair(60, tiny, tiny + 3), floats32(base + 62, c_shape, max(2 * tiny - 8, -127), 2 * tiny + 8)),
    }
    # neighbours in k cancel but for the last bit, and C cancels what is left
    a, b = pair(70, -3, 2)
    a[:, :, 1::2] = a[:, :, 0::2] ^ np.uint16(0x8000)
    b[:, 1::2] = b[:, 0::2] ^ (bits(base + 72, TILES * 64).reshape(TILES, 8, 8) & np.uint64(1)).astype(np.uint16)
    left = np.einsum("tik,tkj->tij", exact(dtype, a), exact(dtype, b))
    out["cancel"] = (a, b, (-left * (1 + 2.0**-20)).astype(np.float32))
    # products cancel at a distance of 4 and of 8 in k: shows which of them are summed in one step
    for kind, step, k in (("cancel_4", 4, 110), ("cancel_8", 8, 120)):
        a, b = pair(k, -4, 4)
        low = np.arange(16) & step == 0
        a[:, :, ~low] = a[:, :, low] ^ np.uint16(0x8000)
        b[:, ~low] = b[:, low] ^ (bits(base + k + 2, TILES * 64).reshape(TILES, 8, 8) & np.uint64(3)).astype(np.uint16)
        out[kind] = (a, b, floats32(base + k + 3, c_shape, -24, 0))
    # one product of 1, the rest near the end of what an aligned sum can hold
    a = floats(dtype, base + 80, a_shape, -14 if dtype == "half" else -16, -10)
    b = floats(dtype, base + 81, b_shape, -13, -9)
    one = np.uint16(0x3C00 if dtype == "half" else 0x3F80)
    where = (bits(base + 82, TILES * 16) % np.uint64(16)).astype(np.intp).reshape(TILES, 16)
    for t in range(TILES):
        for i in range(16):
            a[t, i, where[t, i]] = one
        b[t, where[t], :] = one
    out["aligned"] = (a, b, floats32(base + 83, c_shape, -27, -20))
    # subnormal inputs
    a, b = pair(90, -2, 1)
    fraction = np.uint16((1 << DTYPES[dtype][1]) - 1 | 0x8000)
    a &= fraction
    out["subnormal"] = (a, b, (floats32(base + 92, c_shape, -30, -10) if dtype == "half" else zero).copy())
    # infinities, NaN, overflow
    a, b = pair(100, 8, 14) if dtype == "half" else pair(100, 50, 62)
    inf = np.uint16(0x7C00 if dtype == "half" else 0x7F80)
    a[0, 0, 3], a[0, 1, 5], a[0, 2, 2], a[0, 2, 9] = inf, inf | np.uint16(0x8000), inf, inf | np.uint16(0x8000)
    b[0, 7, 3], b[1, 0, 0], b[2, 1, 1] = inf, inf + np.uint16(1), np.uint16(0)
    a[2, 3, 1] = inf
    c = floats32(base + 102, c_shape, 120, 127)
    c[3, 0, 0], c[3, 1, 1], c[3, 2, 2] = np.inf, -np.inf, np.nan
    out["special"] = (a[:6], b[:6], c[:6])
    return out


def to_fragments(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
    """Matrices as the registers of 32 lanes: [tile, register, lane] (PTX ISA, fragments of mma.m16n8k16)."""
    lane = np.arange(32)
    g, t = lane >> 2, lane & 3
    fa = np.empty((len(a), 4, 32), np.uint32)
    fb = np.empty((len(a), 2, 32), np.uint32)
    fc = np.empty((len(a), 4, 32), np.float32)
    for r in range(4):
        row, k = g + 8 * (r & 1), 2 * t + 8 * (r >> 1)
        fa[:, r] = a[:, row, k] | a[:, row, k + 1].astype(np.uint32) << np.uint32(16)
        fc[:, r] = c[:, g + 8 * (r >> 1), 2 * t + (r & 1)]
    for r in range(2):
        k = 2 * t + 8 * r
        fb[:, r] = b[:, k, g] | b[:, k + 1, g].astype(np.uint32) << np.uint32(16)
    return fa, fb, fc


def from_fragments(d: Array) -> Array:
    """The accumulator registers of 32 lanes back to [tile, 16, 8]."""
    lane = np.arange(32)
    g, t = lane >> 2, lane & 3
    out = np.empty((len(d), 16, 8), np.float32)
    for r in range(4):
        out[:, g + 8 * (r >> 1), 2 * t + (r & 1)] = d[:, r]
    return out


def permutation(seed: int, n: int) -> Array:
    return np.argsort(bits(seed, n), kind="stable").astype(np.int32)


def rows(seed: int, n: int) -> Array:
    """`n` rows of 16 bytes as [n, 4] uint32."""
    return (bits(seed, 4 * n) >> np.uint64(7)).astype(np.uint32).reshape(n, 4)


def exp2_inputs() -> Array:
    ramp = np.arange(2000, dtype=np.float32) / 2000 - 1  # one binade, where the rounding of the instruction shows
    edges = [0, -0.0, 1, -1, 10, -126, -126.5, -127, -140, -149, -150, 127, 127.99, 128, np.inf, -np.inf, np.nan, 1e-30]
    return np.concatenate([ramp, np.array(edges, np.float32), floats32(3000, (1500,), -20, 6)])


SCALARS = ("expf", "logf", "rsqrtf", "__expf", "__logf", "reciprocal")


def scalar_inputs(which: str) -> Array:
    x = floats32(3100 + SCALARS.index(which), (700,), -12, 5)
    special = np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, 1e-38, 1e-42, 3e38], np.float32)
    return np.concatenate([np.abs(x) if which in ("logf", "rsqrtf", "__logf") else x, special])


def results(run: Run) -> dict[str, Array]:
    """Every experiment's result, by name."""
    out: dict[str, Array] = {}
    for dtype in DTYPES:
        for kind, (a, b, c) in mma_data(dtype).items():
            fa, fb, fc = to_fragments(a, b, c)
            d = np.full_like(fc, np.nan)
            run(f"mma_tiles<{dtype}>", len(a), (fa, fb, fc, d))
            out[f"mma/{dtype}/{kind}"] = from_fragments(d)
    for matrices in (4, 2):
        for trans in (False, True):
            r = np.zeros((matrices, 32), np.uint32)
            row = permutation(3200 + matrices, 64)[:32].copy()
            run(f"ldmatrix_rows<{matrices}, {str(trans).lower()}>", 1, (rows(3210, 64), row, r))
            out[f"ldmatrix/x{matrices}{'_trans' if trans else ''}"] = r
    r = np.zeros((64, 4), np.uint32)
    run("cp_async_groups", 1, (rows(3220, 64), permutation(3221, 32), r))
    out["cp_async"] = r
    r = np.zeros((32, 4), np.uint32)
    run("load_streaming_rows", 1, (rows(3230, 64), permutation(3231, 64)[:32].copy(), r))
    out["load_streaming"] = r
    x = exp2_inputs()
    y = np.full_like(x, 7)
    run("exp2_values", -(-x.size // 256), (x, y, x.size))
    out["exp2_approx"] = y
    for k, name in enumerate(SCALARS):
        x = scalar_inputs(name)
        y = np.full_like(x, 7)
        run("scalar_values", -(-x.size // 256), (x, y, x.size, k))
        out[f"scalar/{name}"] = y
    return out


def emulated() -> dict[str, Array]:
    """All results from the emulator, in check mode."""
    import cukern

    def run(name: str, grid: int, args: tuple[Any, ...]) -> None:
        cukern.Kernel(SOURCE, name)((grid,), (256 if "values" in name else 32,), args)

    with cukern.emulate(check=True):
        return results(run)
