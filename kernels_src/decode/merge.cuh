// The parts that the chunks of a long sequence have left, merged in ascending order, 32 columns of a head at a time, and sent
// on as its attention output. Same bits as merge_chunks. By all blocks.
// Test: tests/test_decode_step.py
#pragma once
#include "decode/attention.cuh"

// With DIRECT, from tagged words: a block waits for the chunks of its head alone.
template <class T> __device__ __forceinline__ void merge_received(const Attention<T> &attention, MergeMemory &memory) {
  const Link &out = attention.out;
  constexpr int Slices = ceil_div(HEAD_DIM, MERGE_COLUMNS), Pieces = MERGE_COLUMNS / 4 + 2, AtOnce = 3;
  static_assert(AtOnce * THREADS >= MERGE_PARTS * Pieces, "a round is received at once");
  const int self = this_thread(), lane = self & 31, warp = self >> 5;
  float *const tops = &memory.acc[1][0][0];  // m of the chunks
#pragma unroll 1
  for (int job = blockIdx.x; job < ROWS * HEADS * Slices; job += gridDim.x) {
    const int head = job / Slices, column0 = job % Slices * MERGE_COLUMNS, columns = min(HEAD_DIM - column0, MERGE_COLUMNS);
    const int chunks = attention.rows[head / HEADS].chunks;
    if (chunks == 1 && !attention.alone) continue;
    float total = 0.f, M = -CUKERN_INF;
#pragma unroll 1
    for (int chunk0 = 0; chunk0 < chunks; chunk0 += MERGE_PARTS) {
      const int count = min(chunks - chunk0, MERGE_PARTS);
      const u64 *first[AtOnce], *second[AtOnce];
      u32 wanted = 0, v[AtOnce][4];
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        const int n = self + i * THREADS, part = n / Pieces, piece = n % Pieces;
        const Link from{attention.part_words + ((i64)head * attention.max_chunks + chunk0 + part) * PART_WORDS, out.tag};
        const bool sums = piece < MERGE_COLUMNS / 4;
        if (part < count && (!sums || piece * 4 < columns)) wanted |= 1u << i;
        first[i] = sums ? from.template pair_of_words<HEAD_DIM>(0, (column0 + piece * 4) / 2)
                        : from.words + HEAD_DIM + (piece - MERGE_COLUMNS / 4) * 4;
        second[i] = first[i] + (sums ? HEAD_DIM / 2 : 2);
      }
      receive_words<AtOnce>(v, reinterpret_cast<const u64 *const(&)[AtOnce]>(first),
                            reinterpret_cast<const u64 *const(&)[AtOnce]>(second), wanted, out.tag);
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        if (!(wanted >> i & 1)) continue;
        const int n = self + i * THREADS, part = n / Pieces, piece = n % Pieces;
        if (piece < MERGE_COLUMNS / 4) {
          *reinterpret_cast<uint4 *>(&memory.acc[0][part][piece * 4]) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
        } else if (piece == MERGE_COLUMNS / 4) {
          tops[part] = __uint_as_float(v[i][0]);
#pragma unroll
          for (int t = 0; t < 3; ++t) memory.l[part][t] = __uint_as_float(v[i][1 + t]);
        } else {
          memory.l[part][3] = __uint_as_float(v[i][0]);
        }
      }
      __syncthreads();
      float m = -CUKERN_INF, before = m, top = m;
      if (self < MERGE_PARTS) {
        if (self < count) m = tops[self];
        top = m;  // becomes the largest of the chunks up to this one
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const float other = __shfl_up_sync(0xffffffffu, top, step);
          if (lane >= step) top = fmaxf(top, other);
        }
        if (lane == 31) memory.top[warp] = top;
        before = __shfl_up_sync(0xffffffffu, top, 1);
      }
      __syncthreads();
      if (self < MERGE_PARTS) {
        float base = M;
        for (int w = 0; w < warp; ++w) base = fmaxf(base, memory.top[w]);
        before = lane == 0 ? base : fmaxf(base, before);
        top = fmaxf(base, top);
        memory.a[self] = rescale_factor(before, top, attention.c);
        memory.b[self] = rescale_factor(m, top, attention.c);
      }
      for (int w = 0; w < MERGE_PARTS / 32; ++w) M = fmaxf(M, memory.top[w]);
      __syncthreads();
      if (warp == 0 || (warp == 1 && lane < 4)) {
        ChunkMerge merge;
        const float *const value = warp == 0 ? &memory.acc[0][0][lane] : &memory.l[0][lane];
        const int pitch = warp == 0 ? MERGE_COLUMNS : 4;
#pragma unroll 8
        for (int part = 0; part < count; ++part) {
          merge.a = memory.a[part];
          merge.b = memory.b[part];
          total = merge.add(total, value[part * pitch]);
        }
      }
      __syncthreads();
    }
    if (warp == 1 && lane < 4) memory.total[lane] = total;
    __syncthreads();
    if (warp == 0) {
      const float y = __fmul_rn(total, softmax_norm(quad_sum(memory.total[lane & 3])));
      const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
      if (lane < columns && lane % 2 == 0)
        out.send_pair<Q_SIZE, T, O>(head / HEADS, head % HEADS * HEAD_DIM + column0 + lane, y, neighbour);
    }
  }
}

// Without DIRECT, between barriers.
template <class T> __device__ __forceinline__ void merge_long(const Attention<T> &attention, MergeMemory &memory) {
  const Link &out = attention.out;
  constexpr int Slices = ceil_div(HEAD_DIM, MERGE_COLUMNS);
  for (int job = blockIdx.x; job < ROWS * HEADS * Slices; job += gridDim.x) {
    const int head = job / Slices, column0 = job % Slices * MERGE_COLUMNS, columns = min(HEAD_DIM - column0, MERGE_COLUMNS);
    const int chunks = attention.rows[head / HEADS].chunks;
    if (chunks == 1 && !attention.alone) continue;
    float M, sum;
    const float y = merge_chunks<HEAD_DIM>(memory, attention.part_acc + (i64)head * attention.max_chunks * HEAD_DIM + column0,
                                           attention.part_stats + (i64)head * attention.max_chunks * 8, chunks, columns,
                                           attention.c, M, sum);
    const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
    if ((int)threadIdx.x < columns && threadIdx.x % 2 == 0)
      out.send_pair<Q_SIZE, T, O>(head / HEADS, head % HEADS * HEAD_DIM + column0 + threadIdx.x, y, neighbour);
  }
}
