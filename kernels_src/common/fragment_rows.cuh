// From a warpgroup's accumulators to rows of a matrix, and the order in which tiles of a matrix are worked on.
// Accumulators of 64 rows x Columns as ptx/wgmma.cuh describes them: warp w of the four, lane 4 g + t holds in v[4 j + e] row
// 16 w + g + 8 (e >> 1), column 8 j + 2 t + (e & 1). N is a multiple of 8, so a group of eight columns is whole or absent.
// Test: tests/test_linear_sm90.py
#pragma once
#include "common/swiglu.cuh"
#include "common/types.cuh"

// Tiles that are worked on together share rows of x and of w in L2: down `group` rows of tiles, then one column to the right.
__device__ __forceinline__ void grouped_tile(int tile, int tiles_m, int tiles_n, int group, int &tile_m, int &tile_n) {
  const int per_group = group * tiles_n;
  const int first = tile / per_group * group, in_group = tile % per_group;
  const int height = min(group, tiles_m - first);
  tile_m = first + in_group % height;
  tile_n = in_group / height;
}

// 4 x 4 transpose of 32-bit words: lane t gets word t of lanes 0..3. All lanes of the warp call it.
__device__ __forceinline__ void transpose_quad(u32 (&v)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int step = 1; step <= 2; step <<= 1) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i | step], step);
      if (upper)
        v[i] = got;
      else
        v[i | step] = got;
    }
  }
}

// v += bias of its columns. `column`: of the first accumulator, here and below.
template <int Columns>
__device__ __forceinline__ void add_bias(float (&v)[Columns / 2], const float *bias, int column, int n) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    const int c = column + j * 8 + 2 * t;
    if (c >= n) continue;
    const float b0 = bias[c], b1 = bias[c + 1];
    v[j * 4] += b0;
    v[j * 4 + 1] += b1;
    v[j * 4 + 2] += b0;
    v[j * 4 + 3] += b1;
  }
}

// y = silu(gate) * up of a product whose columns are eight of the gate and eight of up in turn; both are rounded to T first,
// which is what swiglu.cu reads.
template <class T, int Columns>
__device__ __forceinline__ void gate_columns(const float (&v)[Columns / 2], float (&y)[Columns / 4]) {
#pragma unroll
  for (int j = 0; j < Columns / 16; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      y[4 * j + e] = silu_mul(to_float(from_float<T>(v[8 * j + e])), to_float(from_float<T>(v[8 * j + 4 + e])));
}

template <int Columns>
__device__ __forceinline__ void store_floats(float (&v)[Columns / 2], float *out, int row, int column, int m, int n) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + warp * 16 + h * 8 + (lane >> 2);
    if (r >= m) continue;
    float *const at = out + (i64)r * n + column + 2 * t;
    const int left = n - column;
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j)
      if (j * 8 < left) store_vec(at + j * 8, Vec<float, 2>{{v[j * 4 + h * 2], v[j * 4 + h * 2 + 1]}});
  }
}

template <int Columns, class Out>
__device__ __forceinline__ void store_halves(float (&v)[Columns / 2], Out *out, int row, int column, int m, int n) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + warp * 16 + h * 8 + (lane >> 2);
    Out *const at = out + (i64)r * n + column;
    const int left = r < m ? n - column : 0;
#pragma unroll
    for (int j = 0; j < Columns / 8; j += 4) {
      u32 packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        packed[q] = j + q < Columns / 8 ? pack2<Out>(v[(j + q) * 4 + h * 2], v[(j + q) * 4 + h * 2 + 1]) : 0u;
      transpose_quad(packed);  // lane t: the eight columns of group t
      const int c = (j + t) * 8;
      if (c < left && c < Columns) *reinterpret_cast<uint4 *>(at + c) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

// out = v.
template <int Columns, class Out>
__device__ __forceinline__ void store_rows(float (&v)[Columns / 2], Out *out, int row, int column, int m, int n) {
  if constexpr (sizeof(Out) == 4)
    store_floats<Columns>(v, out, row, column, m, n);
  else
    store_halves<Columns>(v, out, row, column, m, n);
}

// Results that pass through shared memory do so in boxes as wide as the copy engine's swizzle, 128, 64 or 32 bytes: 16-byte
// chunk c of row r lies at chunk c ^ (r & 7), c ^ (r >> 1 & 3) or c ^ (r >> 2 & 1) of its row.
template <class Out> __device__ __forceinline__ constexpr int strip_columns(int columns) {
  for (int bytes = 128; bytes > 32; bytes /= 2)
    if (columns * (int)sizeof(Out) % bytes == 0) return bytes / (int)sizeof(Out);
  return 32 / (int)sizeof(Out);
}
template <int Bytes> __device__ __forceinline__ int swizzle_key(int row) {
  return Bytes == 128 ? row & 7 : Bytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
}

// A half-warp has the same two chunks of four rows; every other row (or pair of rows) takes its groups of columns in another
// order, so that all banks work.
template <int Columns, int Strip, bool Add>
__device__ __forceinline__ void pass_floats(float (&v)[Columns / 2], int strip, unsigned char *tile) {
  constexpr int Groups = Strip / 8, Turn = Groups / 2;
  static_assert(Strip == 32 || Strip == 16, "rows of 128 or 64 bytes");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
  const bool turned = Strip == 32 ? g & 1 : g & 2;
  const int key = swizzle_key<Strip * 4>(g);
  unsigned char *const row = tile + (warp * 16 + g) * (Strip * 4) + (t & 1) * 8;
  float *places[Groups];
  Vec<float, 2> sums[Groups][2];
#pragma unroll
  for (int q = 0; q < Groups; ++q) {
    const int chunk = (2 * (q ^ (turned ? Turn : 0)) + (t >> 1)) ^ key;
    places[q] = reinterpret_cast<float *>(row + chunk * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if constexpr (Add) sums[q][h] = load_vec<float, 2>(places[q] + h * 8 * Strip);
  }
#pragma unroll
  for (int q = 0; q < Groups; ++q)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int mine = (strip * Groups + q) * 4 + h * 2, other = (strip * Groups + (q ^ Turn)) * 4 + h * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float y = turned ? v[other + e] : v[mine + e];
        sums[q][h].v[e] = Add ? sums[q][h].v[e] + y : y;
      }
      store_vec(places[q] + h * 8 * Strip, sums[q][h]);
    }
}

template <int Columns, int Strip, class Out>
__device__ __forceinline__ void pass_halves(float (&v)[Columns / 2], int strip, unsigned char *tile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
  const int key = swizzle_key<Strip * 2>(g);  // rows 8 apart have the same
  unsigned char *const row = tile + (warp * 16 + g) * (Strip * 2) + t * 4;
#pragma unroll
  for (int q = 0; q < Strip / 8; ++q)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = (strip * (Strip / 8) + q) * 4 + h * 2;
      *reinterpret_cast<u32 *>(row + (q ^ key) * 16 + h * 8 * (Strip * 2)) = pack2<Out>(v[at], v[at + 1]);
    }
}

// tile += v (float only) or, without Add, tile = v, of the Strip columns from Strip * strip on; `tile`: a box of 64 rows x Strip
// columns of Out in shared memory.
template <int Columns, int Strip, bool Add, class Out>
__device__ __forceinline__ void pass_strip(float (&v)[Columns / 2], int strip, unsigned char *tile) {
  static_assert(!Add || sizeof(Out) == 4, "halves are not added to");
  if constexpr (sizeof(Out) == 4)
    pass_floats<Columns, Strip, Add>(v, strip, tile);
  else
    pass_halves<Columns, Strip, Out>(v, strip, tile);
}
