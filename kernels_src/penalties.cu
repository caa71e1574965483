// Bias and penalties on the logits of each row, in place:
//   x[t] += bias                                          for every biased token t
//   x[t]  = x[t] > 0 ? x[t] / repetition : x[t] * repetition   for every token t of the row's history
//   x[t]  = fma(-frequency, count, x[t]) - presence        for every token t of the history with count > 0
//
// Layouts   x fp32 [rows, vocab]; tokens, counts int32 [rows, capacity], of which lengths [rows] are in use, each token at
//           most once in a row; bias_tokens, biases [rows, most], of which bias_lengths [rows] are in use, likewise; tokens
//           null: no history, bias_tokens null: no bias
// Bound     memory: tokens, counts and the logits that they name
// Launch    a block a row
// Measured: see docs/performance.md
//
// A token outside the vocabulary is left out.
#include "common/types.cuh"

constexpr int THREADS = 512;

__global__ void __launch_bounds__(THREADS)
    apply_penalties(float *x, const int *__restrict__ tokens, const int *__restrict__ counts,
                    const int *__restrict__ lengths, const float *__restrict__ repetitions,
                    const float *__restrict__ presences, const float *__restrict__ frequencies,
                    const int *__restrict__ bias_tokens, const float *__restrict__ biases,
                    const int *__restrict__ bias_lengths, i64 vocab, int capacity, int most) {
  const i64 row = blockIdx.x;
  x += row * vocab;
  if (bias_tokens) {
    const int n = min(bias_lengths[row], most);
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const int t = bias_tokens[row * most + i];
      if (t >= 0 && t < vocab) x[t] += biases[row * most + i];
    }
    __syncthreads();  // a biased token may be in the history too
  }
  if (!tokens) return;
  const float repetition = repetitions[row], presence = presences[row], frequency = frequencies[row];
  if (repetition == 1.f && presence == 0.f && frequency == 0.f) return;
  const int n = min(lengths[row], capacity);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const int t = tokens[row * capacity + i], count = counts[row * capacity + i];
    if (t < 0 || t >= vocab) continue;
    float y = x[t];
    y = y > 0.f ? y / repetition : y * repetition;
    if (count > 0) y = fmaf(-frequency, (float)count, y) - presence;
    x[t] = y;
  }
}
