// One decoded token of a whole Qwen3 for up to 16 sequences: a single cooperative launch, one block of 512 threads on every
// multiprocessor, logits out. Between products the blocks wait for each other's results; the weights do not (see
// decode/stream.cuh): the memory stream runs ahead through products and layers as far as shared memory reaches.
//
// A layer   1 RMSNorm (every block for itself), QKV product              4 RMSNorm, gate|up product, SwiGLU
//           2 head norms, rotation, cache write, attention by chunks     5 down product, added to the residual
//           3 output product, added to the residual
//           then the last norm and the head. Results reach the other blocks as tagged words, or (DIRECT 0: many rows) with a
//           barrier after each; a sequence of many chunks takes one more exchange behind 2, see decode/merge.cuh. Attention is
//           the work of teams of warps, or where there is more of it of single warps (decode/warp_attention.cuh).
// Layouts   as the operators have them: weights [N, K], caches [L, blocks, Hkv, page, D], tables [ROWS, max_blocks];
//           partial results of attention as in attention_decode.cu, logits float [ROWS, V]. What goes from block to block
//           (see Link): qkv T [ROWS, (Hq + 2 Hkv) D], attended T [ROWS, Hq D], gated T [ROWS, I], the residual stream behind
//           attention and behind the MLP, float [ROWS, H] each; parts of attention with their statistics.
//           layers: one entry of LayerPointers a layer. state: [0] the barrier's counter, [1 + block] launches so far.
//           value_map: tensor map of v_cache, for decode/values.cuh, or null.
// Bound     bytes of all weights, and of the keys and values of the sequences
// Launch    cooperative, gridDim.x = blocks that fit (one a multiprocessor), 512 threads, dynamic shared memory SHARED_BYTES
// Numerics  the bits of every result are those of the operators called one after another (docs/numerics.md)
// Template  T half | bf16; the model and the batch by macros, see decode/shape.cuh
// PROFILE   every warp writes its clock at points of each layer (MARK) into `stamps` [gridDim.x, LAYERS + 1, MARKS, WARPS]
// Measured: 57 % of 4.8 TB/s (Qwen3-0.6B, batch 1, context 128), 60 % (context 4,096), 71 % (32,768), 76 % (4B, context 128),
//           84 % (8B); H200, docs/performance.md
#include "decode/merge.cuh"
#include "decode/warp_attention.cuh"
#include "ptx/grid_barrier.cuh"

#if PROFILE
#define MARKS_OF(layer)                                                                        \
  if ((threadIdx.x & 31) == 0)                                                                 \
  const_cast<Plan &>(plan).marks[threadIdx.x >> 5] =                                           \
      stamps + ((i64)blockIdx.x * (LAYERS + 1) + (layer)) * MARKS * WARPS + (threadIdx.x >> 5)
#else
#define MARKS_OF(layer)
#endif

// Norm weights come from memory, a block asks for them long before they are used: those of the second half of a layer and of
// the first half of the next (or the last ones).
__device__ __forceinline__ void fetch_norms(const LayerPointers &layer, const LayerPointers *next, const float *final_norm) {
  auto fetch = [](u64 from, int floats) {
    for (int i = threadIdx.x * 32; i < floats; i += THREADS * 32) prefetch_line(reinterpret_cast<const float *>(from) + i);
  };
  fetch(layer.post_norm, HIDDEN);
  fetch(next != nullptr ? next->input_norm : reinterpret_cast<u64>(final_norm), HIDDEN);
  if (next == nullptr) return;
  fetch(next->q_norm, HEAD_DIM);
  fetch(next->k_norm, HEAD_DIM);
}

