// A product of the rows in shared memory with this block's tiles of a weight, and what is done with the sums.
// Order of every sum: the numerics contract, item 1; mma's A operand is x (rows padded to 16), its B operand 8 rows of the weight.
// Test: tests/test_decode_step.py
#pragma once
#include "common/swiglu.cuh"
#include "decode/stream.cuh"
#include "ptx/exchange.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

// Results on their way to other blocks: rows of N values of T, or of N floats. With DIRECT they are tagged words, a pair of T
// or one float in each; else plain arrays, behind a barrier.
struct Link {
  u64 *words;
  u32 tag;

  template <int N, class T> __device__ __forceinline__ void send_pair(int row, int column, u32 pair) const {
    const i64 word = ((i64)row * N + column) / 2;
    if constexpr (DIRECT)
      send_word(words + word, pair, tag);
    else
      reinterpret_cast<u32 *>(words)[word] = pair;
  }
  // Four values of T, column % 4 == 0.
  template <int N, class T> __device__ __forceinline__ void send4(int row, int column, u32 first, u32 second) const {
    const i64 word = ((i64)row * N + column) / 2;
    if constexpr (DIRECT)
      send_words(words + word, first, second, tag);
    else
      *reinterpret_cast<uint2 *>(reinterpret_cast<u32 *>(words) + word) = make_uint2(first, second);
  }
  template <int N> __device__ __forceinline__ void send_floats(int row, int column, float first, float second) const {
    const i64 word = (i64)row * N + column;
    if constexpr (DIRECT)
      send_words(words + word, __float_as_uint(first), __float_as_uint(second), tag);
    else
      store_vec(reinterpret_cast<float *>(words) + word, Vec<float, 2>{first, second});
  }

  // Pieces of four values of T at columns that are multiples of 4, those whose bit is set in `wanted`.
  template <int N, class T, int Count>
  __device__ __forceinline__ void receive4(u32 (&v)[Count][2], int row, const int (&column)[Count], u32 wanted) const {
    if constexpr (DIRECT) {
      const u64 *at[Count];
#pragma unroll
      for (int i = 0; i < Count; ++i) at[i] = words + ((i64)row * N + column[i]) / 2;
      receive_pairs<Count>(v, reinterpret_cast<const u64 *const(&)[Count]>(at), wanted, tag);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i)
        if (wanted >> i & 1) {
          const uint2 raw = *reinterpret_cast<const uint2 *>(reinterpret_cast<const u32 *>(words) +
                                                             ((i64)row * N + column[i]) / 2);
          v[i][0] = raw.x;
          v[i][1] = raw.y;
        }
    }
  }
  template <int N> __device__ __forceinline__ Vec<float, 2> receive_floats(int row, int column) const {
    if constexpr (DIRECT) {
      const u64 *const at[1] = {words + (i64)row * N + column};
      u32 v[1][2];
      receive_pairs<1>(v, at, 1u, tag);
      return Vec<float, 2>{__uint_as_float(v[0][0]), __uint_as_float(v[0][1])};
    } else {
      return load_vec<float, 2>(reinterpret_cast<const float *>(words) + (i64)row * N + column);
    }
  }
};

// What is done with the finished sums of two or four neighbouring columns (of GATE_UP: as many gates and their ups).
template <int N, class T> struct StoreRounded {  // T [ROWS, N]
  const float *bias;
  Link out;
  template <int Columns> __device__ __forceinline__ void store(const float (&v)[Columns], int row, int column) const {
    const LinearOutput<float> linear{bias, nullptr, nullptr, ROWS, N};
    u32 pairs[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i)
      pairs[i] = pack2<T>(linear.finish(v[2 * i], 0, column + 2 * i), linear.finish(v[2 * i + 1], 0, column + 2 * i + 1));
    if constexpr (Columns == 4)
      out.send4<N, T>(row, column, pairs[0], pairs[1]);
    else
      out.send_pair<N, T>(row, column, pairs[0]);
  }
};

template <class T> struct StoreLogits {
  float *out;
  template <int Columns> __device__ __forceinline__ void store(const float (&v)[Columns], int row, int column) const {
    Vec<float, Columns> y;
#pragma unroll
    for (int i = 0; i < Columns; ++i) y.v[i] = v[i];
    store_vec(out + (i64)row * VOCAB + column, y);
  }
};

// float [ROWS, HIDDEN]. A column of the residual stream always belongs to the same block, which keeps it in shared memory
// [ROWS][OWNED * 8] and sends copies to the others.
template <class T> struct AddToResidual {
  const float *bias;
  float *own;
  Link out;
  int first_column;
  __device__ __forceinline__ void store(const float (&v)[2], int row, int column) const {
    float *const mine = own + row * OWNED * 8 + column - first_column;
    const LinearOutput<float> linear{bias, mine - column, nullptr, ROWS, HIDDEN};
    mine[0] = linear.finish(v[0], column, column);
    mine[1] = linear.finish(v[1], column + 1, column + 1);
    out.send_floats<HIDDEN>(row, column, mine[0], mine[1]);
  }
};

