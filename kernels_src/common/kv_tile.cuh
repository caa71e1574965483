// Tiles of 16-bit rows in shared memory: swizzled so that ldmatrix meets no bank conflict, filled by cp.async from
// strided rows or from the pages of a KV cache. Used by the attention kernels.
// Test: tests/test_attention_prefill.py, tests/test_attention_decode.py
#pragma once
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/opaque.cuh"

// Row-major tile with Columns elements a row, no padding. A row is Columns / 8 pieces of 16 bytes; pieces are permuted
// within a row by an xor with bits of the row number such that 8 consecutive rows at one column hit 8 different groups
// of banks for every multiple of 16 columns (row pitch mod 128 bytes is 0, 64 or 32/96: xor over 8, 4 or 2 pieces).
template <int Columns> struct RowTile {
  static_assert(Columns % 16 == 0, "a row is whole mma k-steps");
  static constexpr int pieces = Columns / 8;
  static constexpr int cycle = pieces % 8 == 0 ? 8 : pieces % 4 == 0 ? 4 : 2;

  __device__ __forceinline__ static int at(int row, int piece) {  // offset in elements
    return row * Columns + ((piece ^ ((row / (8 / cycle)) & (cycle - 1))) << 3);
  }
};

// Fragments by ldmatrix. A lane's place in a fragment is found once (a_lane, key_lane, value_lane: offset of its 16
// bytes in rows 0 ... 15 at column 0); `fragment_at` moves it to 16-column block `block`, row row0 (a multiple of 8).
__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

// Q or P as A operand: 16 rows x 16 columns.
template <int Columns> __device__ __forceinline__ int a_lane() {
  return RowTile<Columns>::at(lane_id() & 15, lane_id() >> 4);
}
// K as B operand of Q K^T, 16 keys x 16 columns: registers 0, 1 for the first 8 keys, 2, 3 for the others.
template <int Columns> __device__ __forceinline__ int key_lane() {
  return RowTile<Columns>::at((lane_id() & 7) + (lane_id() >> 4) * 8, (lane_id() >> 3) & 1);
}
// V as B operand of P V, 16 keys x 16 columns, transposed: registers 0, 1 for the first 8 columns, 2, 3 for the others.
template <int Columns> __device__ __forceinline__ int value_lane() { return a_lane<Columns>(); }

template <int Columns> __device__ __forceinline__ int fragment_at(int lane_offset, int row0, int block) {
  constexpr int low = RowTile<Columns>::cycle - 1;
  return (lane_offset ^ ((2 * block & low) << 3)) + row0 * Columns + ((2 * block & ~low) << 3);
}

// The fragments of a tile for a caller that reads many of them and has few registers: a place for each way in which blocks
// are permuted, everything else is a constant distance.
template <class T, int Columns> struct TileFragments {
  static constexpr int ways = RowTile<Columns>::cycle / 2;
  SharedPlace places[ways];

  __device__ __forceinline__ void init(const T *tile, int lane_offset) {
#pragma unroll
    for (int i = 0; i < ways; ++i) places[i] = shared_place(tile + (lane_offset ^ i << 4));
  }
  template <bool Trans> __device__ __forceinline__ void load(u32 (&r)[4], int row0, int block) const {
    ldmatrix_x4_at<Trans>(r, places[block % ways], (row0 * Columns + block / ways * ways * 16) * (int)sizeof(T));
  }
};

