// The parts that the chunks of a long sequence have left, merged in ascending order, 32 columns of a head at a time, and sent
// on as its attention output. Same bits as merge_chunks. By all blocks.
// Test: tests/test_decode_step.py
#pragma once
#include "decode/attention.cuh"

// With DIRECT, what a round receives, while warp 0 adds up the round before.
struct __align__(16) ReceivedParts {
  static constexpr int Parts = 96, Pieces = MERGE_COLUMNS / 4 + 2;  // pieces: four words of a part, for one thread
  float acc[2][Parts][MERGE_COLUMNS], l[2][Parts][4], m[2][Parts];
  Vec<float, 2> weights[Parts];  // of the total and of the chunk: ChunkMerge::a and b
};
static_assert(sizeof(ReceivedParts) <= sizeof(MergeMemory), "decode_step.py counts the larger one");

// By all warps but the first: chunks chunk0 ... chunk0 + count - 1 of a head, N groups of four words a thread.
template <int N, class T>
__device__ __forceinline__ void receive_parts(const Attention<T> &attention, ReceivedParts &memory, int buffer, int head,
                                              int column0, int chunk0, int count) {
  constexpr int Pieces = ReceivedParts::Pieces;
  const int columns = min(HEAD_DIM - column0, MERGE_COLUMNS), self = this_thread() - 32;
  const u64 *first[N], *second[N];
  u32 v[N][4];
#pragma unroll
  for (int i = 0; i < N; ++i) {  // whoever has no words of its own asks for some others: loads without a condition
    const int n = self + i * (THREADS - 32), part = min(n / Pieces, count - 1), piece = n % Pieces;
    const Link from{attention.part_words + ((i64)head * attention.max_chunks + chunk0 + part) * PART_WORDS, 0};
    const bool sums = piece < MERGE_COLUMNS / 4;
    first[i] = sums ? from.template pair_of_words<HEAD_DIM>(0, (column0 + min(piece * 4, columns - 4)) / 2)
                    : from.words + HEAD_DIM + (piece - MERGE_COLUMNS / 4) * 4;
    second[i] = first[i] + (sums ? HEAD_DIM / 2 : 2);
  }
  receive_words<N>(v, reinterpret_cast<const u64 *const(&)[N]>(first), reinterpret_cast<const u64 *const(&)[N]>(second),
                   (1u << N) - 1, attention.out.tag);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int n = self + i * (THREADS - 32), part = n / Pieces, piece = n % Pieces;
    if (part >= count || (piece < MERGE_COLUMNS / 4 && piece * 4 >= columns)) continue;
    if (piece < MERGE_COLUMNS / 4) {
      *reinterpret_cast<uint4 *>(&memory.acc[buffer][part][piece * 4]) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    } else if (piece == MERGE_COLUMNS / 4) {
      memory.m[buffer][part] = __uint_as_float(v[i][0]);
#pragma unroll
      for (int t = 0; t < 3; ++t) memory.l[buffer][part][t] = __uint_as_float(v[i][1 + t]);
    } else {
      memory.l[buffer][part][3] = __uint_as_float(v[i][0]);
    }
  }
}

// From tagged words: a block waits for the chunks of its head alone. Warp 0 merges, the others receive; two operations a chunk
// are serial, for the running maxima do not depend on the order and are found by a scan.
template <class T> __device__ __forceinline__ void merge_received(const Attention<T> &attention, ReceivedParts &memory) {
  const Link &out = attention.out;
  constexpr int Slices = ceil_div(HEAD_DIM, MERGE_COLUMNS), Jobs = ROWS * HEADS * Slices;
  constexpr int Parts = ReceivedParts::Parts, Each = Parts / 32, Most = ceil_div(Parts * ReceivedParts::Pieces, THREADS - 32);
  const int self = this_thread(), lane = self & 31, warp = self >> 5;
#pragma unroll 1
  for (int job = blockIdx.x; job < Jobs; job += gridDim.x) {
    const int head = job / Slices, column0 = job % Slices * MERGE_COLUMNS, columns = min(HEAD_DIM - column0, MERGE_COLUMNS);
    const int chunks = attention.rows[head / HEADS].chunks;
    if (chunks == 1 && !attention.alone()) continue;
    float total = 0.f, L = 0.f, M = -CUKERN_INF;
    int buffer = 0;
#pragma unroll 1
    for (int chunk0 = 0;; chunk0 += Parts, buffer ^= 1) {
      if (warp > 0 && chunk0 < chunks) {
        const int count = min(chunks - chunk0, Parts);
        if (count * ReceivedParts::Pieces <= THREADS - 32)
          receive_parts<1>(attention, memory, buffer, head, column0, chunk0, count);
        else
          receive_parts<Most>(attention, memory, buffer, head, column0, chunk0, count);
      }
      if (warp == 0 && chunk0 > 0) {  // the round before
        const int other = buffer ^ 1, count = min(chunks - (chunk0 - Parts), Parts);
        float m[Each], own = -CUKERN_INF;
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          m[i] = lane * Each + i < count ? memory.m[other][lane * Each + i] : -CUKERN_INF;
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
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          const float now = fmaxf(top, m[i]);
          memory.weights[lane * Each + i] =
              Vec<float, 2>{rescale_factor(top, now, attention.c), rescale_factor(m[i], now, attention.c)};
          top = now;
        }
        M = __shfl_sync(0xffffffffu, top, 31);
        __syncwarp();
        ChunkMerge merge;
#pragma unroll 8
        for (int part = 0; part < count; ++part) {
          const Vec<float, 2> w = memory.weights[part];
          merge.a = w.v[0];
          merge.b = w.v[1];
          total = merge.add(total, memory.acc[other][part][lane]);
          L = merge.add(L, memory.l[other][part][lane & 3]);
        }
        __syncwarp();
      }
      if (chunk0 >= chunks) break;
      __syncthreads();
    }
    if (warp == 0) {
      const float y = __fmul_rn(total, softmax_norm(quad_sum(L)));
      const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
      if (lane < columns && lane % 2 == 0)
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
