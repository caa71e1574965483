// The end of a decoding step, all on the device, so that the next step needs nothing from the host. For every row that is
// in use (seq_lens > 0) with the token that was drawn, or that the largest of `best` holds:
//   results    ring[counter % ring_length] receives the token (and its log-probability, and the likeliest tokens)
//   history    the token's count goes up by one, or the token is appended with count 1
//   next step  token_ids = token, positions + 1, seq_lens + 1, draw_positions + 1, slot = place of the new key by the table
// A row whose `remaining` steps are used up, or whose token is one of its stop tokens, becomes unused: seq_lens 0, slot -1.
// Unused rows put -1 into the ring. The counter of every row goes up by one.
//
// Layouts   [rows] unless said: tables int32 [rows, width] (-1: no block yet, gives slot -1); stop_ids int32 [rows, stops],
//           -1 for none; counters u32; token_ring int32, logprob_ring fp32 [ring_length, rows]; top_values fp32,
//           top_ids int32 [rows, top] and their rings [ring_length, rows, top]; history as in penalties.cu, or null;
//           sampled int32 [rows], or null and best u64 [rows, parts] as argmax_tiles (sampling.cu) writes it
// Bound     latency: a few words a row (and the row's history)
// Launch    a block a row; the rings may be pinned host memory. With pdl=True the state of the row is fetched into the L2
//           cache while the kernel ahead still runs: a step reads so much that it comes from memory each time
// Template  Threads: 32, or 256 with a history
// Measured: see docs/performance.md
#include "common/select.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"

template <int Threads>
__global__ void __launch_bounds__(Threads)
    advance(const int *__restrict__ sampled, const u64 *__restrict__ best, const float *__restrict__ logprobs,
            const float *__restrict__ top_values, const int *__restrict__ top_ids, int *token_ids, int *positions,
            int *seq_lens, i64 *slots, i64 *draw_positions, const int *__restrict__ tables, int *remaining,
            const int *__restrict__ stop_ids, u32 *counters, int *token_ring, float *logprob_ring, float *top_value_ring,
            int *top_id_ring, int *history_tokens, int *history_counts, int *history_lengths, int width, int page_shift,
            int stops, int ring_length, int top, int capacity, int parts) {
  __shared__ int found;
  const i64 row = blockIdx.x, rows = gridDim.x;
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    prefetch_line(seq_lens + row);
    prefetch_line(counters + row);
    prefetch_line(remaining + row);
    prefetch_line(draw_positions + row);
    prefetch_line(slots + row);
    prefetch_line(token_ids + row);
    if (stops > 0) prefetch_line(stop_ids + row * stops);
    const int column = (__ldcg(positions + row) + 1) >> page_shift;  // a guess: only the line is asked for
    if (column >= 0 && column < width) prefetch_line(tables + row * width + column);
  }
  grid_dependency_wait();
  const int length = seq_lens[row], left = remaining[row] - 1, position = positions[row] + 1;
  const int column = position >> page_shift;
  const u32 step = counters[row];
  const i64 draw_position = draw_positions[row] + 1;
  const int block = length > 0 && column < width ? tables[row * width + column] : -1;
  int token;
  if (best) {
    constexpr int Batch = 4;  // loads under way together
    u64 largest = 0;
#pragma unroll 1
    for (int first = threadIdx.x & 31; first < parts; first += 32 * Batch) {
      u64 x[Batch];
#pragma unroll
      for (int j = 0; j < Batch; ++j) x[j] = first + 32 * j < parts ? best[row * parts + first + 32 * j] : 0;
#pragma unroll
      for (int j = 0; j < Batch; ++j) largest = max(largest, x[j]);
    }
    token = packed_index(warp_max(largest));
  } else {
    token = sampled[row];
  }
  bool stop = false;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < stops; i += 32) stop = stop || stop_ids[row * stops + i] == token;
  stop = __any_sync(0xffffffffu, stop);
  const i64 place = (i64)(step % (u32)ring_length) * rows + row;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();  // every thread has read what thread 0 changes below
#pragma unroll 1
  for (int i = threadIdx.x; i < top; i += Threads) {
    top_value_ring[place * top + i] = top_values[row * top + i];
    top_id_ring[place * top + i] = top_ids[row * top + i];
  }
  if (threadIdx.x == 0) {
    counters[row] = step + 1u;
    token_ring[place] = length > 0 ? token : -1;
    if (logprobs) logprob_ring[place] = logprobs[row];
  }
  if (length <= 0) return;
  if (history_tokens) {
    int *const tokens = history_tokens + row * capacity, n = min(history_lengths[row], capacity);
    for (int i = threadIdx.x; i < n; i += Threads)
      if (tokens[i] == token) found = i;  // at most one does
    __syncthreads();
    if (threadIdx.x == 0) {
      int at = found;
      if (at < 0 && n < capacity) {
        at = n;
        tokens[at] = token;
        history_counts[row * capacity + at] = 0;
        history_lengths[row] = n + 1;
      }
      if (at >= 0) history_counts[row * capacity + at] += 1;
    }
  }
  if (threadIdx.x != 0) return;
  const bool ends = left <= 0 || stop;
  remaining[row] = left;
  token_ids[row] = ends ? 0 : token;
  positions[row] = ends ? 0 : position;
  seq_lens[row] = ends ? 0 : length + 1;
  draw_positions[row] = ends ? 0 : draw_position;
  slots[row] = ends || block < 0 ? -1 : ((i64)block << page_shift) + (position & ((1 << page_shift) - 1));
}
