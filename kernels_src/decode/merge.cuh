// The parts that the chunks of a long sequence have left, merged in ascending order, some columns of a head at a time, and sent
// on as its attention output. Same bits as merge_chunks. By all blocks.
// Test: tests/test_decode_step.py
#pragma once
#include "decode/attention.cuh"

// With DIRECT, what is received of the chunks of a head, some columns of it: in turns, so that those chunks are added up
// already that have no late ones before them. 16 columns where there are blocks for that, else 32: fewer have two jobs.
struct __align__(16) ReceivedParts {
  static constexpr bool Wide = HEAD_DIM % 32 == 0 && ROWS * HEADS * (HEAD_DIM / 16) > BLOCKS;
  static constexpr int Columns = Wide ? 32 : 16, Pieces = Columns / 4 + 1;  // pieces: four words of a part, for one thread
  static constexpr int Receivers = THREADS - 64;
  static constexpr int Batch = Wide ? 16 : 24, Turn = Receivers / Pieces / Batch * Batch, Turns = 4, Parts = Turns * Turn;
  // Chunks of a turn: where one round of the receivers is enough, a batch.
  __device__ __forceinline__ static int turn_of(int count) { return count <= Turn ? Batch : Turn; }
  float values[Parts][Columns + 4];  // sums, then l of the four lanes
  float a[Parts], b[Parts];          // weights of the total and of the chunk, see ChunkMerge
  u32 rescaled[Turns];               // eight bits a batch: whether a weight of the total is not 1
};
static_assert(ReceivedParts::Turn <= ReceivedParts::Turns * ReceivedParts::Batch, "turns of one batch each");
static_assert(sizeof(ReceivedParts) <= sizeof(MergeMemory), "decode_step.py counts the larger one");

// Barriers of a turn: of the receivers and warp 0, of warp 1 and warp 0.
enum Meeting { RECEIVED, WEIGHED };
__device__ __forceinline__ void meet_for(Meeting what, int turn, bool waits) {
  const int id = 1 + turn + (what == WEIGHED ? ReceivedParts::Turns : 0);
  const int threads = what == WEIGHED ? 64 : ReceivedParts::Receivers + 32;
  waits ? named_barrier_sync(id, threads) : named_barrier_arrive(id, threads);
}

// By all warps but the first two: chunks chunk0 ... chunk0 + count - 1 of a head, N of them a thread at most.
template <int N, class T>
__device__ __forceinline__ void receive_parts(const Attention<T> &attention, ReceivedParts &memory, int head, int column0,
                                              int chunk0, int count) {
  constexpr int Pieces = ReceivedParts::Pieces, Turn = ReceivedParts::Turn, Sums = ReceivedParts::Columns / 4;
  const int self = this_thread() - 64, part0 = self / Pieces, piece = self % Pieces;
  const int turns = ceil_div(count, ReceivedParts::turn_of(count));
  const Link from{attention.part_words + ((i64)head * attention.max_chunks + chunk0 + part0) * PART_WORDS, 0};
  const bool sums = piece < Sums;
  const u64 *const first = sums ? from.template pair_of_words<HEAD_DIM>(0, (column0 + piece * 4) / 2) : from.words + PART_L;
  const u64 *const second = first + (sums ? HEAD_DIM / 2 : 2);
  u32 missing = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (part0 < Turn && part0 + i * Turn < count) missing |= 1u << i;
  const int turn0 = N == 1 ? part0 / ReceivedParts::Batch : 0;  // of the first part; the others are in the turns behind it
  int turn = 0;                                                 // of those before it everything is there
#pragma unroll 1
  do {
    u32 v[N][4];
    const u32 there = poll_words<N>(v, first, second, Turn * PART_WORDS, missing, attention.out.tag);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (there >> i & 1)
        *reinterpret_cast<uint4 *>(&memory.values[part0 + i * Turn][piece * 4]) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    missing &= ~there;
    // The first turn that is not there.
    const int next = __ffs(__reduce_or_sync(0xffffffffu, missing << turn0 | 1u << turns)) - 1;
#pragma unroll 1
    for (; turn < next; ++turn) meet_for(RECEIVED, turn, false);
  } while (turn < turns);
}

