// The query tiles of a packed batch, those with most keys first, or last: rank -> (sequence, tile). Ranks number all tiles of
// all sequences without gaps, and nothing on the host needs to know the lengths.
// Test: tests/test_attention_prefill_sm90.py
#pragma once
#include "common/types.cuh"
#include "ptx/opaque.cuh"

// Rows and keys of a sequence, clamped to the arrays: a wrong cu_seqlens or seq_lens must not reach other memory.
template <bool Pages> struct PackedLengths {
  const int *cu_q, *cu_k;   // [batch + 1]; cu_k: without pages
  const int *seq_lens;      // [batch]: with pages
  int q_tokens, kv_tokens;  // of all; kv_tokens for pages: the most that a table holds

  __device__ __forceinline__ int q_begin(int b) const { return min(max(__ldg(cu_q + b), 0), q_tokens); }
  __device__ __forceinline__ int rows(int b) const { return min(__ldg(cu_q + b + 1), q_tokens) - q_begin(b); }
  __device__ __forceinline__ int k_begin(int b) const { return Pages ? 0 : min(max(__ldg(cu_k + b), 0), kv_tokens); }
  __device__ __forceinline__ int keys(int b) const {
    if constexpr (Pages) return min(max(__ldg(seq_lens + b), 0), kv_tokens);
    return max(min(__ldg(cu_k + b + 1), kv_tokens) - k_begin(b), 0);
  }
};

// A tile's level is about its number of keys in units of Rows. Causal: `top` for a sequence's last tile and one less for every
// tile before; otherwise all are at `top`. With fewest keys first all levels are negative. A warp asks together, for ranks that
// do not fall.
template <int Rows, bool Pages> struct PackedTiles {
  using Lengths = PackedLengths<Pages>;
  static constexpr int None = -0x7fffffff - 1;
  bool rising;  // fewest keys first
  int level;    // of the ranks `before` .. before + here - 1
  int before, here;

  __device__ __forceinline__ void reset(bool fewest_first) {
    rising = fewest_first;
    level = 0x7fffffff;
    before = here = 0;
  }

  __device__ __forceinline__ static int tiles_of(const Lengths &lengths, int b) {
    return ceil_div(max(lengths.rows(b), 0), Rows);
  }
  __device__ __forceinline__ void levels(const Lengths &lengths, int b, bool causal, int &tiles, int &low, int &top) const {
    tiles = tiles_of(lengths, b);
    const int most = ceil_div(lengths.keys(b), Rows), least = causal ? most - tiles + 1 : most;
    low = rising ? -most : least;
    top = rising ? -least : most;
  }
  __device__ __forceinline__ int count(const Lengths &lengths, int b, int batch, bool causal) const {
    if (b >= batch) return 0;
    int tiles, low, top;
    levels(lengths, b, causal, tiles, low, top);
    return tiles <= 0 || level < low || level > top ? 0 : causal ? 1 : tiles;
  }

  // False: no tile has this rank.
  __device__ __forceinline__ bool find(const Lengths &lengths, int batch, bool causal, int rank, int &sequence, int &tile) {
    const int lane = opaque(threadIdx.x) & 31;
    while (rank >= before + here) {
      int next = None, most = 0;  // the next level that has tiles, and how many this lane knows of
#pragma unroll 1
      for (int b = lane; b < batch; b += 32) {
        int tiles, low, top;
        levels(lengths, opaque(b), causal, tiles, low, top);  // or addresses of the next b would take registers
        const int highest = min(top, level - 1);
        if (tiles <= 0 || highest < max(low, next)) continue;
        most = (highest == next ? most : 0) + (causal ? 1 : tiles);
        next = highest;
      }
      level = __reduce_max_sync(0xffffffffu, next);
      if (level == None) return false;
      before += here;
      here = __reduce_add_sync(0xffffffffu, next == level ? most : 0);
    }
    int left = rank - before;
    for (int b0 = 0;; b0 += 32) {
      const int mine = count(lengths, b0 + lane, batch, causal);
      int upto = mine;  // of the lanes up to this one
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += other;
      }
      const u32 behind = __ballot_sync(0xffffffffu, upto > left);
      if (behind != 0) {
        const int source = __ffs(behind) - 1;
        sequence = b0 + source;
        const int index = left - __shfl_sync(0xffffffffu, upto - mine, source);
        int tiles, low, top;
        levels(lengths, sequence, causal, tiles, low, top);
        tile = !causal ? index : rising ? top - level : level - low;
        return true;
      }
      left -= __shfl_sync(0xffffffffu, upto, 31);
    }
  }
};