template <class T> struct StoreSwiglu {  // T [ROWS, INTERMEDIATE]
  Link out;
  __device__ __forceinline__ static float swiglu(float gate, float up) {
    return silu_mul(to_float(from_float<T>(gate)), to_float(from_float<T>(up)));
  }
  template <int Columns>
  __device__ __forceinline__ void store(const float (&gate)[Columns], const float (&up)[Columns], int row, int column) const {
    u32 pairs[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i)
      pairs[i] = pack2<T>(swiglu(gate[2 * i], up[2 * i]), swiglu(gate[2 * i + 1], up[2 * i + 1]));
    if constexpr (Columns == 4)
      out.send4<INTERMEDIATE, T>(row, column, pairs[0], pairs[1]);
    else
      out.send_pair<INTERMEDIATE, T>(row, column, pairs[0]);
  }
};

// x in shared memory: ROWS rows, x_pitch(K) apart; this is where element k of a row lies. With FRAGMENT_ORDER the four registers
// that lane t needs of two k-steps are neighbours, (k 2t, 2t + 1), (2t + 8, 2t + 9) of the first step and then of the second: one
// load of 16 bytes, the same for all lanes of a row, where ldmatrix would take four times the bandwidth for one row.
__device__ __forceinline__ constexpr int x_offset(int k) {
  return FRAGMENT_ORDER ? k / 32 * 32 + k % 8 / 2 * 8 + k / 16 % 2 * 4 + k / 8 % 2 * 2 + k % 2 : k;
}
// Elements k and k + 1, k even; four from k % 4 == 0.
template <class T> __device__ __forceinline__ void store_x(T *row, int k, u32 pair) {
  *reinterpret_cast<u32 *>(row + x_offset(k)) = pair;
}
template <class T> __device__ __forceinline__ void store_x(T *row, int k, u32 first, u32 second) {
  if constexpr (FRAGMENT_ORDER) {
    store_x(row, k, first);
    store_x(row, k + 2, second);
  } else {
    *reinterpret_cast<uint2 *>(row + k) = make_uint2(first, second);
  }
}

// Fragments of x for two k-steps at column k: all four registers of the mma's A operand for each. Rows of the tile beyond ROWS
// are copies of row 0, and so are their sums, which nobody looks at.
template <class T> struct Fragments {
  const T *lane_row, *zeros;  // this lane's row at column 0

  __device__ __forceinline__ Fragments(const T *x, const T *zeros, int pitch, int lane) : zeros(zeros) {
    const int row = FRAGMENT_ORDER ? lane >> 2 : lane & 15, piece = FRAGMENT_ORDER ? lane & 3 : lane >> 4;
    lane_row = x + (row < ROWS ? row : 0) * pitch + piece * 8;
  }
  // `both` false: the row ends after the first step, the second gets nothing of use.
  __device__ __forceinline__ void load(u32 (&a)[2][4], int k, bool both = true) const {
    const T *const from = lane_row + k;
    if constexpr (FRAGMENT_ORDER) {
      const uint2 first = *reinterpret_cast<const uint2 *>(from);
      const uint2 second = both ? *reinterpret_cast<const uint2 *>(from + 4) : make_uint2(0, 0);
      a[0][0] = first.x;
      a[0][2] = first.y;
      a[1][0] = second.x;
      a[1][2] = second.y;
#pragma unroll
      for (int s = 0; s < 2; ++s) a[s][1] = a[s][3] = 0u;
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) ldmatrix_x4(a[s], s == 0 || both ? from + s * 16 : zeros);
    }
  }
};

// The k-steps of one chunk.
template <class T>
__device__ __forceinline__ void multiply_chunk(float (&acc)[4], const u32 (&w)[RING_K / 32][4],
                                               const Fragments<T> &fragments, int k) {
#pragma unroll
  for (int pair = 0; pair < RING_K / 32; ++pair) {
    u32 a[2][4];
    fragments.load(a, k + pair * 32);
    mma_m16n8k16<T>(acc, a[0], w[pair][0], w[pair][1]);
    mma_m16n8k16<T>(acc, a[1], w[pair][2], w[pair][3]);
  }
}

