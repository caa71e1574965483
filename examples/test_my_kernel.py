"""Test a CUDA kernel of your own with pytest: on a GPU with CuPy arrays, elsewhere the same text under emulation.

Run it with ``pytest examples/test_my_kernel.py``. Under pytest the emulator also looks for what a GPU hides: reads
and writes out of bounds, races in shared memory, values that were never written.
"""

import numpy as np
import pytest

import cukern

SOURCE = r"""
#include "common/reduce.cuh"

// y[r, c] = x[r, c] - log(sum over c of exp(x[r, c])): one block of 128 threads a row
template <class T> __global__ void log_softmax(const T *x, T *y, int columns) {
  __shared__ float scratch[4];
  const T *row = x + (size_t)blockIdx.x * columns;
  float top = -3e38f, sum = 0.f;
  for (int c = threadIdx.x; c < columns; c += 128) top = fmaxf(top, to_float(row[c]));
  top = block_reduce<Max, 4>(top, scratch);
  for (int c = threadIdx.x; c < columns; c += 128) sum += expf(to_float(row[c]) - top);
  const float base = top + logf(block_reduce<Sum, 4>(sum, scratch));
  for (int c = threadIdx.x; c < columns; c += 128)
    y[(size_t)blockIdx.x * columns + c] = from_float<T>(to_float(row[c]) - base);
}
"""


def gpu_is_usable() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


@pytest.fixture
def xp():
    """The array module: CuPy on a GPU, else NumPy with the kernels emulated."""
    if gpu_is_usable():
        import cupy

        yield cupy
    else:
        with cukern.emulate():
            yield np


@pytest.mark.parametrize(("ctype", "dtype", "tolerance"), [("float", np.float32, 1e-5), ("half", np.float16, 4e-3)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (5, 300)])
def test_log_softmax(xp, ctype, dtype, tolerance, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    y = xp.full(shape, np.nan, dtype)  # an element that is not written shows

    kernel = cukern.Kernel(SOURCE, "log_softmax", template=(ctype,))
    kernel(shape[0], 128, (xp.asarray(x), y, shape[1]))

    wide = x.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    result = y if xp is np else y.get()
    np.testing.assert_allclose(result.astype(np.float64), expected, atol=tolerance)


def test_wrong_arguments_are_refused_before_the_launch(xp):
    kernel = cukern.Kernel(SOURCE, "log_softmax", template=("float",))
    doubles = xp.zeros((2, 8), np.float64)
    with pytest.raises(TypeError):
        kernel(2, 128, (doubles, doubles, 8))
