// Attention over whole sequences or chunks of them on Hopper's tensor cores (sm_90a only), FlashAttention-3 shape. Head
// dimension 64; attention_prefill_sm90_chunk.cu has 128.
// Formula   out = softmax(scale * q k^T + mask) v per query head; head h reads key/value head h / group. Causal: query
//           i of n sees the keys j <= i + kv_len - n. lse = log sum exp(scale * q k^T).
// Layouts   q, k, v through tensor maps of five dimensions (64 columns, token, block of 64 columns, head, sequence or page);
//           dense, packed + cu_seqlens or pages + tables, as in attention_prefill.cu; out [tokens, Hq, D] without gaps,
//           lse float [tokens, Hq]. Bases and strides are multiples of 16 bytes.
// Bound     tensor cores: 4 * D flops per query-key pair; exponentials hardly less.
// Launch    Persistent: at most one block to a multiprocessor, (Groups + 1) * 128 threads. Work items are pairs (query tile of
//           64 * Groups rows, or 64 fewer, head) in the order of prefill/order.cuh, dealt out forwards and backwards in turn.
//           Of the first warpgroup, one warp finds work, one copies queries and keys, one values. The others, the consumers,
//           own 64 query rows each and start their products in turn: one multiplies while the others take exponentials.
// Template  T half | bf16; D = 64; Kind of layout; Groups consumer warpgroups; Stages of the rings of K and of V, 64 keys each.
//           Q and P come from registers.
// Numerics  tiles of 64 keys, chunks of 128 keys from key 0, merged in ascending order by common/softmax.cuh: the bits of
//           attention_prefill.cu.
// Measured  54 % of 790 TFLOP/s (8,192, 16/8 heads, causal), 1.06 x cuDNN; H200, docs/performance.md
#include "common/fragment_rows.cuh"
#include "common/softmax.cuh"
#include "prefill/consumer.cuh"
#include "prefill/producer.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/wgmma.cuh"

// Turns the scores of a tile into p, packed as A fragments, and updates m and l. First: of a chunk; m and l are then written
// only. Otherwise the accumulators are to be multiplied by `corr`.
template <class T, bool First>
__device__ __forceinline__ void softmax_tile(float (&s)[TILE / 2], u32 (&p)[TILE / 16][4], float (&m)[2], float (&l)[2],
                                             float (&corr)[2], float c) {
  float mc[2], sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = First ? -CUKERN_INF : m[i];
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n) top = fmaxf(top, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
    top = quad_max(top);
    if constexpr (!First) corr[i] = rescale_factor(m[i], top, c);
    mc[i] = __fmul_rn(finite_max(top), c);
    m[i] = top;
  }
