// SwiGLU:  out[i] = silu(gate[i]) * up[i],  silu(g) = g / (1 + exp(-g)), in fp32, one rounding to the type of out.
//
// Layouts   gate_up [rows, 2 * width * Width]: the gate, then the up half of each row; out [rows, width * Width]
// Bound     memory: gate and up read once, out written once
// Launch    one block for every THREADS * UNROLL vectors of out, counted through all rows
// Template  T storage type; Width: elements of a vector (16 bytes, or 1 where rows are not made of whole vectors)
// Measured: 94 % of a copy (8192 x 12288); H200, docs/performance.md
#include "common/rows.cuh"
#include "common/swiglu.cuh"
#include "ptx/pdl.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 2;  // vectors of a thread: twice as many 16-byte loads in flight

template <class T, int Width>
__global__ void __launch_bounds__(THREADS) swiglu(const T *gate_up, T *out, i64 rows, u32 width) {
  grid_dependency_launch();
  grid_dependency_wait();
  RowWalk at((i64)blockIdx.x * (THREADS * UNROLL) + threadIdx.x, THREADS, width);
  Vec<T, Width> gate[UNROLL], up[UNROLL];
  i64 target[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i, at.next()) {
    target[i] = at.row < rows ? (at.row * width + at.column) * Width : -1;
    if (target[i] >= 0) {
      const T *row = gate_up + (at.row * width * 2 + at.column) * Width;
      gate[i] = load_vec_once<T, Width>(row);
      up[i] = load_vec_once<T, Width>(row + (i64)width * Width);
    }
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (target[i] >= 0) {
      float y[Width];
#pragma unroll
      for (int j = 0; j < Width; ++j) y[j] = silu_mul(to_float(gate[i].v[j]), to_float(up[i].v[j]));
      store_floats<T, Width>(out + target[i], y);
    }
}