// State of each sequence, tables of this block's work, the rotations: everything that stays the same for the whole step. The
// caller's block barrier follows, before which the weights can be asked for.
template <class T>
__device__ __forceinline__ void prepare(unsigned char *shared, const int *token_ids, const int *positions, const i64 *slots,
                                        const int *tables, const int *seq_lens, const LayerPointers *layers, const T *head,
                                        const T *embedding, const float *rope, i64 rope_length, int max_blocks,
                                        int page_shift, int num_blocks) {
  RowState *const rows = reinterpret_cast<RowState *>(shared + Shared::rows);
  Plan &plan = *reinterpret_cast<Plan *>(shared + Shared::plan);
  float *const rotations = reinterpret_cast<float *>(shared + Shared::rotations);
  const int thread = threadIdx.x;
  // Rows of q and p beyond the heads of an item are of no use, but are read.
  for (int i = thread; i < TEAMS * TeamShared::bytes / 16; i += THREADS)
    reinterpret_cast<uint4 *>(shared + Shared::teams)[i] = make_uint4(0, 0, 0, 0);
  // What comes from memory is the work of different warps, so that they wait for it side by side.
  constexpr int Pointers = LAYERS * (int)(sizeof(LayerPointers) / 8), Owners = ROWS <= 2 ? 64 : 256;
  int longest = 0;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) longest = max(longest, seq_lens[row]);
  const bool spared = longest <= TEAMS * KEYS;  // no sequence has more chunks than a block has teams, see Attention::couples
  if (thread < 5) {
    plan.first[thread] = first_tile(thread, blockIdx.x, spared);
    plan.units[thread] = (first_tile(thread, blockIdx.x + 1, spared) - plan.first[thread]) * product_units(thread);
    plan.dealt[thread] = in_runs(thread) ? min(plan.units[thread], STREAMS) : plan.units[thread];
  } else if (thread < 32) {
    if (thread == 5) plan.head = reinterpret_cast<u64>(head);
    if (thread == 6) *reinterpret_cast<uint4 *>(shared + Shared::zeros) = make_uint4(0, 0, 0, 0);
  } else if (thread < 64) {
    const int self = thread - 32;
    if (self < ROWS) {
      RowState row;
      row.slot = slots[self];
      row.length = (int)min((i64)max(seq_lens[self], 0), min((i64)max_blocks << page_shift, (i64)0x7fffffff));
      row.chunks = max(1, ceil_div(row.length, KEYS));
      row.first_item = 0;
      row.embedding = token_ids[self] >= 0 && token_ids[self] < VOCAB ? token_ids[self] : -1;
      i64 position;
      row.position_inside = table_row(positions[self], rope_length, position);
      const int last = row.length - 1;
      row.slot_of_last =
          last >= 0 && row.slot >= 0 && row.slot < (i64)num_blocks << page_shift &&
          row.slot == ((i64)tables[(i64)self * max_blocks + (last >> page_shift)] << page_shift) +
                          (last & ((1 << page_shift) - 1));
      rows[self] = row;
    }
  } else if (thread < 64 + Owners) {
    // This block's columns of the residual stream.
    float *const own = reinterpret_cast<float *>(shared + Shared::own);
    const int first = first_tile(O, blockIdx.x, spared) * 8, columns = first_tile(O, blockIdx.x + 1, spared) * 8 - first;
    for (int i = thread - 64; i < ROWS * columns; i += Owners) {
      const int row = i / columns, column = i % columns, id = token_ids[row];
      own[row * OWNED * 8 + column] =
          id < 0 || id >= VOCAB ? CUKERN_NAN : to_float(embedding[(i64)id * HIDDEN + first + column]);
    }
  } else {
    for (int i = thread - 64 - Owners; i < Pointers; i += THREADS - 64 - Owners)
      reinterpret_cast<u64 *>(plan.layers)[i] = reinterpret_cast<const u64 *>(layers)[i];
  }
  for (int i = THREADS - 1 - thread; i < ROWS * HEAD_DIM; i += THREADS) {
    i64 position;
    table_row(positions[i / HEAD_DIM], rope_length, position);
    rotations[i] = rope[position * HEAD_DIM + i % HEAD_DIM];
  }
  __syncthreads();
  if (thread == 0) {
    int items = 0;
    for (int row = 0; row < ROWS; ++row) {
      rows[row].first_item = items;
      items += rows[row].chunks * KV_HEADS;
    }
  }
}

template <int N> struct IntTag {
  static constexpr int value = N;
};

