// Attention over whole sequences or chunks of them on Hopper's tensor cores (sm_90a only), FlashAttention-3 shape. Head
// dimension 128; attention_prefill_sm90.cu has 64.
// Formula   out = softmax(scale * q k^T + mask) v per query head; head h reads key/value head h / group. Causal: query
//           i of n sees the keys j <= i + kv_len - n. lse = log sum exp(scale * q k^T).
// Layouts   q, k, v through tensor maps of five dimensions (64 columns, token, block of 64 columns, head, sequence or page);
//           dense, packed + cu_seqlens or pages + tables, as in attention_prefill.cu; out [tokens, Hq, D] without gaps,
//           lse float [tokens, Hq]. Bases and strides are multiples of 16 bytes.
// Bound     tensor cores: 4 * D flops per query-key pair.
// Launch    Persistent: at most one block to a multiprocessor, (Groups + 1) * 128 threads. Work items are pairs (query tile of
//           64 * Groups rows, head) in the order of prefill/order.cuh, dealt out forwards and backwards in turn. Of the first
//           warpgroup, one warp finds work, one copies queries and keys, one values. The two others, the consumers, own 64
//           query rows each and take turns, so that one waits for its scores while the other has exponentials to compute.
// Template  T half | bf16; D = 128; Kind of layout; Groups consumer warpgroups; Stages of the rings of K and of V, 128 keys
//           each: both tiles of a chunk are worked on at once, so that waits and reductions are paid once for both. Q comes
//           from shared memory, P from registers.
// Numerics  tiles of 64 keys, chunks of 128 keys from key 0, merged in ascending order by common/softmax.cuh: the bits of
//           attention_prefill.cu.
// Measured  79 % of 790 TFLOP/s (8,192, 16/8 heads, causal), 1.15 x cuDNN; H200, docs/performance.md
#include "common/fragment_rows.cuh"
#include "common/softmax.cuh"
#include "prefill/consumer.cuh"
#include "prefill/producer.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/wgmma.cuh"

// Largest scores of both tiles of a chunk: m of the chunk, what the scaled scores of each tile are relative to, and what the
// products of the first tile are to be multiplied by before those of the second are added.
__device__ __forceinline__ void chunk_maxima(const float (&s)[CHUNK / 2], float (&m)[2], float (&mc)[2][2], float (&corr)[2],
                                             float c) {
  float tops[2][2][TILE / 8];
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) tops[t][i][n] = fmaxf(s[32 * t + 4 * n + 2 * i], s[32 * t + 4 * n + 2 * i + 1]);
#pragma unroll
      for (int step = TILE / 16; step > 0; step >>= 1)
#pragma unroll
        for (int n = 0; n < step; ++n) tops[t][i][n] = fmaxf(tops[t][i][n], tops[t][i][n + step]);
    }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float first = quad_max(tops[0][i][0]), top = fmaxf(first, quad_max(tops[1][i][0]));
    corr[i] = rescale_factor(first, top, c);
    mc[0][i] = __fmul_rn(finite_max(first), c);
    mc[1][i] = __fmul_rn(finite_max(top), c);
    m[i] = top;
  }
}

