// A product of the rows in shared memory with this block's tiles of a weight, and what is done with the sums.
// Order of every sum: the numerics contract, item 1; mma's A operand is x (rows padded to 16), its B operand 8 rows of
// the weight; with PAIRS (decode/shape.cuh) and in long chains (Halves) the other way round.
// Test: tests/test_decode_step.py
#pragma once
#include "common/swiglu.cuh"
#include "decode/stream.cuh"
#include "ptx/exchange.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

// Results on their way to other blocks: rows of N values of T, or of N floats. With DIRECT they are tagged words, a pair of T
// or one float in each; else plain arrays, behind a barrier. The words of a row lie such that lanes which receive four words
// each read whole sectors: the even pairs of words, then the odd ones.
constexpr int NOBODY = -1;
// The order of pairs of elements in x, and in a link whose receivers make it x: ascending, or, of a product whose segments are
// paired, such that a lane's four pairs of two steps of B lie together.
template <int P> __device__ __forceinline__ int pair_place(int pair) {
  if constexpr (P == NOBODY || !paired(P)) return pair;
  const int q = pair & 7;
  return (pair & ~15) + (q & 3) * 4 + (pair >> 3 & 1) * 2 + (q >> 2);
}
// Element offset of four pairs that lie together, the i-th of a row.
template <int P> __device__ __forceinline__ int x_piece(int row, int i) {
  return row * x_pitch(product_k(P)) + i * 8 + (paired(P) ? i / (PAIR_SEGMENT / 8) * PAIR_PAD : 0);
}
// Where four neighbouring columns go: words from x to the first pair; and words from a row to the next, and from a column to
// the one 1,024 further on.
template <int P> __device__ __forceinline__ u32 x_place(int row, int column) {
  if constexpr (!paired(P)) return (u32)(row * x_pitch(product_k(P)) + column) / 2;
  const int place = pair_place<P>(column / 2);
  return (u32)x_piece<P>(row, place / 4) / 2 + place % 4;
}
template <int P> __device__ constexpr int x_row_words() { return x_pitch(product_k(P)) / 2; }
template <int P> __device__ constexpr int x_step_words() {
  return (1024 + (paired(P) ? 1024 / PAIR_SEGMENT * PAIR_PAD : 0)) / 2;
}
template <int P, class T> __device__ __forceinline__ void store_x(T *x, u32 place, const float (&y)[4]) {
  u32 *const to = reinterpret_cast<u32 *>(x) + place;
  if constexpr (paired(P)) {
    to[0] = pack2<T>(y[0], y[1]);
    to[4] = pack2<T>(y[2], y[3]);
  } else {
    store_floats<T, 4>(reinterpret_cast<T *>(to), y);
  }
}

template <class T> __device__ __forceinline__ Vec<T, 8> as_vec(const u32 (&v)[4]) {
  const uint4 raw = make_uint4(v[0], v[1], v[2], v[3]);
  return *reinterpret_cast<const Vec<T, 8> *>(&raw);
}

struct __align__(16) Link {
  u64 *words;
  u32 tag;

  template <int Words> __device__ __forceinline__ u64 *pair_of_words(int row, int pair) const {
    static_assert(Words % 4 == 0, "even and odd pairs");
    return words + (i64)row * Words + ((pair & 1) * (Words / 4) + (pair >> 1)) * 2;
  }
  template <int Words, bool WholeWarp = false>
  __device__ __forceinline__ void receive(u32 (&payload)[4], int row, int word, bool wanted = true) const {
    const u64 *const even[1] = {pair_of_words<Words>(row, word / 2)}, *const odd[1] = {even[0] + Words / 2};
    u32 v[1][4];
    receive_words<1, WholeWarp>(v, even, odd, wanted ? 1u : 0u, tag);
#pragma unroll
    for (int i = 0; i < 4; ++i) payload[i] = v[0][i];
  }

