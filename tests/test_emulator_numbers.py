"""Half, bfloat16 and intrinsics of the emulator against NumPy and ml_dtypes, exhaustively where that is possible."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import emulator as E

ALL = np.arange(1 << 16, dtype=np.uint16)
TYPES = {"half": np.dtype(np.float16), "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16)}
STEM = {"half": "half", "__nv_bfloat16": "bfloat16"}
both = pytest.mark.parametrize("ctype", TYPES)

HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"


def run(source: str, name: str, *args: Any, grid: int = 256, block: int = 256) -> None:
    with cukern.emulate(check=False, workers=1):
        E.runtime_kernel(HEADERS + source, name, filename="numbers.cu")((grid,), (block,), args)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits; any NaN equals any NaN."""
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}")[~nan], want.view(f"u{want.itemsize}")[~nan])


@both
def test_every_value_to_float_and_back(ctype: str) -> None:
    stem, dtype = STEM[ctype], TYPES[ctype]
    source = f"""
extern "C" __global__ void k(const {ctype} *x, float *f, {ctype} *back, {ctype} *bits) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  f[i] = __{stem}2float(x[i]);
  back[i] = __float2{stem}_rn(f[i]);
  bits[i] = __ushort_as_{stem}(__{stem}_as_ushort(x[i]));
}}"""
    x = ALL.view(dtype)
    f, back, copied = np.empty(1 << 16, np.float32), np.empty_like(x), np.empty_like(x)
    run(source, "k", x, f, back, copied)
    same(f, x.astype(np.float32))
    same(back, x)
    np.testing.assert_array_equal(copied.view(np.uint16), ALL)


def test_bits_of_nan() -> None:
    """A NaN keeps its payload to float and becomes 0x7fff from float, as on a GPU."""
    source = """
extern "C" __global__ void k(float f, unsigned short *out) {
  out[0] = __half_as_ushort(__float2half_rn(f));
  out[1] = __bfloat16_as_ushort(__float2bfloat16_rn(f));
}"""
    out = np.zeros(2, np.uint16)
    run(source, "k", np.float32(-np.nan), out, grid=1, block=1)
    assert out.tolist() == [0x7FFF, 0x7FFF]


