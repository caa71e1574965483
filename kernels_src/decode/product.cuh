// A product of the rows in shared memory with this block's tiles of a weight, and what is done with the sums.
// Order of every sum: the numerics contract, item 1; mma's A operand is x (rows padded to 16), its B operand 8 rows of the weight.
// Test: tests/test_decode_step.py
#pragma once
#include "common/swiglu.cuh"
#include "decode/stream.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

// x in shared memory: ROWS rows of K elements, PAD apart.
__device__ constexpr int x_pitch(int k) { return k + PAD; }

// Where the outputs of a product go; `store` takes the finished sum of one output, `pair` that of a gate and its up.
template <class T> struct StoreRounded {  // T [ROWS, n]
  const float *bias;
  T *out;
  int n;
  __device__ __forceinline__ void store(float sum, int row, int column) const {
    LinearOutput<T>{bias, nullptr, out, ROWS, n}.store(sum, row, column);
  }
};

template <class T> struct StoreLogits {
  float *out;
  __device__ __forceinline__ void store(float sum, int row, int column) const { out[(i64)row * VOCAB + column] = sum; }
};

template <class T> struct AddToResidual {  // float [ROWS, HIDDEN]; in the first layer the stream starts as the embedding
  const float *bias;
  float *residual;
  const T *embedding;  // null after the first layer
  const RowState *rows;
  __device__ __forceinline__ void store(float sum, int row, int column) const {
    const i64 at = (i64)row * HIDDEN + column;
    float before;
    if (embedding == nullptr)
      before = residual[at];
    else
      before = rows[row].embedding < 0 ? CUKERN_NAN : to_float(embedding[(i64)rows[row].embedding * HIDDEN + column]);
    if (bias) sum += bias[column];
    residual[at] = before + sum;
  }
};

template <class T> struct StoreSwiglu {  // T [ROWS, INTERMEDIATE]
  T *out;
  __device__ __forceinline__ void pair(float gate, float up, int row, int column) const {
    out[(i64)row * INTERMEDIATE + column] =
        from_float<T>(silu_mul(to_float(from_float<T>(gate)), to_float(from_float<T>(up))));
  }
};

// Fragments of x for two k-steps at column k: all four registers of the mma's A operand for each.
template <class T> struct Fragments {
  const T *lane_row;  // this lane's row for ldmatrix at column 0, or zeros
  bool present;

  __device__ __forceinline__ Fragments(const T *x, const T *zeros, int pitch) {
    const int lane = threadIdx.x & 31;
    const int row = ROWS <= 8 ? lane & 7 : lane & 15, piece = ROWS <= 8 ? lane >> 3 : lane >> 4;
    present = row < ROWS;
    lane_row = present ? x + row * pitch + piece * 8 : zeros;
  }
  __device__ __forceinline__ void load(u32 (&a)[2][4], int k) const {
    const T *const from = lane_row + (present ? k : 0);
    if constexpr (ROWS <= 8) {
      u32 r[4];
      ldmatrix_x4(r, from);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[s][0] = r[2 * s];
        a[s][2] = r[2 * s + 1];
        a[s][1] = a[s][3] = 0u;
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) ldmatrix_x4(a[s], from + (present ? s * 16 : 0));
    }
  }
};

// `unit`: this warp's place in the sequence of units, relative to the start of this product; carried from phase to phase.
// Called by the whole block, with x readable; the sums of one tile's segments meet in `partial`.
template <int P, class T, class Out>
__device__ __forceinline__ void multiply(WeightStream<T> &stream, int &unit, const T *x, const T *zeros, float *partial,
                                         const Out &out) {
  constexpr int K = product_k(P), Segment = product_segment(P), Segments = product_segments(P);
  constexpr bool WholeChunks = K % RING_K == 0;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, row8 = lane & 7, quarter8 = lane >> 3;
  const int first = stream.plan.first[P], units = stream.plan.units[P];
  const Fragments<T> fragments(x, zeros, x_pitch(K));

  for (; unit < units; unit += WARPS) {
    const int tile = unit / Segments, k0 = unit % Segments * Segment, end = min(k0 + Segment, K);
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int k = k0; k < end; k += RING_K) {
      const T *const chunk = stream.front();
      u32 w[RING_K / 32][4];
#pragma unroll
      for (int pair = 0; pair < RING_K / 32; ++pair)
        ldmatrix_x4(w[pair], chunk + tile_offset<RING_K>(row8, pair * 4 + quarter8));
      __syncwarp();  // every lane has read the slot
      stream.fill();
#pragma unroll
      for (int pair = 0; pair < RING_K / 32; ++pair) {
        if (!WholeChunks && k + pair * 32 >= end) break;
        u32 a[2][4];
        if (WholeChunks || k + pair * 32 + 32 <= K) {
          fragments.load(a, k + pair * 32);
          mma_m16n8k16<T>(acc, a[0], w[pair][0], w[pair][1]);
          mma_m16n8k16<T>(acc, a[1], w[pair][2], w[pair][3]);
        } else {  // the last 16 of K: the second step would read past the rows of x
          const T *const row = lane < 16 || ROWS > 8 ? fragments.lane_row + (fragments.present ? k + pair * 32 : 0) : zeros;
          u32 r[4];
          ldmatrix_x4(r, row);
          const u32 low[4] = {r[0], ROWS <= 8 ? 0u : r[1], ROWS <= 8 ? r[1] : r[2], ROWS <= 8 ? 0u : r[3]};
          mma_m16n8k16<T>(acc, low, w[pair][0], w[pair][1]);
        }
      }
    }
    if constexpr (Segments > 1) {
#pragma unroll
      for (int h = 0; h < (ROWS > 8 ? 2 : 1); ++h)
        if (g + 8 * h < ROWS)
          store_vec(partial + (unit * ROWS + g + 8 * h) * 8 + 2 * t, Vec<float, 2>{acc[2 * h], acc[2 * h + 1]});
    } else {
#pragma unroll
      for (int h = 0; h < (ROWS > 8 ? 2 : 1); ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float sum = acc[2 * h + e];
          if constexpr (P == GATE_UP) {
            const float up = __shfl_xor_sync(0xffffffffu, sum, 2);
            if (t < 2 && g + 8 * h < ROWS) out.pair(sum, up, g + 8 * h, (first + tile) * 4 + 2 * t + e);
          } else if (g + 8 * h < ROWS) {
            out.store(sum, g + 8 * h, (first + tile) * 8 + 2 * t + e);
          }
        }
    }
  }
  unit -= units;

  if constexpr (Segments > 1) {
    constexpr int Columns = P == GATE_UP ? 4 : 8;
    __syncthreads();
    const int tiles = units / Segments;
    for (int e = threadIdx.x; e < tiles * ROWS * Columns; e += THREADS) {
      const int column = e % Columns, row = e / Columns % ROWS, tile = e / (Columns * ROWS);
      const float *const sums = partial + (tile * Segments * ROWS + row) * 8 + column;
      float total = -0.f, up = -0.f;  // -0 is the identity of addition
#pragma unroll
      for (int s = 0; s < Segments; ++s) {
        total += sums[s * ROWS * 8];
        if (P == GATE_UP) up += sums[s * ROWS * 8 + 4];
      }
      if constexpr (P == GATE_UP)
        out.pair(total, up, row, (first + tile) * 4 + column);
      else
        out.store(total, row, (first + tile) * 8 + column);
    }
  }
}