  // Two neighbouring values of a row. Where they go, counted in words or in pairs of T or in floats, can be found before they
  // are there. Receiver: the product that takes the row as x, or one without an order of its own.
  template <int N, int Receiver = NOBODY> __device__ __forceinline__ u32 pair_at(int row, int column) const {
    const u32 place = pair_place<Receiver>(column / 2);
    if constexpr (DIRECT) return (u32)(row * (N / 2)) + ((place / 2 & 1) * (N / 8) + place / 4) * 2 + place % 2;
    return (u32)(row * N + column) / 2;
  }
  template <class T> __device__ __forceinline__ void send_pair(u32 at, float first, float second) const {
    const u32 pair = pack2<T>(first, second);
    if constexpr (DIRECT)
      send_word(words + at, pair, tag);
    else
      reinterpret_cast<u32 *>(words)[at] = pair;
  }
  template <int N> __device__ __forceinline__ u32 floats_at(int row, int column) const {
    return (u32)(row * N) + (DIRECT ? ((column / 2 & 1) * (N / 4) + column / 4) * 2 : column);
  }
  __device__ __forceinline__ void send_floats(u32 at, float first, float second) const {
    if constexpr (DIRECT)
      send_words(words + at, __float_as_uint(first), __float_as_uint(second), tag);
    else
      store_vec(reinterpret_cast<float *>(words) + at, Vec<float, 2>{first, second});
  }
  // The same at once.
  template <int N, class T, int Receiver = NOBODY>
  __device__ __forceinline__ void send_pair(int row, int column, float first, float second) const {
    send_pair<T>(pair_at<N, Receiver>(row, column), first, second);
  }
  template <int N> __device__ __forceinline__ void send_floats(int row, int column, float first, float second) const {
    send_floats(floats_at<N>(row, column), first, second);
  }
  template <int N, class T> __device__ __forceinline__ Vec<T, 8> receive8(int row, int column) const {
    if constexpr (DIRECT) {
      u32 v[4];
      receive<N / 2>(v, row, column / 2);
      return as_vec<T>(v);
    } else {
      return load_vec<T, 8>(reinterpret_cast<const T *>(words) + (i64)row * N + column);
    }
  }
  // With DIRECT: the pieces of eight `begin`, begin + THREADS, ... of all rows together, as far as there are any.
  template <int N, class T, int Pieces>
  __device__ __forceinline__ void receive8(Vec<T, 8> (&to)[Pieces], int begin) const {
    const u64 *even[Pieces], *odd[Pieces];
    u32 v[Pieces][4], mask = 0;
#pragma unroll
    for (int n = 0; n < Pieces; ++n) {
      const int i = begin + n * THREADS;
      const bool inside = n == 0 || i < ROWS * (N / 8);
      even[n] = pair_of_words<N / 2>((inside ? i : 0) / (N / 8), (inside ? i : 0) % (N / 8) * 2);
      odd[n] = even[n] + N / 4;
      if (inside) mask |= 1u << n;
    }
    receive_words<Pieces>(v, reinterpret_cast<const u64 *const(&)[Pieces]>(even),
                          reinterpret_cast<const u64 *const(&)[Pieces]>(odd), mask, tag);
#pragma unroll
    for (int n = 0; n < Pieces; ++n) to[n] = as_vec<T>(v[n]);
  }
  // Eight at `column` and eight at `other`.
  template <int N, class T>
  __device__ __forceinline__ void receive16(Vec<T, 8> &a, Vec<T, 8> &b, int row, int column, int other) const {
    if constexpr (DIRECT) {
      const u64 *const even[2] = {pair_of_words<N / 2>(row, column / 4), pair_of_words<N / 2>(row, other / 4)};
      const u64 *const odd[2] = {even[0] + N / 4, even[1] + N / 4};
      u32 v[2][4];
      receive_words<2>(v, even, odd, 3u, tag);
      a = as_vec<T>(v[0]);
      b = as_vec<T>(v[1]);
    } else {
      a = receive8<N, T>(row, column);
      b = receive8<N, T>(row, other);
    }
  }
  // Four floats at `column` and at every 1,024 columns behind it, all of them asked for at once. Called by
  // whole warps; zeros where nothing is wanted.
  template <int N, int Steps>
  __device__ __forceinline__ void receive_floats(Vec<float, 4> (&to)[Steps], int row, int column, bool wanted) const {
    if constexpr (DIRECT) {
      const u64 *even[Steps], *odd[Steps];
      u32 v[Steps][4], mask = 0;
#pragma unroll
      for (int step = 0; step < Steps; ++step) {
        const bool inside = N % 1024 == 0 || column + step * 1024 < N;
        even[step] = pair_of_words<N>(row, (inside ? column + step * 1024 : 0) / 2);
        odd[step] = even[step] + N / 2;
        if (wanted && inside) mask |= 1u << step;
      }
      receive_words<Steps, N % 128 == 0>(v, reinterpret_cast<const u64 *const(&)[Steps]>(even),
                                         reinterpret_cast<const u64 *const(&)[Steps]>(odd), mask, tag);
#pragma unroll
      for (int step = 0; step < Steps; ++step)
#pragma unroll
        for (int j = 0; j < 4; ++j) to[step].v[j] = __uint_as_float(v[step][j]);
    } else {
#pragma unroll
      for (int step = 0; step < Steps; ++step)
        to[step] = wanted && column + step * 1024 < N
                       ? load_vec<float, 4>(reinterpret_cast<const float *>(words) + (i64)row * N + column + step * 1024)
                       : Vec<float, 4>{};
    }
  }
};

