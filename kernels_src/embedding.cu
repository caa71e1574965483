// Embedding:  out[t] = weight[ids[t]], a copy; an id outside the table gives a row of NaN and reads nothing.
//
// Layouts   ids [rows], weight [entries, width * Width], out [rows, width * Width]
// Bound     memory: each row read once, written once
// Launch    one block for every THREADS * UNROLL vectors of out, counted through all rows
// Template  W, O types of weight and out (O may be float: exact); Id int or i64; Width: elements of a vector (16 bytes of
//           the wider type, or 1 where rows are not made of whole vectors)
// Measured: 81 % of a copy (8192 x 4096); H200, docs/performance.md
#include "common/rows.cuh"

template <class O, class W> struct Convert {
  __device__ __forceinline__ static O from(W x) { return from_float<O>(to_float(x)); }
};
template <class T> struct Convert<T, T> {  // a NaN keeps its payload
  __device__ __forceinline__ static T from(T x) { return x; }
};

constexpr int THREADS = 256;
constexpr int UNROLL = 4;  // vectors of a thread: four independent chains of id and row

template <class W, class O, class Id, int Width>
__global__ void __launch_bounds__(THREADS)
    embedding(const Id *ids, const W *weight, O *out, i64 rows, i64 entries, u32 width) {
  RowWalk at((i64)blockIdx.x * (THREADS * UNROLL) + threadIdx.x, THREADS, width);
  i64 source[UNROLL], target[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i, at.next()) {
    target[i] = at.row < rows ? (at.row * width + at.column) * Width : -1;
    source[i] = -1;
    if (target[i] >= 0) {
      const i64 id = ids[at.row];
      if (id >= 0 && id < entries) source[i] = (id * width + at.column) * Width;
    }
  }
  Vec<W, Width> x[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (source[i] >= 0) x[i] = load_vec<W, Width>(weight + source[i]);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (target[i] >= 0) {
      Vec<O, Width> y;
#pragma unroll
      for (int j = 0; j < Width; ++j)
        y.v[j] = source[i] >= 0 ? Convert<O, W>::from(x[i].v[j]) : from_float<O>(CUKERN_NAN);
      store_vec<O, Width>(out + target[i], y);
    }
}