// `unit`: this warp's place in the sequence of units, relative to the start of this product; carried from phase to phase.
// Called by the whole block, with x readable; the sums of one tile's segments meet in `partial`.
template <int P, class T, class Out>
__device__ __forceinline__ void multiply(WeightStream<T> &stream, int &unit, const T *x, const T *zeros, float *partial,
                                         const Out &out) {
  constexpr int K = product_k(P), Segment = product_segment(P), Segments = product_segments(P);
  constexpr bool WholeChunks = K % RING_K == 0;
  // A unit of two whole chunks is multiplied at once. Its slots are filled again only after the results are on their way, if
  // the ring holds enough: other blocks wait for these, and nobody for the weights.
  constexpr bool Twos = Segments > 1 && Segment == 2 * RING_K && K % Segment == 0 && RING_SLOTS >= 2;
  constexpr int MostOwed = RING_SLOTS >= 4 ? 2 : 0;  // slots not filled again while the next two are read
  const int self = this_thread();
  const int lane = self & 31, g = lane >> 2, t = lane & 3, row8 = lane & 7, quarter8 = lane >> 3;
  const int first = stream.plan.first[P], units = stream.plan.units[P];
  const Fragments<T> fragments(x, zeros, x_pitch(K), lane);
  auto load_weights = [&](u32(&w)[RING_K / 32][4], const T *chunk) {
#pragma unroll
    for (int pair = 0; pair < RING_K / 32; ++pair)
      ldmatrix_x4(w[pair], chunk + tile_offset<RING_K>(row8, pair * 4 + quarter8));
  };
  int owed = 0;  // slots read and not filled again
  bool first_unit = true;
  constexpr int Mark = first_mark(P);
  (void)first_unit, (void)Mark;

  for (; unit < units; unit += WARPS) {
    const int tile = unit / Segments, k0 = unit % Segments * Segment, end = min(k0 + Segment, K);
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    if constexpr (Twos) {
      const T *chunks[2];
      if (owed > MostOwed) {
        stream.fill(2);
        owed -= 2;
      }
      owed > 0 ? stream.template front<MostOwed>(chunks) : stream.template front<0>(chunks);
      if (first_unit) MARK(stream.plan, Mark);
      u32 w[2][RING_K / 32][4];
      load_weights(w[0], chunks[0]);
      load_weights(w[1], chunks[1]);
      multiply_chunk(acc, w[0], fragments, k0);
      multiply_chunk(acc, w[1], fragments, k0 + RING_K);
      owed += 2;
    } else {
#pragma unroll 1
      for (int k = k0; k < end; k += RING_K) {
        const T *const chunk = stream.front();
        if (first_unit && k == k0) MARK(stream.plan, Mark);
        u32 w[RING_K / 32][4];
        load_weights(w, chunk);
        __syncwarp();  // every lane has read the slot
        stream.fill();
        if constexpr (WholeChunks) {
          multiply_chunk(acc, w, fragments, k);
        } else {
#pragma unroll
          for (int pair = 0; pair < RING_K / 32; ++pair) {
            if (k + pair * 32 >= end) break;
            u32 a[2][4];
            fragments.load(a, k + pair * 32, k + pair * 32 + 32 <= K);
            mma_m16n8k16<T>(acc, a[0], w[pair][0], w[pair][1]);
            if (k + pair * 32 + 32 <= K) mma_m16n8k16<T>(acc, a[1], w[pair][2], w[pair][3]);
          }
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
      for (int h = 0; h < (ROWS > 8 ? 2 : 1); ++h) {
        const float two[2] = {acc[2 * h], acc[2 * h + 1]};
        if constexpr (P == GATE_UP) {
          const float up[2] = {__shfl_xor_sync(0xffffffffu, two[0], 2), __shfl_xor_sync(0xffffffffu, two[1], 2)};
          if (t < 2 && g + 8 * h < ROWS) out.store(two, up, g + 8 * h, (first + tile) * 4 + 2 * t);
        } else if (g + 8 * h < ROWS) {
          out.store(two, g + 8 * h, (first + tile) * 8 + 2 * t);
        }
      }
    }
    if (first_unit) MARK(stream.plan, Mark + 1);
    first_unit = false;
  }
  unit -= units;
  MARK(stream.plan, Mark + 2);

  __syncthreads();  // the sums are there, and x may be overwritten
  MARK(stream.plan, Mark + 3);
  if constexpr (Segments > 1) {
    constexpr int Columns = P == O || P == DOWN ? 2 : 4, Pieces = (P == GATE_UP ? 4 : 8) / Columns;  // of a thread; of a tile
    const int tiles = units / Segments;
    for (int e = self; e < tiles * ROWS * Pieces; e += THREADS) {
      const int column = e % Pieces * Columns, row = e / Pieces % ROWS, tile = e / (Pieces * ROWS);
      const float *const sums = partial + (tile * Segments * ROWS + row) * 8 + column;
      float total[Columns], up[Columns];
#pragma unroll
      for (int i = 0; i < Columns; ++i) total[i] = up[i] = -0.f;  // the identity of addition
#pragma unroll Segments <= 8 ? Segments : 6
      for (int s = 0; s < Segments; ++s) {
        const Vec<float, Columns> v = load_vec<float, Columns>(sums + s * ROWS * 8);
#pragma unroll
        for (int i = 0; i < Columns; ++i) total[i] += v.v[i];
        if constexpr (P == GATE_UP) {
          const Vec<float, Columns> u = load_vec<float, Columns>(sums + s * ROWS * 8 + 4);
#pragma unroll
          for (int i = 0; i < Columns; ++i) up[i] += u.v[i];
        }
      }
      if constexpr (P == GATE_UP)
        out.store(total, up, row, (first + tile) * 4 + column);
      else
        out.store(total, row, (first + tile) * 8 + column);
    }
  }
  MARK(stream.plan, Mark + 4);
  stream.fill(owed);
  MARK(stream.plan, Mark + 5);
}