// What is done with the finished sums of two neighbouring columns (of GATE_UP: two gates and their ups). Where their result
// goes, at(row, column), can be found before they are there.
template <int N, class T> struct StoreRounded {  // T [ROWS, N]
  const float *bias;
  Link out;
  __device__ __forceinline__ u32 at(int row, int column) const { return out.template pair_at<N>(row, column); }
  __device__ __forceinline__ void store(u32 at, float a, float b, int row, int column) const {
    const LinearOutput<float> linear{bias, nullptr, nullptr, ROWS, N};
    out.template send_pair<T>(at, linear.finish(a, 0, column), linear.finish(b, 0, column + 1));
  }
};

template <class T> struct StoreLogits {
  float *out;
  __device__ __forceinline__ u32 at(int row, int column) const { return (u32)(row * VOCAB + column); }
  __device__ __forceinline__ void store(u32 at, float a, float b, int, int) const { store_vec(out + at, Vec<float, 2>{a, b}); }
};

// float [ROWS, HIDDEN]. A column of the residual stream always belongs to the same block, which keeps it in shared memory
// [ROWS][OWNED * 8] and sends copies to the others.
template <class T> struct AddToResidual {
  const float *bias;
  float *own;
  Link out;
  int first_column;
  __device__ __forceinline__ u32 at(int row, int column) const { return out.template floats_at<HIDDEN>(row, column); }
  __device__ __forceinline__ void store(u32 at, float a, float b, int row, int column) const {
    float *const mine = own + row * OWNED * 8 + column - first_column;
    const Vec<float, 2> before = load_vec<float, 2>(mine);
    const LinearOutput<float> linear{bias, nullptr, nullptr, ROWS, HIDDEN};
    const Vec<float, 2> sum{before.v[0] + linear.finish(a, 0, column), before.v[1] + linear.finish(b, 0, column + 1)};
    store_vec(mine, sum);
    out.send_floats(at, sum.v[0], sum.v[1]);
  }
};

template <class T> struct StoreSwiglu {  // T [ROWS, INTERMEDIATE]
  Link out;
  __device__ __forceinline__ static float swiglu(float gate, float up) {
    return silu_mul(to_float(from_float<T>(gate)), to_float(from_float<T>(up)));
  }
  __device__ __forceinline__ u32 at(int row, int column) const {
    return out.template pair_at<INTERMEDIATE, DOWN>(row, column);
  }
  __device__ __forceinline__ void store(u32 at, float gate_a, float gate_b, float up_a, float up_b) const {
    out.template send_pair<T>(at, swiglu(gate_a, up_a), swiglu(gate_b, up_b));
  }
};