// By warp 1: the weights of the chunks, from their m, which are sent ahead. The running maxima do not depend on the order of
// a sum and are found by a scan. Behind the last chunk a batch is filled up with what changes no total.
template <class T>
__device__ __forceinline__ void weigh_parts(const Attention<T> &attention, ReceivedParts &memory, float &M, int head, int chunk0,
                                            int count) {
  constexpr int Batch = ReceivedParts::Batch, Each = Batch / 8, Row = ReceivedParts::Columns + 4;
  const int lane = this_thread() & 31, whole = ceil_div(count, Batch) * Batch, turn_length = ReceivedParts::turn_of(count);
  const u64 *const from = attention.part_words + ((i64)head * attention.max_chunks + chunk0) * PART_WORDS + PART_M;
  const float c = attention.c;
  float *const values = &memory.values[0][0];
#pragma unroll 1
  for (int i = count * Row + lane; i < whole * Row; i += 32) values[i] = 0.f;
#pragma unroll 1
  for (int turn = 0; turn * turn_length < count; ++turn) {
    const int part0 = turn * turn_length + lane * Each, end = min(count, (turn + 1) * turn_length);
    float m[Each], own = -CUKERN_INF;
    u32 raw[Each] = {}, missing = (1u << max(min(end - part0, Each), 0)) - 1;
    do missing &= ~poll_single_words<Each>(raw, from + (i64)part0 * PART_WORDS, PART_WORDS, missing, attention.out.tag);
    while (__any_sync(0xffffffffu, missing != 0));
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      m[i] = part0 + i < end ? __uint_as_float(raw[i]) : -CUKERN_INF;
      own = fmaxf(own, m[i]);
    }
    // `own` becomes the largest of the lanes up to this one.
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, own, step);
      if (lane >= step) own = fmaxf(own, before);
    }
    const float before = __shfl_up_sync(0xffffffffu, own, 1);
    float top = lane == 0 ? M : fmaxf(M, before);
    bool same = true;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const float now = fmaxf(top, m[i]);
      const bool inside = part0 + i < end;
      const float a = inside ? rescale_factor(top, now, c) : 1.f, b = inside ? rescale_factor(m[i], now, c) : -0.f;
      if (lane * Each < turn_length) {
        memory.a[part0 + i] = a;
        memory.b[part0 + i] = b;
      }
      same = same && a == 1.f;
      top = now;
    }
    M = __shfl_sync(0xffffffffu, top, 31);
    const u32 rescaled = __ballot_sync(0xffffffffu, !same);
    if (lane == 0) memory.rescaled[turn] = rescaled;
    meet_for(WEIGHED, turn, false);
  }
}

// By warp 0, `total`: a lane's column, or of four lanes a partial sum of l; where all lanes have a column, L is that. Two
// operations a chunk are serial, one where the maximum stays: to multiply by 1 changes nothing.
template <bool Rescaled>
__device__ __forceinline__ void add_batch(const ReceivedParts &memory, float &total, float &L, int part0, int at) {
  constexpr int Batch = ReceivedParts::Batch, Columns = ReceivedParts::Columns;
  float a[Batch], b[Batch], x[Batch], l[Batch];
#pragma unroll
  for (int i = 0; i < Batch; i += 4) {
    const Vec<float, 4> four = load_vec<float, 4>(&memory.b[part0 + i]);
    Vec<float, 4> before{};
    if (Rescaled) before = load_vec<float, 4>(&memory.a[part0 + i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[i + j] = before.v[j];
      b[i + j] = four.v[j];
      x[i + j] = memory.values[part0 + i + j][at];
      if constexpr (ReceivedParts::Wide) l[i + j] = memory.values[part0 + i + j][Columns + (at & 3)];
    }
  }
  ChunkMerge merge;
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
    merge.a = Rescaled ? a[i] : 1.f;
    merge.b = b[i];
    total = Rescaled ? merge.add(total, x[i]) : fmaf(x[i], b[i], total);
    if constexpr (ReceivedParts::Wide) L = Rescaled ? merge.add(L, l[i]) : fmaf(l[i], b[i], L);
  }
}
__device__ __forceinline__ void add_parts(const ReceivedParts &memory, float &total, float &L, int count) {
  constexpr int Batch = ReceivedParts::Batch;
  const int at = min(this_thread() & 31, ReceivedParts::Columns + 3), turn_length = ReceivedParts::turn_of(count);
#pragma unroll 1
  for (int turn = 0; turn * turn_length < count; ++turn) {
    meet_for(WEIGHED, turn, true);
    u32 rescaled = memory.rescaled[turn];
    const int end = min(count, (turn + 1) * turn_length);
    meet_for(RECEIVED, turn, true);
#pragma unroll 1
    for (int part = turn * turn_length; part < end; part += Batch, rescaled >>= 8)
      if (rescaled & 0xff)
        add_batch<true>(memory, total, L, part, at);
      else
        add_batch<false>(memory, total, L, part, at);
  }
}