@both
def test_rounding_of_floats(ctype: str) -> None:
    """Every value, both neighbours of every midpoint, midpoints, and random patterns: to nearest, ties to even."""
    stem, dtype = STEM[ctype], TYPES[ctype]
    finite = np.sort(ALL.view(dtype).astype(np.float32)[np.isfinite(ALL.view(dtype).astype(np.float32))])
    middle = (finite[:-1] + (finite[1:] - finite[:-1]) / 2).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    below, above = np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))
    x = np.concatenate([middle, below, above, random])
    x = np.concatenate([x, np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e-8, 3.4e38])])
    x = np.resize(x, -(-x.size // 256) * 256).astype(np.float32)
    source = f"""
extern "C" __global__ void k(const float *x, {ctype} *y, unsigned *pairs) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __float2{stem}(x[i]);
  auto p = __floats2{stem}2_rn(x[i], -x[i]);
  pairs[i] = *reinterpret_cast<unsigned *>(&p);
}}"""
    y, pairs = np.empty(x.size, dtype), np.empty(x.size, np.uint32)
    run(source, "k", x, y, pairs, grid=x.size // 256)
    with np.errstate(all="ignore"):
        same(y, x.astype(dtype))
        low, high = pairs.astype(np.uint16).view(dtype), (pairs >> np.uint32(16)).astype(np.uint16).view(dtype)
        same(low, x.astype(dtype))
        same(high, (-x).astype(dtype))


@both
def test_rounding_of_doubles_is_one_rounding(ctype: str) -> None:
    """A double just above the midpoint of two narrow values, closer to it than a float can tell."""
    dtype = TYPES[ctype]
    one = np.array(1, dtype)
    step = float(np.array(one.view(np.uint16) + np.uint16(1), np.uint16).view(dtype).astype(np.float64)) - 1
    x = np.float64([1 + step / 2 + 2.0**-40, 1 + step / 2 - 2.0**-40, 1 + step / 2, -1 - step / 2 - 2.0**-40])
    y = np.empty(4, dtype)
    body = f"y[threadIdx.x] = {ctype}(x[threadIdx.x]);"
    source = f'extern "C" __global__ void k(const double *x, {ctype} *y) {{ {body} }}'
    run(source, "k", x, y, grid=1, block=4)
    np.testing.assert_array_equal(y.astype(np.float64), [1 + step, 1, 1, -1 - step])


@both
def test_arithmetic(ctype: str) -> None:
    """Each operation on pairs that cover every value: one rounding of the exact result."""
    stem, dtype = STEM[ctype], TYPES[ctype]
    source = f"""
extern "C" __global__ void k(const {ctype} *x, const {ctype} *y, {ctype} *sum, {ctype} *difference, {ctype} *product,
                             {ctype} *quotient, {ctype} *fused, {ctype} *largest, int *less) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  sum[i] = __hadd(x[i], y[i]);
  difference[i] = x[i] - y[i];
  product[i] = __hmul(x[i], y[i]);
  quotient[i] = x[i] / y[i];
  fused[i] = __hfma(x[i], y[i], x[i]);
  largest[i] = __hmax(x[i], y[i]);
  less[i] = __hlt(x[i], y[i]) + 2 * __heq(x[i], y[i]) + 4 * __hne(x[i], y[i]) + 8 * __hisnan(x[i]);
}}
// {stem}"""
    x, y = ALL.view(dtype), ((ALL.astype(np.uint32) * 40503) & 65535).astype(np.uint16).view(dtype)
    out = [np.empty_like(x) for _ in range(6)]
    less = np.empty(1 << 16, np.int32)
    run(source, "k", x, y, *out, less)
    with np.errstate(all="ignore"):
        a, b = x.astype(np.float64), y.astype(np.float64)
        for got, exact in zip(out[:4], (a + b, a - b, a * b, a / b)):
            # float64 holds sums and products exactly or far beyond; a quotient's tie is never this close
            same(got, _round(exact, dtype))
        same(out[5], np.fmax(x.astype(np.float32), y.astype(np.float32)).astype(dtype))
        want = (a < b) + 2 * (a == b) + 4 * ((a < b) | (a > b)) + 8 * np.isnan(a)
    np.testing.assert_array_equal(less, want)
    with np.errstate(all="ignore"):
        same(out[4], _round(a * b + a, dtype))


def _round(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 to a narrow type in one rounding (ml_dtypes goes through float32)."""
    if dtype == np.float16:
        return exact.astype(dtype)
    f = exact.astype(np.float32)
    odd = f.view(np.uint32).copy()
    inexact = np.isfinite(f) & (f.astype(np.float64) != exact)
    away = inexact & (np.abs(f.astype(np.float64)) > np.abs(exact))
    odd[away] -= np.uint32(1)
    odd[inexact] |= np.uint32(1)
    return odd.view(np.float32).astype(dtype)


def test_larger_and_smaller() -> None:
    """fmaxf and fminf prefer a number to a NaN and order the zeros, as PTX does."""
    nan, quiet = np.uint32([0x7F800001, 0x7FC00000]).view(np.float32)
    pairs = np.float32([(nan, 1), (1, nan), (quiet, -2), (-2, quiet), (0.0, -0.0), (-0.0, 0.0), (3, 2), (-np.inf, 5)])
    out = np.empty((len(pairs), 2), np.float32)
    source = """
extern "C" __global__ void k(const float2 *x, float2 *y) {
  y[threadIdx.x] = make_float2(fmaxf(x[threadIdx.x].x, x[threadIdx.x].y), fminf(x[threadIdx.x].x, x[threadIdx.x].y));
}"""
    run(source, "k", pairs.view(np.uint8), out.view(np.uint8), grid=1, block=len(pairs))
    want = np.float32([(1, 1), (1, 1), (-2, -2), (-2, -2), (0.0, -0.0), (0.0, -0.0), (3, 2), (5, -np.inf)])
    np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))


def test_integers_become_halves_in_one_rounding() -> None:
    x = np.int32([0, 1, -1, 2049, 2051, 65503, 65519, 65520, -70000, 16777217])
    y = np.empty(x.size, np.float16)
    body = "y[threadIdx.x] = __int2half_rn(x[threadIdx.x]);"
    run(f'extern "C" __global__ void k(const int *x, half *y) {{ {body} }}', "k", x, y, grid=1, block=x.size)
    with np.errstate(over="ignore"):
        same(y, x.astype(np.float64).astype(np.float16))


INTEGERS = """
typedef unsigned long long u64;
extern "C" __global__ void k(const u64 *x, u64 *out) {
  const u64 v = x[threadIdx.x];
  const unsigned a = (unsigned)v, b = (unsigned)(v >> 32);
  u64 *o = out + threadIdx.x * 16;
  o[0] = __popc(a);
  o[1] = __clz((int)a);
  o[2] = __brev(a);
  o[3] = __ffs((int)a);
  o[4] = __umulhi(a, b);
  o[5] = (unsigned)__mulhi((int)a, (int)b);
  o[6] = __umul64hi(v, v ^ 0x123456789abcdefull);
  o[7] = (u64)__mul64hi((long long)v, (long long)(v ^ 0x123456789abcdefull));
  o[8] = __clzll((long long)v);
  o[9] = __popcll(v);
  o[10] = __byte_perm(a, b, 0x5240);
  o[11] = __funnelshift_l(a, b, 7);
  o[12] = __funnelshift_r(a, b, 39);
  o[13] = __brevll(v);
  o[14] = (unsigned)min((int)a, (int)b);
  o[15] = max(a, b);
}"""


def test_integer_intrinsics() -> None:
    x = np.random.default_rng(1).integers(0, 1 << 63, 250, np.uint64) * np.uint64(2)
    x = np.concatenate([x, np.uint64([0, 1, 1 << 63, (1 << 64) - 1, 1 << 32, 0x80000000])])
    out = np.zeros((256, 16), np.uint64)
    run(INTEGERS, "k", x, out, grid=1)
    for value, row in zip(map(int, x), out.tolist()):
        a, b, w = value & 0xFFFFFFFF, value >> 32, value ^ 0x123456789ABCDEF
        signed = lambda n, bits: n - (1 << bits) if n >> (bits - 1) else n  # noqa: E731
        pair = b << 32 | a
        byte = [pair >> 8 * i & 255 for i in range(8)]
        assert row == [
            a.bit_count(),
            32 - a.bit_length(),
            int(f"{a:032b}"[::-1], 2),
            (a & -a).bit_length(),
            a * b >> 32,
            (signed(a, 32) * signed(b, 32) >> 32) & 0xFFFFFFFF,
            value * w >> 64,
            (signed(value, 64) * signed(w, 64) >> 64) & (1 << 64) - 1,
            64 - value.bit_length(),
            value.bit_count(),
            byte[0] | byte[4] << 8 | byte[2] << 16 | byte[5] << 24,
            (pair << 7 >> 32) & 0xFFFFFFFF,
            (pair >> 7) & 0xFFFFFFFF,
            int(f"{value:064b}"[::-1], 2),
            min(signed(a, 32), signed(b, 32)) & 0xFFFFFFFF,
            max(a, b),
        ]


FLOATS = """
extern "C" __global__ void k(const float *x, float *out, int *ints) {
  const float v = x[threadIdx.x], w = fabsf(v);
  float *o = out + threadIdx.x * 8;
  o[0] = expf(v), o[1] = __expf(v), o[2] = logf(w), o[3] = __logf(w), o[4] = rsqrtf(w), o[5] = __fdividef(1.f, v);
  o[6] = fmaf(v, v, -v), o[7] = exp2f(v);
  ints[threadIdx.x * 2] = __float2int_rn(v * 1e9f);
  ints[threadIdx.x * 2 + 1] = __float_as_int(__int_as_float(__float_as_int(v)));
}"""


def test_float_functions() -> None:
    x = np.random.default_rng(2).uniform(-20, 20, 256).astype(np.float32)
    out, ints = np.empty((256, 8), np.float32), np.empty((256, 2), np.int32)
    run(FLOATS, "k", x, out, ints, grid=1)
    v = x.astype(np.float64)
    w = np.abs(v)
    exact = np.stack([np.exp(v), np.exp(v), np.log(w), np.log(w), w**-0.5, 1 / v, v * v - v, np.exp2(v)], 1)
    error = np.abs(out / exact - 1)
    # 2 ulp; the fast exponential and logarithm round their product with a constant first
    for column, bound in enumerate([2, 20, 2, 2, 1, 1, 1, 2]):
        absolute = np.abs(out[:, column] - exact[:, column])
        assert (np.minimum(error[:, column], absolute) <= bound * 2.0**-23).all(), column
    scaled = np.rint((x * np.float32(1e9)).astype(np.float64))
    np.testing.assert_array_equal(ints[:, 0], np.clip(scaled, -(2**31), 2**31 - 1).astype(np.int32))
    np.testing.assert_array_equal(ints[:, 1], x.view(np.int32))


def test_sums_and_products_are_not_fused() -> None:
    """x * x - y with y the rounded product is 0 exactly; fused, it would be the rounding error."""
    x = np.float32([1 + 2.0**-12] * 32)
    out = np.ones((2, 32), np.float32)
    source = """
extern "C" __global__ void k(const float *x, float *out) {
  const float v = x[threadIdx.x];
  const float y = v * v;
  out[threadIdx.x] = v * v - y;
  out[32 + threadIdx.x] = fmaf(v, v, -y);
}"""
    run(source, "k", x, out, grid=1, block=32)
    assert (out[0] == 0).all()
    assert (out[1] == 2.0**-24).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("ctype", ["half", "bf16"])
def test_mma_of_zero_and_what_is_not_finite(ctype: str, side: str, value: float) -> None:
    """0 x infinity is NaN in a matrix product too: a value that should not be read shows, even weighed by 0."""
    source = """
#include "common/types.cuh"
#include "ptx/mma.cuh"
template <class T> __global__ void k(const u32 *a, const u32 *b, float *c) {
  const int l = threadIdx.x;
  const u32 f[4] = {a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3]};
  float s[4] = {1.f, 1.f, 1.f, 1.f};
  mma_m16n8k16<T>(s, f, b[2 * l], b[2 * l + 1]);
  for (int e = 0; e < 4; ++e) c[4 * l + e] = s[e];
}"""
    dtype = TYPES["half" if ctype == "half" else "__nv_bfloat16"]
    a, b, c = np.zeros((32, 8), dtype), np.zeros((32, 4), dtype), np.zeros((32, 4), np.float32)
    kernel = cukern.Kernel(source, f"k<{ctype}>")
    with cukern.emulate(check=True):
        kernel(1, 32, (a.view(np.uint32), b.view(np.uint32), c))
        np.testing.assert_array_equal(c, 1)
        if side == "a":
            a[8:12, 0] = value  # row 2
        else:
            b[8:12, 0] = value  # column 2
        kernel(1, 32, (a.view(np.uint32), b.view(np.uint32), c))
    where = np.zeros((32, 4), bool)  # c[lane]: rows lane / 4 and that + 8, columns 2 (lane % 4) and the next
    if side == "a":
        where[8:12, :2] = True
    else:
        where[1::4, 0] = where[1::4, 2] = True
    np.testing.assert_array_equal(np.isnan(c), where)
    np.testing.assert_array_equal(c[~where], 1)