#pragma unroll
  for (int j = 0; j < TILE / 16; ++j) {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = softmax_exp(s[8 * j + i], c, mc[i >> 1 & 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = group_sum(e[2 * i], e[2 * i + 1], e[4 + 2 * i], e[4 + 2 * i + 1]);
      sum[i] = j == 0 ? g : sum[i] + g;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) p[j][i] = pack2<T>(e[2 * i], e[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) l[i] = First ? sum[i] : update_sum(l[i], corr[i], sum[i]);
}

template <class T, int D, int Kind, int Groups, int Stages>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    attention_prefill_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, T *__restrict__ out, float *__restrict__ lse,
                           const int *__restrict__ cu_q, const int *__restrict__ cu_k, const int *__restrict__ tables,
                           const int *__restrict__ seq_lens, int batch, int q_tokens, int kv_tokens, int num_heads, int group,
                           int max_blocks, int page_shift, int num_blocks, int items, int tall, int causal, float scale,
                           float c) {
  static_assert(D == 64, "see the head of the file");
  extern __shared__ __align__(1024) unsigned char smem[];
  const Shared<D, Groups, Stages, TILE, 1, true> shared(smem);
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
    const unsigned char *const s_q = shared.queries + consumer * shared.Step + (warp * 16 + (lane & 15)) * 128;
    const u64 k_base = wgmma_descriptor(shared.keys), v_base = wgmma_descriptor_n_major(shared.values, shared.Block);
    Kept *const kept = shared.kept + consumer * 128 + (threadIdx.x & 127);
    float s[TILE / 2], acc[D / 2], total[D / 2];
    u32 q[D / 16][4], even[TILE / 16][4], odd[TILE / 16][4];

    // The warpgroups start their products in turn: one multiplies while the others take exponentials.
    if (consumer == Groups - 1) named_barrier_arrive(4, 256);
    u32 n = 0;  // the tile that comes next, counted through all items
    for (u32 items_done = 0;; ++items_done) {
      mbarrier_wait(shared.q_full + consumer, items_done & 1);
      const Item *const item = shared.items + items_done % ITEMS;
      auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };  // into registers that a warp shares
      const int steps = uniform(item->steps);
      if (steps < 0) break;
      // tiles with a key that a row of this warpgroup sees; from tile `plain` on some do not see every key
      const int row0 = consumer * 64, limit = item->limit + row0;
      const int seen = row0 < item->rows ? min(min(item->rows - row0, 64) - 1 + limit, item->len) : 0;
      const u32 end = n + uniform(ceil_div(max(seen, 0), TILE));
      const u32 plain = n + uniform(min(max(limit, 0), item->len) / TILE), begin = n;
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
        ldmatrix_x4(q[kk], s_q + kk / 4 * shared.Block + ((kk % 4 * 2 + (lane >> 4) ^ (lane & 7)) << 4));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.q_empty + consumer);

      auto key_of = [&](u32 t) { return (int)(t - begin) * TILE; };
      auto release = [&](u64 *empty, u32 tile) {  // this warp has read it
        if (lane == 0) mbarrier_arrive(empty + tile % Stages);
      };
      auto keys_ready = [&](u32 t) { mbarrier_wait(shared.k_full + t % Stages, t / Stages & 1); };
      auto multiply_keys = [&](u32 t) {  // starts s = q k^T
        const u64 tile = k_base + (u64)(t % Stages * (shared.Step >> 4));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
          WgmmaRegisters<T, TILE, 0>::multiply(s, q[kk], tile + kk / 4 * (shared.Block >> 4) + kk % 4 * 2, kk > 0);
        wgmma_commit();
      };
      auto values_ready = [&](u32 t) {
        mbarrier_wait(shared.v_full + t % Stages, t / Stages & 1);
        if (t >= plain && key_of(t) + TILE > item->len) {  // rows past the end may hold anything: 0 * NaN is not 0
          unsigned char *const rows = shared.values + t % Stages * shared.Step;
          const int first = item->len - key_of(t);
#pragma unroll 1
          for (int i = threadIdx.x & 127; i < D / 64 * (TILE * 8); i += 128)
            if ((i >> 3 & (TILE - 1)) >= first) *reinterpret_cast<uint4 *>(rows + i * 16) = make_uint4(0, 0, 0, 0);
          async_proxy_fence();
          named_barrier_sync(1 + consumer, 128);
        }
      };
      auto multiply_values = [&](const u32(&p)[TILE / 16][4], u32 t, int accumulate) {  // starts acc (+)= p v
        const u64 tile = v_base + (u64)(t % Stages * (shared.Step >> 4));
        wgmma_pin(acc);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j)
          WgmmaRegisters<T, D, 1>::multiply(acc, p[j], tile + j * 128, j > 0 ? 1 : accumulate);
        wgmma_commit();
      };
      auto take_turn = [&]() { named_barrier_sync(4 + consumer, 256); };
      auto pass_turn = [&]() { named_barrier_arrive(4 + (consumer + 1) % Groups, 256); };
      auto mask = [&](u32 t) {
        if constexpr (Kind == Paged) {
          // by lane 0, which gives the stage back
          const u32 boxes = __shfl_sync(0xffffffffu, lane == 0 ? shared.lost[t % Stages] : 0u, 0);
          if (boxes != 0) lose_keys<TILE>(s, boxes, min(page_shift, 6));
        }
        if (t >= plain)
          mask_keys<TILE>(s, key_of(t) + (lane & 3) * 2, item->limit + consumer * 64 + warp * 16 + (lane >> 2), item->len);
      };
      float m[2], l[2], corr[2], a[2], b[2];
      *kept = Kept{{-CUKERN_INF, -CUKERN_INF, 0.f, 0.f}};
      auto values_done = [&](u32(&p)[TILE / 16][4], u32 t) {
        wgmma_pin(acc);
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) wgmma_pin(p[j]);
        release(shared.v_empty, t);
      };

