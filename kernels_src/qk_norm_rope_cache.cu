// Between the QKV projection and attention, one pass over the packed heads of each token:
//   q, k heads   rotate(head / sqrt(mean(head^2) + eps) * weight) at the token's position; fp32, one rounding
//   v heads      unchanged
// q goes to out, k and v to the token's slot of the paged cache.
//
// Layouts   qkv [tokens, Hq + 2 Hkv, D]; q_weight, k_weight fp32 [D]; positions [tokens]; table fp32 [length, D] (D/2
//           cosines, D/2 sines); caches [blocks, Hkv, block_size, D]; slots int64 [tokens]; out [tokens, Hq, D]
// Bound     memory: qkv read once, q, k, v written once; weights and table rows come from the caches
// Launch    grid.x = tokens * blocks_per_token; `lanes` (1, 2, 4, 8 or 16: D/16 rounded up) threads a head, so that a
//           warp holds 32 / lanes heads and every access is 16 bytes
// Template  T storage type; Position int or i64. D any multiple of 16 to 256
// Measured: 71 % of a copy (8192 tokens, 32 + 2 * 8 heads); H200, docs/performance.md
//
// Order of the sum of squares: common/head_norm.cuh, a function of D alone.
// A negative slot (or one past the cache) skips the writes of k and v. A position outside the table makes q and k NaN.
#include "common/head_norm.cuh"
#include "common/paged.cuh"
#include "ptx/pdl.cuh"

constexpr int WIDTH = HEAD_WIDTH;

// Asks for the rows that other data drives out of the L2 cache from layer to layer, while the kernel ahead still runs. It may
// yet write the position: an older one only brings the wrong row, and what counts is read later.
template <class Position>
__device__ __forceinline__ void prefetch_rows(const float *q_weight, const float *k_weight, const Position *position,
                                              const i64 *slot, const float *table, int dim, i64 length) {
#ifndef CUKERN_EMU
  const int i = threadIdx.x * 32;
  if (threadIdx.x == 31) prefetch_line(slot);
  if (i >= dim) return;
  i64 row;
  table_row(__ldcg(position), length, row);
  prefetch_line(table + row * dim + i);
  prefetch_line(q_weight + i);
  prefetch_line(k_weight + i);
#endif
}

template <class T, class Position>
__global__ void __launch_bounds__(256)
    qk_norm_rope_cache(const T *qkv, const float *q_weight, const float *k_weight, const Position *positions,
                       const float *table, T *k_cache, T *v_cache, const i64 *slots, T *out, int num_heads,
                       int num_kv_heads, int dim, int lanes, int blocks_per_token, i64 length, int block_size,
                       i64 num_slots, float eps) {
  grid_dependency_launch();
  const int heads = num_heads + 2 * num_kv_heads, half = dim / 2;
  const i64 token = blockIdx.x / (u32)blocks_per_token;
  prefetch_rows(q_weight, k_weight, positions + token, slots + token, table, dim, length);
  grid_dependency_wait();
  const int part = blockIdx.x % (u32)blocks_per_token;
  const int head = part * ((int)blockDim.x / lanes) + (int)threadIdx.x / lanes;
  const int element = (int)threadIdx.x % lanes * WIDTH;
  // Threads without work stay for the shuffles of their warp.
  const bool active = head < heads && element < half;
  const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;

  Vec<T, WIDTH> first = {}, second = {};
  if (active) {
    const T *source = qkv + (token * heads + head) * dim + element;
    first = load_vec_once<T, WIDTH>(source);
    second = load_vec_once<T, WIDTH>(source + half);
  }
  const i64 slot = slots[token];
  i64 row;
  const bool inside = table_row(positions[token], length, row);

  const float sum = head_squares(first, second, lanes);
  if (!active) return;

  if (!is_value)
    norm_rotate_head(first, second, sum, (is_query ? q_weight : k_weight) + element, table + row * dim + element, dim, eps,
                     inside);
  T *target;
  if (is_query) {
    target = out + (token * num_heads + head) * dim;
  } else {
    if (slot < 0 || slot >= num_slots) return;
    const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
    target = (is_value ? v_cache : k_cache) + slot_offset(slot, kv_head, num_kv_heads, block_size, dim);
  }
  store_vec<T, WIDTH>(target + element, first);
  store_vec<T, WIDTH>(target + element + half, second);
}