// Fragments of x for two k-steps at column k: all four registers of the mma's A operand for each. Rows of the tile beyond ROWS
// are copies of row 0, and so are their sums, which nobody looks at.
template <class T> struct Fragments {
  const T *lane_row, *zeros;  // this lane's row for ldmatrix at column 0

  __device__ __forceinline__ Fragments(const T *x, const T *zeros, int pitch, int lane) : zeros(zeros) {
    const int row = ROWS <= 8 ? lane & 7 : lane & 15, piece = ROWS <= 8 ? lane >> 3 : lane >> 4;
    lane_row = x + (row < ROWS ? row : 0) * pitch + piece * 8;
  }
  // `both` false: the row ends after the first step, the second gets nothing of use.
  __device__ __forceinline__ void load(u32 (&a)[2][4], int k, bool both = true) const {
    const T *const from = lane_row + k;
    if constexpr (ROWS <= 8) {
      u32 r[4];
      ldmatrix_x4(r, both || (threadIdx.x & 31) < 16 ? from : zeros);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[s][0] = r[2 * s];
        a[s][2] = r[2 * s + 1];
        a[s][1] = a[s][3] = 0u;
      }
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

// The same for the mma's other order, the weight as A and up to 8 rows of x as B, a chunk at a time in two halves: one half is
// multiplied while the other is read. The 8 rows of the weight are there twice, and half of the sums are of no use; but all
// registers of A come from one ldmatrix, while x as A needs four moves a step.
template <class T> struct Halves {
  static constexpr int Steps = RING_K / 32;  // of a half
  u32 w[2][Steps][4], x[2][Steps / 2][4];
  const T *lane_row;  // of x, for ldmatrix at column 0
  int at;             // tile_offset of this lane's piece of the weight in the first step

  __device__ __forceinline__ Halves(const T *rows, int pitch) {
    const int lane = this_thread() & 31, row = lane & 7;
    lane_row = rows + (row < ROWS ? row : 0) * pitch + (lane >> 3) * 8;
    at = row * RING_K + (((lane >> 4) ^ row) << 3);
  }
  __device__ __forceinline__ void load_w(int half, const T *slot) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      const int piece = 2 * (half * Steps + i);
      ldmatrix_x4(w[half][i], slot + (at ^ ((piece & 6) << 3)) + (piece & 8) * 8);
    }
  }
  __device__ __forceinline__ void load_x(int half, int k) {
#pragma unroll
    for (int i = 0; i < Steps / 2; ++i) ldmatrix_x4(x[half][i], lane_row + k + (half * Steps + 2 * i) * 16);
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], int half) const {
#pragma unroll
    for (int i = 0; i < Steps; ++i) mma_m16n8k16<T>(acc, w[half][i], x[half][i / 2][i % 2 * 2], x[half][i / 2][i % 2 * 2 + 1]);
  }
};

// A unit of a paired product: its weights as A operands, read from the ring before x is there.
template <class T> struct Ahead {
  static constexpr int Steps = PAIR_SEGMENT / 16;
  u32 w[Steps][4];

  // Later: groups of copies that were committed behind the ring's.
  template <int P, int Later = 0> __device__ __forceinline__ void load(WeightStream<T> &stream, int unit) {
    if constexpr (paired(P)) {
      if (unit < stream.plan.units[P]) {
        const int lane = this_thread() & 31, row = lane & 7, half = lane >> 3 & 1, piece = lane >> 4;
        stream.template front_unit<Later>();
        const int at = row * RING_K + ((piece ^ row) << 3);  // tile_offset of the first step
        const T *const chunks = stream.ring + half * (PAIR_SEGMENT / RING_K) * RING_ELEMENTS;
#pragma unroll
        for (int step = 0; step < Steps; ++step)
          ldmatrix_x4(w[step], chunks + step / 8 * RING_ELEMENTS + ((at ^ ((2 * step & 6) << 3)) + (2 * step & 8) * 8));
      } else {  // a register that is written under a condition alone would be live everywhere
#pragma unroll
        for (int step = 0; step < Steps; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i) w[step][i] = 0u;
      }
    }
  }

  // The sums of a unit.
  template <int P> __device__ __forceinline__ void multiply(const T *x, float *partial, int unit) const {
    constexpr int K = product_k(P), Units = product_units(P);
    const int lane = this_thread() & 31, g = lane >> 2, t = lane & 3;
    const T *const from = x + g % ROWS * x_pitch(K) + (unit % Units * 2 + (g / ROWS & 1)) * (PAIR_SEGMENT + PAIR_PAD) + t * 8;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    u32 to = 16 * (unit * ROWS + t) + g;  // of the first column of two; found before the sums are there
    opaque(to);
#pragma unroll
    for (int two = 0; two < Steps / 2; ++two) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (g < 2 * ROWS) b = *reinterpret_cast<const uint4 *>(from + two * 32);
      mma_m16n8k16<T>(acc, w[2 * two], b.x, b.y);
      mma_m16n8k16<T>(acc, w[2 * two + 1], b.z, b.w);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int half = (2 * t + e) / ROWS;
      if (half < 2) partial[to + 8 * e] = half == 0 ? acc[e] : acc[2 + e];
    }
  }
};