template <class T>
__global__ void __launch_bounds__(THREADS, 1)
    decode_step(const int *token_ids, const int *positions, const i64 *slots, const int *tables, const int *seq_lens,
                const LayerPointers *layers, const unsigned char *weights, const T *embedding, const T *head,
                const float *final_norm, const float *rope, T *k_cache, T *v_cache, u64 *qkv, u64 *attended,
                u64 *after_attention, u64 *gated, u64 *after_mlp, u64 *part_words, float *part_acc, float *part_stats,
                float *logits, u64 *state, u32 *stamps, const TensorMap *value_map, i64 rope_length, int max_blocks,
                int page_shift, int num_blocks, int max_chunks, float eps, float c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  T *const zeros = reinterpret_cast<T *>(shared + Shared::zeros), *const x = reinterpret_cast<T *>(shared + Shared::x);
  float *const partial = reinterpret_cast<float *>(shared + Shared::partial);
  float *const own = reinterpret_cast<float *>(shared + Shared::own);
  float *const groups = reinterpret_cast<float *>(shared + Shared::groups);
  const RowState *const rows = reinterpret_cast<const RowState *>(shared + Shared::rows);
  const Plan &plan = *reinterpret_cast<const Plan *>(shared + Shared::plan);

  u32 tag = (u32)state[1 + blockIdx.x] * LAYERS;  // of the layer before
  prepare<T>(shared, token_ids, positions, slots, tables, seq_lens, layers, head, embedding, rope, rope_length, max_blocks,
             page_shift, num_blocks);
  WeightStream<T> stream(reinterpret_cast<T *>(shared) + stream_index() * RING_SLOTS * RING_ELEMENTS, plan);
  stream.start();
  __syncthreads();  // the sequences' first items are known
  // This warp's next unit, counted from the start of the next product.
  int unit = stream_index() >= 0 ? stream_index() : 0x3fffffff;

  GridBarrier barrier(state);
  auto sent = [&]() {
    if (!DIRECT) barrier.arrive();
  };
  auto meet = [&]() {
    if (DIRECT)
      meet_senders();
    else
      barrier.wait();
  };

  Attention<T> attention{shared, rows, tables, max_blocks, page_shift, num_blocks, max_chunks, eps, c, part_acc, part_stats,
                         part_words, Link{attended, 0}, Link{qkv, 0}, plan};
  const ValueCopies copies{shared, plan, value_map, page_shift, num_blocks};
  const bool last_warp = threadIdx.x >= THREADS - 32;
  if (threadIdx.x == 0) copies.start();
  attention.choose();
  auto layer_cache = [&](int layer) { return LayerCache<T>{k_cache, v_cache, layer, num_blocks, page_shift}; };
  auto fetch_first_item = [&](int layer) {
    stream.issued = 0;
    if (attention.alone()) return WarpAttention<T>(attention).start(layer_cache(layer));
    if (layer == 0 && last_warp) copies.ask(0, 0, ValueCopies::Count);
    if (attention.item_count() == 0 || copies.used(Attention<T>::team())) return cp_async_commit();
    const Item item = attention.first();
    const int first_pages = attention.first_pages();
    attention.copy_values(item, first_pages, layer_cache(layer).values());
    if (attention.couples()) attention.prefetch_keys(item, first_pages, layer_cache(layer).keys());
  };
  NormWeights norm;
  // Of what other blocks have sent, or of the tokens' embeddings where the layer is 0.
  auto norm_from = [&](auto product, int layer, const Link &link, int point) {
    norm_rows<decltype(product)::value>(x, groups, norm, eps,
                                        [&](Vec<float, 4>(&v)[NORM_STEPS], int row, int column, bool wanted) {
      if (layer > 0) {
        if (BY_ENGINE && decltype(product)::value == QKV && threadIdx.x >> 5 == NORM_WARPS) copies.ask_in_turns(layer);
        link.receive_floats<HIDDEN>(v, row, column, wanted);
        if (decltype(product)::value == QKV && threadIdx.x == 0) copies.rows_have_come();
      } else {
        const int id = rows[row].embedding;
#pragma unroll
        for (int step = 0; step < NORM_STEPS; ++step) {
          const bool inside = column + step * 1024 < HIDDEN;
          const Vec<T, 4> e = load_vec<T, 4>(embedding + (i64)max(id, 0) * HIDDEN + (inside ? column + step * 1024 : 0));
#pragma unroll
          for (int j = 0; j < 4; ++j) v[step].v[j] = !wanted || !inside ? 0.f : id < 0 ? CUKERN_NAN : to_float(e.v[j]);
        }
      }
      MARK(plan, point);
      (void)point;
    });
  };

#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const LayerPointers &w = plan.layers[layer];
    // ---- 1: QKV. What does not depend on the layer before is fetched while waiting for it.
    Ahead<T> ahead;
    norm.announce(reinterpret_cast<const float *>(w.input_norm));
    if (!OVERLAY) fetch_first_item(layer);
    if (blockIdx.x == gridDim.x - 1) fetch_norms(w, layer + 1 < LAYERS ? plan.layers + layer + 1 : nullptr, final_norm);
    ahead.template load<QKV, OVERLAY ? 0 : 1>(stream, unit);
    MARKS_OF(layer);
    MARK(plan, 0);
    if (layer > 0) meet();
    if (plan.units[QKV] > 0)
      norm_from(IntTag<QKV>{}, layer, Link{after_mlp, tag}, 1);
    else if (layer > 0 && last_warp)
      copies.ask(layer, ValueCopies::EndBehindO, ValueCopies::Count);
    ++tag;
    MARK(plan, 2);
    attention.qkv.tag = attention.out.tag = tag;
    multiply<QKV>(stream, unit, x, zeros, partial, ahead,
                  StoreRounded<QKV_SIZE, T>{reinterpret_cast<const float *>(w.qkv_bias), attention.qkv});
    sent();
    if (OVERLAY) fetch_first_item(layer);

    // ---- 2: attention
    const int item_count = attention.alone() ? 0 : attention.item_count();
    if (PAIRS || held_slots(QKV) > 0) stream.fill_with_heads(item_count > 0 || attention.alone());
    if (attention.alone()) {
      const int self = this_thread();
      const float *const norms = reinterpret_cast<const float *>(self < HEAD_DIM ? w.q_norm : w.k_norm);
      const float head_norm = self < 2 * HEAD_DIM ? norms[self % HEAD_DIM] : 0.f;
      meet();
      MARK(plan, 9);
      if (self < 2 * HEAD_DIM) attention.template block_state<float>(WarpShared::head_norms)[self] = head_norm;
      __syncthreads();
      WarpAttention<T>(attention).run(layer_cache(layer), stream.issued);
    } else if (item_count > 0) {
      T *const layer_k = layer_cache(layer).keys(), *const layer_v = layer_cache(layer).values();
      Item item = attention.first();
      typename Attention<T>::Keys keys;
      const int self = attention.team_thread();
      const float *const norms = reinterpret_cast<const float *>(self < HEAD_DIM ? w.q_norm : w.k_norm);
      const float head_norm = self < 2 * HEAD_DIM ? norms[self % HEAD_DIM] : 0.f;
      attention.load_keys(keys, item, attention.first_pages(), layer_k);
      Item next = item_count > 1 ? attention.next(item) : item;
      int pages = item_count > 1 ? attention.pages(next) : -1;
      meet();
      MARK(plan, 9);
      if (self < 2 * HEAD_DIM) attention.template mine<float>(TeamShared::head_norms)[self] = head_norm;
      attention.team_barrier();
      int later = stream.issued;
      bool queries_there = false;
#pragma unroll 1
      for (int left = item_count; left > 0; --left) {
        const bool more = left > 1;
        const Item behind = left > 2 ? attention.next(next) : next;
        const int pages_behind = left > 2 ? attention.pages(behind) : -1;
        attention.attend(
            item, keys, later, queries_there, more, layer_k, layer_v,
            [&]() { if (more) attention.load_keys(keys, next, pages, layer_k); },
            [&]() { if (more) attention.copy_values(next, pages, layer_v); },
            [&]() {
              if (!PAIRS || attention.couples() || stream.due != O || more) return 0;
              stream.template fill_unit<1>();  // where every block computes heads, the next exchange is far away
              return PAIR_CHUNKS;
            },
            [&]() { if (left == item_count) copies.wait(Attention<T>::team(), layer); });
        queries_there = next.row == item.row && next.kv_head == item.kv_head;
        item = next;
        next = behind;
        pages = pages_behind;
        later = 0;
      }
    } else {
      meet();
      MARK(plan, 9);
    }
    MARK(plan, 21);
    if (DIRECT && OVERLAY) __syncthreads();  // the values may be overwritten
    if (!attention.couples()) {
      if constexpr (DIRECT) {
        __syncthreads();  // the values may be overwritten
        meet_senders();
        merge_received(attention, *reinterpret_cast<ReceivedParts *>(shared + Shared::kv));
        copies.release();
      } else {
        barrier.arrive();
        barrier.wait();
        merge_long(attention, *reinterpret_cast<MergeMemory *>(shared + Shared::kv));
      }
      // What teams of several items and single warps have put off, and the next layer's keys: memory has time now. Behind
      // single warps, though, some blocks are still receiving when the first warps of others are done.
      if (PAIRS && attention.alone()) __syncthreads();
      if (PAIRS && stream.due == O) stream.template fill_unit<1>();
      if (!attention.alone() && layer + 1 < LAYERS) attention.prefetch_first_keys(layer_cache(layer + 1).keys());
    }
    MARK(plan, 22);
    sent();
    meet();

    // ---- 3: output product
    ahead.template load<O>(stream, unit);
    if (plan.units[O] > 0) {
      load_rows<O>(x, attention.out);
      MARK(plan, 23);
      __syncthreads();
    }
    const bool values_next = BY_ENGINE && layer + 1 < LAYERS;
    // By a warp without a unit, if there is one.
    if (values_next && plan.units[O] > 0 && unit == min(plan.units[O], STREAMS - 1))
      copies.ask(layer + 1, 0, ValueCopies::EndWithRows);
    MARK(plan, 24);
    const int own_column = plan.first[O] * 8;
    multiply<O>(stream, unit, x, zeros, partial, ahead,
                AddToResidual<T>{reinterpret_cast<const float *>(w.o_bias), own, Link{after_attention, tag}, own_column});
    sent();
    norm.announce(reinterpret_cast<const float *>(w.post_norm));
    MARK(plan, 31);
    meet();

    // ---- 4: gate and up
    // A block without a part of the output product had no barrier behind its merge before.
    if (values_next && last_warp)
      copies.ask(layer + 1, plan.units[O] > 0 ? ValueCopies::EndWithRows : 0, ValueCopies::EndBehindO);
    ahead.template load<GATE_UP>(stream, unit);
    if (plan.units[GATE_UP] > 0) norm_from(IntTag<GATE_UP>{}, LAYERS, Link{after_attention, tag}, 32);
    MARK(plan, 33);
    multiply<GATE_UP>(stream, unit, x, zeros, partial, ahead, StoreSwiglu<T>{Link{gated, tag}});
    sent();
    meet();

    // ---- 5: down
    ahead.template load<DOWN>(stream, unit);
    if (plan.units[DOWN] > 0) {
      load_rows<DOWN>(x, Link{gated, tag});
      MARK(plan, 40);
      __syncthreads();
    }
    MARK(plan, 41);
    multiply<DOWN>(stream, unit, x, zeros, partial, ahead, AddToResidual<T>{nullptr, own, Link{after_mlp, tag}, own_column});
    sent();
  }
  norm.announce(final_norm);
  Ahead<T> ahead;
  MARKS_OF(LAYERS);
  MARK(plan, 0);
  meet();
  if (plan.units[HEAD] > 0) norm_from(IntTag<HEAD>{}, LAYERS, Link{after_mlp, tag}, 1);
  MARK(plan, 2);
  multiply<HEAD>(stream, unit, x, zeros, partial, ahead, StoreLogits<T>{logits});
  cp_async_wait<0>();
  if (threadIdx.x == 0) ++state[1 + blockIdx.x];
  (void)weights;
  (void)stamps;
}
