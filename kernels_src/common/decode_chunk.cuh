// Parts of attention_decode.cu: 16 keys or values on their way to shared memory, and one chunk of keys by a whole block.
// Test: tests/test_attention_decode.py
#pragma once
#include "common/kv_tile.cuh"
#include "common/softmax.cuh"
#include "ptx/mma.cuh"

constexpr int TILE = 64;  // keys per online-softmax step (numerics contract)
constexpr int WARPS = 4;
constexpr int HEADS = 8;  // query heads of an item: rows of an mma tile, the other eight stay empty

// Copies 16 keys of one head (or their values), a warp's work; the first is `place` elements behind `cache`, or unknown if
// that is negative: then keys become NaN, and so do the rows that see them. Rows past `left` are filled with zeros.
template <class T, int D>
__device__ __forceinline__ void copy_group(T *rows, const T *cache, i64 place, int stride, int left, bool value) {
  constexpr int Pieces = D / 8, Rows = 32 % Pieces == 0 ? 32 / Pieces : 1, cycle = RowTile<D>::cycle;
  const int self = opaque(lane_id());
  if (32 % Pieces == 0 && place >= 0 && left >= 16) {  // a lane keeps its column
    const T *from = cache + place + (i64)(self / Pieces) * stride + self % Pieces * 8;
    const int to = RowTile<D>::at(self / Pieces, self % Pieces);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      cp_async_16(rows + (to ^ (((i * Rows / (8 / cycle)) & (cycle - 1)) << 3)) + i * Rows * D, from);
      from += (i64)Rows * stride;
    }
    return;
  }
#pragma unroll 1
  for (int n = self; n < 16 * Pieces; n += 32) {
    const int row = n / Pieces, piece = n % Pieces;
    T *const to = rows + RowTile<D>::at(row, piece);
    if (row < left && place < 0 && !value)
      *reinterpret_cast<uint4 *>(to) = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
    else
      cp_async_16(to, row < left && place >= 0 ? cache + place + (i64)row * stride + piece * 8 : cache,
                  row < left && place >= 0);
  }
}

// One chunk by the whole block: a warp takes a share of the keys, then of the columns. All bytes are asked for at once, so it
// is the short way where a block has nothing else to do.
//   keys    room for the keys, then the values of the chunk
//   words   and for what the warps tell each other
// Results: m and l of head g (= lane / 4; l is the part of lane t = lane % 4 of a quad), the same in every warp; of heads 2t and
// 2t + 1, acc[i][e]: column (warp + WARPS i) 16 + (e / 2) 8 + g of head 2t + e % 2.
template <class T, int D, int Chunk> struct OneChunk {
  static constexpr int Share = Chunk / WARPS, Groups = Share / 16, Blocks = ceil_div(D / 16, WARPS);
  T *const keys;
  float *const words;  // Chunk / 16 x 32 sums, WARPS x HEADS maxima, Chunk / 16 x 32 x 2 packed p
  float acc[Blocks][4], m, l;

  // query: this lane's first pair of columns of head g; copy(rows, key, value): 16 keys or values to shared memory.
  template <class Copy>
  __device__ __forceinline__ void run(const T *query, int key0, int end, float c, Copy copy) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, at = key_lane<D>();
    T *const s_k = keys, *const s_v = keys + Chunk * D;
    float *const s_sum = words, *const s_max = s_sum + Chunk / 16 * 32;  // [groups of 16 keys][lane]; [WARPS][HEADS]
    u32 *const s_p = reinterpret_cast<u32 *>(s_max + WARPS * HEADS);      // [groups][lane][2]
#pragma unroll 1
    for (int value = 0; value < 2; ++value) {
#pragma unroll 1
      for (int i = 0; i < Share; i += 16)
        copy((value ? s_v : s_k) + (warp * Share + i) * D, key0 + warp * Share + i, value != 0);
      cp_async_commit();
    }
    u32 a[D / 16][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
      for (int h = 0; h < 2; ++h) a[kk][2 * h] = *reinterpret_cast<const u32 *>(query + kk * 16 + h * 8);
    cp_async_wait<1>();
    __syncwarp();  // this warp's keys are there
    float s[Groups][2][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
      for (int i = 0; i < Groups; ++i) {
        u32 f[4];
        ldmatrix_x4(f, s_k + fragment_at<D>(at, warp * Share + i * 16, kk));
        mma_m16n8k16<T>(s[i][0], a[kk], f[0], f[1]);
        mma_m16n8k16<T>(s[i][1], a[kk], f[2], f[3]);
      }
    float top = -CUKERN_INF;
#pragma unroll
    for (int i = 0; i < Groups; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &x = s[i][e >> 1][e & 1];
        if (key0 + warp * Share + i * 16 + (e >> 1) * 8 + 2 * t + (e & 1) >= end) x = -CUKERN_INF;
        top = fmaxf(top, x);
      }
    top = quad_max(top);
    if (t == 0) s_max[warp * HEADS + g] = top;
    __syncthreads();  // the maxima are there
    constexpr int Tiles = Chunk / TILE, TileWarps = WARPS / Tiles;
    float corr[Tiles];
    m = -CUKERN_INF;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      top = m;
#pragma unroll
      for (int w = 0; w < TileWarps; ++w) top = fmaxf(top, s_max[(tile * TileWarps + w) * HEADS + g]);
      corr[tile] = rescale_factor(m, top, c);
      m = top;
      if (warp / TileWarps != tile) continue;
      const float mc = __fmul_rn(finite_max(top), c);
#pragma unroll
      for (int i = 0; i < Groups; ++i) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = softmax_exp(s[i][e >> 1][e & 1], c, mc);
        s_sum[(warp * Groups + i) * 32 + lane] = group_sum(p[0], p[1], p[2], p[3]);
        store_vec(s_p + ((warp * Groups + i) * 32 + lane) * 2, Vec<u32, 2>{pack2<T>(p[0], p[1]), pack2<T>(p[2], p[3])});
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // values, p and the sums of all warps are there
    l = 0.f;
#pragma unroll
    for (int i = 0; i < Blocks; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][e] = 0.f;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      if (key0 + tile * TILE >= end) break;
      constexpr int Four = TILE / 16;
      const float *const sums = s_sum + tile * Four * 32 + lane;
      l = update_sum(l, corr[tile], ((sums[0] + sums[32]) + sums[64]) + sums[96]);
      if (tile > 0) {
        const float even = __shfl_sync(0xffffffffu, corr[tile], 8 * t), odd = __shfl_sync(0xffffffffu, corr[tile], 8 * t + 4);
#pragma unroll
        for (int i = 0; i < Blocks; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][e] = __fmul_rn(acc[i][e], e & 1 ? odd : even);
      }
#pragma unroll
      for (int j = 0; j < Four; ++j) {
        const Vec<u32, 2> w = load_vec<u32, 2>(s_p + ((tile * Four + j) * 32 + lane) * 2);
#pragma unroll
        for (int i = 0; i < Blocks; ++i)
          if (warp + i * WARPS < D / 16) {
            u32 f[4];
            ldmatrix_x4_trans(f, s_v + fragment_at<D>(at, (tile * Four + j) * 16, warp + i * WARPS));
            mma_m16n8k16<T>(acc[i], f, w.v[0], w.v[1]);
          }
      }
    }
  }
};
