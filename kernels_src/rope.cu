// Rotary position embedding, NeoX halves:  (x[i], x[i + D/2]) turns by the angle of pair i at the token's position.
//
// Layouts   x, out [tokens, heads, D]; positions [tokens]; table fp32 [length, D]: D/2 cosines, then D/2 sines
// Bound     memory: x read once, out written once; the table's rows come from the caches for all heads but the first
// Launch    one block for every THREADS * UNROLL vectors of pairs, counted through all tokens and heads
// Template  T storage type; Position int or i64; Width: pairs of a vector (16 bytes, or 1 where D/2 is not made of vectors)
// Measured: 77 % of a copy (8192 x 32 x 128); H200, docs/performance.md
//
// A position outside the table gives NaN; nothing is read out of bounds. out may be x.
#include "common/rope.cuh"
#include "common/rows.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 2;

template <class T, class Position, int Width>
__global__ void __launch_bounds__(THREADS)
    rope(const T *x, const Position *positions, const float *table, T *out, i64 tokens, int heads, int dim, i64 length) {
  const u32 half = dim / 2, vectors = half / Width;  // of a head
  RowWalk at((i64)blockIdx.x * (THREADS * UNROLL) + threadIdx.x, THREADS, heads * vectors);
  Vec<T, Width> first[UNROLL], second[UNROLL];
  i64 source[UNROLL], angles[UNROLL];
  bool inside[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i, at.next()) {
    source[i] = -1;
    if (at.row < tokens) {
      const u32 head = at.column / vectors, pair = at.column % vectors * Width;
      source[i] = (at.row * heads + head) * dim + pair;
      first[i] = load_vec_once<T, Width>(x + source[i]);
      second[i] = load_vec_once<T, Width>(x + source[i] + half);
      i64 row;
      inside[i] = table_row(positions[at.row], length, row);
      angles[i] = row * dim + pair;
    }
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i)
    if (source[i] >= 0) {
      float cosine[Width], sine[Width], a[Width], b[Width];
      load_floats(cosine, table + angles[i]);
      load_floats(sine, table + angles[i] + half);
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        a[j] = to_float(first[i].v[j]);
        b[j] = to_float(second[i].v[j]);
        rotate_pair(a[j], b[j], cosine[j], sine[j]);
        if (!inside[i]) a[j] = b[j] = CUKERN_NAN;
      }
      store_floats<T, Width>(out + source[i], a);
      store_floats<T, Width>(out + source[i] + half, b);
    }
}