// Copies rows [0, valid) of `src` into a tile of Rows rows and zero-fills the others.
// Unroll: of the loop where threads change columns; fully unrolled, its loop invariants fill the registers of a caller.
template <class T, int Columns, int Rows, int Threads, int Unroll = 2>
__device__ __forceinline__ void copy_rows(T *tile, const T *src, int stride, int valid) {
  constexpr int pieces = Columns / 8, total = Rows * pieces, step = Threads / pieces;
  if constexpr (Threads % pieces == 0 && step % 8 == 0 && Rows % step == 0) {  // a thread stays in its column
    const int thread = opaque(threadIdx.x), row = thread / pieces, piece = thread % pieces, left = valid - row;
    T *dst = tile + RowTile<Columns>::at(row, piece);
    const T *from = src + (i64)row * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < Rows / step; ++i) {
      const bool ok = i * step < left;
      cp_async_16(dst + i * step * Columns, from, ok);  // what is not ok is not read
      from += (i64)step * stride;
    }
  } else {
    const int first = opaque(threadIdx.x);
#pragma unroll Unroll
    for (int n = first; n < total; n += Threads) {
      const int row = n / pieces, piece = n % pieces;
      const bool ok = row < valid;
      cp_async_16(tile + RowTile<Columns>::at(row, piece), src + (ok ? (i64)row * stride + piece * 8 : 0), ok);
    }
  }
}

// Block ids of the pages under keys [key0, key0 + Rows), one per lane, -1 where a page holds no key < len: the columns
// of a block table past the end of the sequence are never read. key0 is a multiple of Rows, Rows of 16.
template <int Rows> __device__ __forceinline__ int fetch_pages(const int *table, int key0, int len, int page_shift) {
  const int lane = threadIdx.x & 31, column = (key0 >> page_shift) + lane;
  const bool used = (lane == 0 || lane < (Rows >> page_shift)) && ((i64)column << page_shift) < len;
  return used ? __ldg(table + column) : -1;
}

enum class Kv { key, value };

// Copies keys [key0, key0 + Rows) of one head out of a paged cache (cache points at the head in block 0); keys >= len
// are zero-filled. A block id outside the cache is not followed: its keys become NaN and so do the rows that see them.
template <class T, int Columns, int Rows, int Threads, Kv kind, int Unroll>
__device__ __forceinline__ void copy_pages(T *tile, const T *cache, i64 block_stride, int stride, int pages, int key0,
                                           int len, int page_shift, int num_blocks) {
  constexpr int pieces = Columns / 8, total = Rows * pieces, step = Threads / pieces;
  const int thread = opaque(threadIdx.x), mask = (1 << page_shift) - 1;
  if constexpr (Threads % pieces == 0 && (step == 8 || step == 16)) {  // a thread stays in its column, a warp in a page
    const int row = thread / pieces, left = len - key0 - row;
    T *const dst = tile + RowTile<Columns>::at(row, thread % pieces);
    const T *const column = cache + (i64)row * stride + thread % pieces * 8;
#pragma unroll Unroll
    for (int r = 0; r < Rows; r += 16) {
      const int block = __shfl_sync(0xffffffffu, pages, r >> page_shift);
      const T *from = column + block * block_stride + (i64)((key0 + r) & mask) * stride;
#pragma unroll
      for (int i = r; i < r + 16; i += step) {
        const bool used = i < left, ok = used && (u32)block < (u32)num_blocks;
        if (kind == Kv::key && used && !ok)
          *reinterpret_cast<uint4 *>(dst + i * Columns) = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
        else
          cp_async_16(dst + i * Columns, from, ok);
        from += (i64)step * stride;
      }
    }
    return;
  }
#pragma unroll Unroll
  for (int n = thread; n < ceil_div(total, Threads) * Threads; n += Threads) {
    const int row = n / pieces, piece = n % pieces;
    const int block = __shfl_sync(0xffffffffu, pages, row >> page_shift);
    if (total % Threads != 0 && n >= total) continue;
    const bool used = key0 + row < len, ok = used && (u32)block < (u32)num_blocks;
    T *dst = tile + RowTile<Columns>::at(row, piece);
    if (kind == Kv::key && used && !ok) {
      *reinterpret_cast<uint4 *>(dst) = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
      continue;
    }
    const i64 offset = ok ? block * block_stride + (i64)((key0 + row) & mask) * stride + piece * 8 : 0;
    cp_async_16(dst, cache + offset, ok);
  }
}