#pragma unroll
      for (int e = 0; e < D / 2; ++e) total[e] = 0.f;
      if (n != end) {
        keys_ready(n);
        multiply_keys(n);
        wgmma_commit();  // an empty group, in the place of the products with V
        for (;; n += 2) {
          wgmma_wait<1>();
          wgmma_pin(s);
          mask(n);
          release(shared.k_empty, n);
          softmax_tile<T, true>(s, even, m, l, corr, c);
          values_ready(n);
          if (n + 1 == end) {
            wgmma_wait<0>();
            if (n != begin) {
              values_done(odd, n - 1);
              add_chunk(total, acc, a, b);
            }
            end_chunk(kept, m, l, c, a, b);
            take_turn();
            multiply_values(even, n, 0);
            pass_turn();
            break;
          }
          keys_ready(n + 1);
          wgmma_wait<0>();
          if (n != begin) {
            values_done(odd, n - 1);
            add_chunk(total, acc, a, b);
          }
          take_turn();
          multiply_keys(n + 1);
          multiply_values(even, n, 0);
          pass_turn();

          wgmma_wait<1>();
          wgmma_pin(s);
          mask(n + 1);
          release(shared.k_empty, n + 1);
          softmax_tile<T, false>(s, odd, m, l, corr, c);
          end_chunk(kept, m, l, c, a, b);
          values_ready(n + 1);
          if (n + 2 == end) {
            wgmma_wait<0>();
            values_done(even, n);
            rescale(acc, corr);
            take_turn();
            multiply_values(odd, n + 1, 1);
            pass_turn();
            break;
          }
          keys_ready(n + 2);
          wgmma_wait<0>();
          values_done(even, n);
          rescale(acc, corr);
          take_turn();
          multiply_keys(n + 2);
          multiply_values(odd, n + 1, 1);
          pass_turn();
        }
        wgmma_wait<0>();
        values_done(odd, end - 1);
        add_chunk(total, acc, a, b);
      }
      for (u32 t = end; t != begin + steps; ++t) {  // tiles for the other warpgroups
        take_turn();
        pass_turn();
        mbarrier_wait(shared.k_full + t % Stages, t / Stages & 1);
        release(shared.k_empty, t);
        mbarrier_wait(shared.v_full + t % Stages, t / Stages & 1);
        release(shared.v_empty, t);
      }
      n = begin + steps;

      const int valid = item->rows - consumer * 64, head = item->head;
      const i64 out_row = item->out_row + consumer * 64;
      const Kept last = *kept;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(last.v[2 + i]), norm = softmax_norm(sum);
        const int row = warp * 16 + (lane >> 2) + 8 * i;
        if (lse != nullptr && (lane & 3) == 0 && row < valid)
          lse[(out_row + row) * num_heads + head] = softmax_lse(last.v[i], sum, scale);
#pragma unroll
        for (int e = 0; e < D / 2; ++e)
          if ((e >> 1 & 1) == i) total[e] = __fmul_rn(total[e], norm);
      }
      mbarrier_arrive(shared.item_empty + items_done % ITEMS);
      store_halves<D>(total, out + out_row * num_heads * D, 0, head * D, valid, num_heads * D);
    }
  }
}