// `unit`: this warp's place in the sequence of units, relative to the start of this product; carried from phase to phase.
// Called by the whole block, with x readable; the sums of one tile's segments meet in `partial`.
template <int P, class T, class Out>
__device__ __forceinline__ void multiply(WeightStream<T> &stream, int &unit, const T *x, const T *zeros, float *partial,
                                         Ahead<T> &ahead, const Out &out) {
  constexpr int K = product_k(P), Segment = product_segment(P), Segments = product_segments(P);
  constexpr bool WholeChunks = K % RING_K == 0;
  // A unit of two whole chunks is multiplied at once. Its slots are filled again only after the results are on their way, if
  // the ring holds enough: other blocks wait for these, and nobody for the weights.
  constexpr bool Twos = !in_runs(P) && Segments > 1 && Segment == 2 * RING_K && K % Segment == 0 && RING_SLOTS >= 2;
  constexpr int MostOwed = RING_SLOTS >= 4 ? 2 : 0;  // slots not filled again while the next two are read
  const int self = this_thread();
  const int lane = self & 31, g = lane >> 2, t = lane & 3, row8 = lane & 7, quarter8 = lane >> 3;
  const int first = stream.plan.first[P], units = stream.plan.units[P], dealt = stream.plan.dealt[P];
  // A segment of many chunks is one chain of products: the next chunk is read and more weights are asked for beside it.
  constexpr bool Runs = in_runs(P), Chain = WholeChunks && K > RING_K && ROWS <= 8 && (Runs || Segments == 1);
  const Fragments<T> fragments(x, zeros, x_pitch(K), lane);
  auto load_weights = [&](u32(&w)[RING_K / 32][4], const T *chunk) {
#pragma unroll
    for (int pair = 0; pair < RING_K / 32; ++pair)
      ldmatrix_x4(w[pair], chunk + tile_offset<RING_K>(row8, pair * 4 + quarter8));
  };
  int owed = 0;  // slots read and not filled again
  const bool mine = paired(P) && unit < units;
  if (paired(P)) stream.fill_due(P);
  bool first_unit = true;
  constexpr int Mark = first_mark(P);
  (void)first_unit, (void)Mark;

  if constexpr (paired(P)) {
    if (mine) {
      MARK(stream.plan, Mark);
      ahead.template multiply<P>(x, partial, unit);
      MARK(stream.plan, Mark + 1);
      unit += WARPS;
    }
  }
  for (; Chain && !paired(P) && unit < dealt; unit += STREAMS) {
    int item = Runs ? units * unit / dealt : unit;  // a segment of a tile
    const int last = Runs ? units * (unit + 1) / dealt - 1 : item;
    int k0 = item % Segments * Segment;
    Halves<T> halves(x, x_pitch(K));
    const T *slot = stream.front();
    if (first_unit) MARK(stream.plan, Mark);
    halves.load_w(0, slot);
    halves.load_x(0, k0);
#pragma unroll 1
    for (;; ++item) {
      const int end = min(k0 + Segment, K);
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      int k = k0;
      const bool hold = held_slots(P) > 0 && last - item < held_slots(P) * RING_K / Segment;
#pragma unroll 1
      while (k + RING_K < end) {
        stream.find();
        // As long as both what is fetched and what is multiplied go on in one row: a loop without a branch.
        const int stop = stream.k_left > 0 ? min(end, k + RING_K + ceil_div(stream.k_left, RING_K) * RING_K) : end;
#pragma unroll 1
        for (; k + RING_K < stop; k += RING_K) {
          halves.load_w(1, slot);
          __syncwarp();  // the slot is read
          if (held_slots(P) > 0 && hold)
            stream.hold();
          else
            stream.copy();
          halves.multiply(acc, 0);
          slot = stream.front();
          halves.load_x(1, k);  // here, or the compiler lays all products before the wait and what is read next behind them
          halves.load_w(0, slot);
          halves.load_x(0, k + RING_K);
          halves.multiply(acc, 1);
        }
      }
      halves.load_w(1, slot);
      __syncwarp();  // the slot is read
      if (held_slots(P) > 0 && hold)
        stream.hold();
      else
        stream.fill();
      halves.multiply(acc, 0);
      halves.load_x(1, k);
      const bool more = Runs && item < last;
      if (more) {
        k0 = k0 + Segment < K ? k0 + Segment : 0;
        slot = stream.front();
        halves.load_w(0, slot);
        halves.load_x(0, k0);
      }
      halves.multiply(acc, 1);
      if constexpr (Segments > 1) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (2 * t + e < ROWS) partial[(item * ROWS + 2 * t + e) * 8 + g] = acc[e];
      } else {  // neighbouring columns are in neighbouring lanes: one takes the even row, the other the odd one
        const float other = __shfl_xor_sync(0xffffffffu, g % 2 ? acc[0] : acc[1], 4);
        const float a = g % 2 ? other : acc[0], b = g % 2 ? acc[1] : other;
        const int row = 2 * t + g % 2, column = g & ~1;
        if constexpr (P == GATE_UP) {
          const float up_a = __shfl_xor_sync(0xffffffffu, a, 16), up_b = __shfl_xor_sync(0xffffffffu, b, 16);
          if (g < 4 && row < ROWS) out.store(out.at(row, (first + item) * 4 + column), a, b, up_a, up_b);
        } else if (row < ROWS) {
          out.store(out.at(row, (first + item) * 8 + column), a, b, row, (first + item) * 8 + column);
        }
      }
      if (!more) break;
    }
    if (first_unit) MARK(stream.plan, Mark + 1);
    first_unit = false;
  }
  for (; !Chain && !paired(P) && unit < units; unit += STREAMS) {
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
        const float a = acc[2 * h], b = acc[2 * h + 1];
        if constexpr (P == GATE_UP) {
          const float up_a = __shfl_xor_sync(0xffffffffu, a, 2), up_b = __shfl_xor_sync(0xffffffffu, b, 2);
          if (t < 2 && g + 8 * h < ROWS) out.store(out.at(g + 8 * h, (first + tile) * 4 + 2 * t), a, b, up_a, up_b);
        } else if (g + 8 * h < ROWS) {
          out.store(out.at(g + 8 * h, (first + tile) * 8 + 2 * t), a, b, g + 8 * h, (first + tile) * 8 + 2 * t);
        }
      }
    }
    if (first_unit) MARK(stream.plan, Mark + 1);
    first_unit = false;
  }
  unit -= dealt;
  MARK(stream.plan, Mark + 2);

  // Two columns of a row, from the sums of their segments. What a thread has to do is known before the sums are there.
  constexpr int Pairs = P == GATE_UP ? 2 : 4;
  struct Columns {
    int row, column, from;  // the first of their sums
    u32 at;                 // where the result goes
  };
  auto columns_of = [&](int e) {
    Columns c;
    const int tile = e / (Pairs * ROWS), inside = e % Pairs * 2;
    c.row = e / Pairs % ROWS;
    c.column = (first + tile) * (2 * Pairs) + inside;
    c.from = (tile * Segments * ROWS + c.row) * 8 + inside;
    c.at = out.at(c.row, c.column);
    return c;
  };
  auto add_up = [&](const Columns &c) {
    const float *const sums = partial + c.from;
    float a = -0.f, b = -0.f, up_a = -0.f, up_b = -0.f;  // -0 is the identity of addition
#pragma unroll Segments <= 12 ? Segments : 6
    for (int s = 0; s < Segments; ++s) {
      const Vec<float, 2> v = load_vec<float, 2>(sums + s * ROWS * 8);
      a += v.v[0];
      b += v.v[1];
      if (P == GATE_UP) {
        const Vec<float, 2> up = load_vec<float, 2>(sums + s * ROWS * 8 + 4);
        up_a += up.v[0];
        up_b += up.v[1];
      }
    }
    if constexpr (P == GATE_UP)
      out.store(c.at, a, b, up_a, up_b);
    else
      out.store(c.at, a, b, c.row, c.column);
  };
  constexpr bool Once = Segments > 1 && PARTIALS / Segments * ROWS * Pairs <= THREADS;
  Columns mine_to_add{};
  if constexpr (Once) {
    mine_to_add = columns_of(self);
    u32 *const known = reinterpret_cast<u32 *>(&mine_to_add);
#pragma unroll
    for (int i = ROWS > 1 ? 0 : 1; i < 4; ++i) opaque(known[i]);
  }
  const int columns_to_add = units / product_units(P) * ROWS * Pairs;
  __syncthreads();  // the sums are there, and x may be overwritten
  MARK(stream.plan, Mark + 3);
  if constexpr (Once) {
    if (self < columns_to_add) add_up(mine_to_add);
  } else if constexpr (Segments > 1) {
    for (int e = self; e < columns_to_add; e += THREADS) add_up(columns_of(e));
  }
  MARK(stream.plan, Mark + 4);
  if constexpr (paired(P))
    stream.template refill<P>(mine);
  else
    stream.fill(owed);
  MARK(stream.plan, Mark + 5);
}