// From tagged words: a block waits for the chunks of its head alone. Warp 0 adds them up, warp 1 finds their weights, the
// others receive.
template <class T> __device__ __forceinline__ void merge_received(const Attention<T> &attention, ReceivedParts &memory) {
  const Link &out = attention.out;
  constexpr int Columns = ReceivedParts::Columns, Slices = HEAD_DIM / Columns, Jobs = ROWS * HEADS * Slices;
  constexpr int Parts = ReceivedParts::Parts;
  const int self = this_thread(), lane = self & 31, warp = self >> 5;
#pragma unroll 1
  for (int job = blockIdx.x; job < Jobs; job += gridDim.x) {
    const int head = job / Slices, column0 = job % Slices * Columns, chunks = attention.rows[head / HEADS].chunks;
    if (chunks == 1 && !attention.alone()) continue;
    float total = 0.f, L = 0.f, M = -CUKERN_INF;
#pragma unroll 1
    for (int chunk0 = 0; chunk0 < chunks; chunk0 += Parts) {
      const int count = min(chunks - chunk0, Parts);
      if (chunk0 > 0) __syncthreads();  // what was received may be overwritten
      if (warp == 0)
        add_parts(memory, total, L, count);
      else if (warp == 1)
        weigh_parts(attention, memory, M, head, chunk0, count);
      else if (count <= ReceivedParts::Turn)
        receive_parts<1>(attention, memory, head, column0, chunk0, count);
      else
        receive_parts<ReceivedParts::Turns>(attention, memory, head, column0, chunk0, count);
    }
    if (warp == 0) {
      float norm = softmax_norm(quad_sum(ReceivedParts::Wide ? L : total));
      if constexpr (!ReceivedParts::Wide) norm = __shfl_sync(0xffffffffu, norm, Columns);
      const float y = __fmul_rn(total, norm);
      const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
      if (lane < Columns && lane % 2 == 0)
        out.send_pair<Q_SIZE, T, O>(head / HEADS, head % HEADS * HEAD_DIM + column0 + lane, y, neighbour);
    }
    if (OVERLAY || job + (int)gridDim.x < Jobs) __syncthreads();  // what was received may be overwritten: by x, or the next job
  }
}

// Without DIRECT, between barriers.
template <class T> __device__ __forceinline__ void merge_long(const Attention<T> &attention, MergeMemory &memory) {
  const Link &out = attention.out;
  constexpr int Slices = ceil_div(HEAD_DIM, MERGE_COLUMNS);
  for (int job = blockIdx.x; job < ROWS * HEADS * Slices; job += gridDim.x) {
    const int head = job / Slices, column0 = job % Slices * MERGE_COLUMNS, columns = min(HEAD_DIM - column0, MERGE_COLUMNS);
    const int chunks = attention.rows[head / HEADS].chunks;
    if (chunks == 1 && !attention.alone()) continue;
    float M, sum;
    const float y = merge_chunks<HEAD_DIM>(memory, attention.part_acc + (i64)head * attention.max_chunks * HEAD_DIM + column0,
                                           attention.part_stats + (i64)head * attention.max_chunks * 8, chunks, columns,
                                           attention.c, M, sum);
    const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
    if ((int)threadIdx.x < columns && threadIdx.x % 2 == 0)
      out.send_pair<Q_SIZE, T, O>(head / HEADS, head % HEADS * HEAD_DIM + column0 + threadIdx.x, y, neighbour);
  }
}