// Turns the scores of tile t of a chunk into p, packed as A fragments, and their sums. between(j), behind the exponentials of
// 16 keys, is other work: a warp can start an exponential in every eighth cycle only.
template <class T, int t, class Between>
__device__ __forceinline__ void tile_exponentials(const float (&s)[CHUNK / 2], u32 (&p)[TILE / 16][4], float (&sum)[2],
                                                  const float (&mc)[2], float c, Between between) {
#pragma unroll
  for (int j = 0; j < TILE / 16; ++j) {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = softmax_exp(s[32 * t + 8 * j + i], c, mc[i >> 1 & 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = group_sum(e[2 * i], e[2 * i + 1], e[4 + 2 * i], e[4 + 2 * i + 1]);
      sum[i] = j == 0 ? g : sum[i] + g;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) p[j][i] = pack2<T>(e[2 * i], e[2 * i + 1]);
    between(j);
  }
}

template <class T, int D, int Kind, int Groups, int Stages>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    attention_prefill_sm90_chunk(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                 const __grid_constant__ TensorMap v_map, T *__restrict__ out, float *__restrict__ lse,
                                 const int *__restrict__ cu_q, const int *__restrict__ cu_k, const int *__restrict__ tables,
                                 const int *__restrict__ seq_lens, int batch, int q_tokens, int kv_tokens, int num_heads,
                                 int group, int max_blocks, int page_shift, int num_blocks, int items, int tall, int causal,
                                 float scale, float c) {
  static_assert(D == 128 && Groups == 2, "see the head of the file");
  extern __shared__ __align__(1024) unsigned char smem[];
  const Shared<D, Groups, Stages, CHUNK, 2, false> shared(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    shared.init();
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    fewer_registers<Registers<Groups>::Few>();
    produce<D, Kind>(shared, q_map, k_map, v_map, cu_q, cu_k, tables, seq_lens, batch, q_tokens, kv_tokens, num_heads, group,
                     max_blocks, page_shift, num_blocks, items, tall, causal);
  } else {  // consumers
    more_registers<Registers<Groups>::Many>();
    const int consumer = warpgroup - 1, warp = threadIdx.x >> 5 & 3;
    const u64 q_base = wgmma_descriptor(shared.queries + consumer * shared.Queries);
    const u64 k_base = wgmma_descriptor(shared.keys), v_base = wgmma_descriptor_n_major(shared.values, shared.Block);
    float s[CHUNK / 2], acc[D / 2], total[D / 2];
    u32 p0[TILE / 16][4], p1[TILE / 16][4];

    const Item *item;
    u32 n = 0, items_done = 0;  // the chunk that comes next, counted through all items; items before this one
    // chunks with a key that a row of this warpgroup sees; from `plain` on some rows do not see every key
    u32 begin = 0, end = 0, plain = 0;
    int steps, tiles = 0, q_slot = 0;
    auto key_of = [&](u32 t) { return (int)(t - begin) * CHUNK; };
    auto release = [&](u64 *empty, u32 tile, bool read = true) {  // this warp has read it
      if (lane == 0 && read) mbarrier_arrive(empty + tile % Stages);
    };
    auto keys_ready = [&](u32 t) { mbarrier_wait(shared.k_full + t % Stages, t / Stages & 1); };
    auto values_ready = [&](u32 t) {
      mbarrier_wait(shared.v_full + t % Stages, t / Stages & 1);
      if (t < plain || key_of(t) + CHUNK <= item->len) return;
      // rows past the end may hold anything: 0 * NaN is not 0
      unsigned char *const rows = shared.values + t % Stages * shared.Step;
      const int first = item->len - key_of(t);
#pragma unroll 1
      for (int i = threadIdx.x & 127; i < D / 64 * (CHUNK * 8); i += 128)
        if ((i >> 3 & (CHUNK - 1)) >= first) *reinterpret_cast<uint4 *>(rows + i * 16) = make_uint4(0, 0, 0, 0);
      async_proxy_fence();
      named_barrier_sync(1 + opaque(consumer), 128);
    };
    auto multiply_keys = [&](u32 t) {  // starts s = q k^T
      const u64 tile = k_base + t % Stages * (shared.Step >> 4), rows = q_base + q_slot * (shared.Queries >> 4);
      wgmma_pin(s);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
        Wgmma<T, CHUNK>::multiply(s, rows + kk / 4 * (8192 >> 4) + kk % 4 * 2, tile + kk / 4 * (shared.Block >> 4) + kk % 4 * 2,
                                  kk > 0);
      wgmma_commit();
    };
    auto multiply_values = [&](const u32(&p)[TILE / 16][4], u32 t, int half) {  // starts acc (+)= p v for a tile of the chunk
      const u64 tile = v_base + t % Stages * (shared.Step >> 4) + half * (TILE / 16 * 128);
      wgmma_pin(acc);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < TILE / 16; ++j)
        WgmmaRegisters<T, D, 1>::multiply(acc, p[j], tile + j * 128, j > 0 ? 1 : half);
      wgmma_commit();
    };
    auto mask = [&](u32 t) {
      if constexpr (Kind == Paged) {
        // by lane 0, which gives the stage back
        const u32 boxes = __shfl_sync(0xffffffffu, lane == 0 ? shared.lost[t % Stages] : 0u, 0);
        if (boxes != 0) lose_keys<CHUNK>(s, boxes, min(page_shift, 7));
      }
      if (t >= plain)
        mask_keys<CHUNK>(s, key_of(t) + (lane & 3) * 2, item->limit + consumer * 64 + warp * 16 + (lane >> 2), item->len);
    };
    // A turn begins with a chunk's products with K and ends in the exponentials of its first tile. Every consumer has one for
    // every step of an item, also for steps of which it sees no key, and one for an item without steps and for the end.
    auto await_turn = [&]() { named_barrier_sync(1 + Groups + opaque(consumer), 256); };
    auto pass_turn = [&]() { named_barrier_arrive(1 + Groups + opaque(1 - consumer), 256); };
    auto pass_turn_if = [&](bool yes) { named_barrier_arrive_if(yes, 1 + Groups + opaque(1 - consumer), 256); };
    if (consumer == 1) pass_turn();
    // Merging a chunk takes the totals' factor while its own products run, and its accumulators while the next one's
    // exponentials do.
    ChunkMerge merge[2];
    auto scale_totals = [&](int j) {
#pragma unroll
      for (int e = j * (D / 8); e < (j + 1) * (D / 8); ++e) total[e] = merge[e >> 1 & 1].scaled(total[e]);
    };
    auto add_chunk = [&](int j) {
#pragma unroll
      for (int e = j * (D / 8); e < (j + 1) * (D / 8); ++e) total[e] = merge[e >> 1 & 1].add_scaled(total[e], acc[e]);
    };

    // What comes next, and its first products.
    auto begin_item = [&]() {
      q_slot = (items_done & 1) * Groups;
      mbarrier_wait(shared.q_full + q_slot + consumer, items_done >> 1 & 1);
      item = shared.items + items_done % ITEMS;
      auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };  // into registers that a warp shares
      steps = uniform(item->steps);
      const int row0 = consumer * 64, limit = item->limit + row0;
      const int seen = row0 < item->rows ? min(min(item->rows - row0, 64) - 1 + limit, item->len) : 0;
      tiles = uniform(ceil_div(max(seen, 0), TILE));
      begin = n;
      end = n + ceil_div(tiles, 2);
      plain = n + uniform(min(max(limit, 0), item->len) / CHUNK);
      if (steps > 0) keys_ready(n);
      await_turn();
      multiply_keys(n);  // even where there are none: what is under way must not depend on it
      pass_turn();       // already: the item before is stored first
    };

    begin_item();
    while (steps >= 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        merge[i].reset();
        merge[i].b = 1.f;  // the chunk before the first, of zeros
      }
#pragma unroll
      for (int e = 0; e < D / 2; ++e) total[e] = 0.f;
      wgmma_wait<0>();
      wgmma_pin(s);
      if (n != end) {
#pragma unroll
        for (int e = 0; e < D / 2; ++e) acc[e] = 0.f;
        float corr[2];
        for (;; ++n) {
          float m[2], l[2], sum[2], mc[2][2];
          mask(n);
          release(shared.k_empty, n);
          if (n + 1 == end && lane == 0) mbarrier_arrive(shared.q_empty + q_slot + consumer);
          chunk_maxima(s, m, mc, corr, c);
          ChunkMerge next[2] = {merge[0], merge[1]};
#pragma unroll
          for (int i = 0; i < 2; ++i) next[i].weigh(m[i], c);
          wgmma_wait<0>();
          wgmma_pin(acc);
          release(shared.v_empty, n - 1, n != begin);
          tile_exponentials<T, 0>(s, p0, l, mc[0], c, [&](int j) {
            add_chunk(j);
            if (j == 1) pass_turn_if(n != begin);
          });
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            merge[i] = next[i];
            computed(merge[i].a, merge[i].b);
          }
          if (n + 1 == end && (tiles & 1) != 0) {  // no row sees the second tile
            values_ready(n);
            multiply_values(p0, n, 0);
#pragma unroll
            for (int i = 0; i < 2; ++i) merge[i].add_sum(l[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) scale_totals(j);
            break;
          }
          values_ready(n);
          multiply_values(p0, n, 0);
          tile_exponentials<T, 1>(s, p1, sum, mc[1], c, scale_totals);
#pragma unroll
          for (int i = 0; i < 2; ++i) merge[i].add_sum(update_sum(l[i], corr[i], sum[i]));
          if (n + 1 == end) break;
          keys_ready(n + 1);
          wgmma_wait<0>();
          wgmma_pin(acc);
          rescale(acc, corr);
          await_turn();
          multiply_keys(n + 1);
          multiply_values(p1, n, 1);
          wgmma_wait<1>();
          wgmma_pin(s);
        }
        wgmma_wait<0>();
        wgmma_pin(acc);
        if ((tiles & 1) == 0) {
          rescale(acc, corr);
          multiply_values(p1, n, 1);
          wgmma_wait<0>();
          wgmma_pin(acc);
        }
        release(shared.v_empty, n);
#pragma unroll
        for (int j = 0; j < 4; ++j) add_chunk(j);
      } else if (lane == 0) {
        mbarrier_arrive(shared.q_empty + q_slot + consumer);
      }
      for (u32 t = end; t != begin + steps; ++t) {  // chunks for the other warpgroup
        if (t != begin) {
          await_turn();
          pass_turn();
        }
        keys_ready(t);
        release(shared.k_empty, t);
        mbarrier_wait(shared.v_full + t % Stages, t / Stages & 1);
        release(shared.v_empty, t);
      }

      const Item *const done = item;
      const int slot = items_done % ITEMS;
      n = begin + steps;
      ++items_done;
      begin_item();  // its first products run while this one is written
      const int valid = done->rows - consumer * 64, head = done->head;
      const i64 out_row = done->out_row + consumer * 64;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(merge[i].L), norm = softmax_norm(sum);
        const int row = warp * 16 + (lane >> 2) + 8 * i;
        if (lse != nullptr && (lane & 3) == 0 && row < valid)
          lse[(out_row + row) * num_heads + head] = softmax_lse(merge[i].M, sum, scale);
#pragma unroll
        for (int e = 0; e < D / 2; ++e)
          if ((e >> 1 & 1) == i) total[e] = __fmul_rn(total[e], norm);
      }
      mbarrier_arrive(shared.item_empty + slot);
      store_halves<D>(total, out + out_row * num_heads * D, 0, head * D, valid, num_heads * D);
    }
    wgmma_wait<0>();
    wgmma_pin(s);
  }
}
