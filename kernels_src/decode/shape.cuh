// The model that a decode step is compiled for, from the macros that cukern/models/decode_step.py puts before the source, and
// what follows from them: the products of a step, how they are dealt to blocks and warps, and the shared memory.
//   MODEL_*        sizes; SEGMENT_*: K segments of the five weights (numerics contract; a multiple of 128, or all of K)
//   ROWS           sequences, 1 to 16
//   STREAMS        warps of a block that multiply, the last ones; each has a ring of weights (few and deep ones where a product
//                  has few units a block)
//   RING_K         128 or 64: a slot of a ring is 8 rows x RING_K; RING_SLOTS: slots of a ring
//   PARTIALS       most K-segment sums of a block at a time; OWNED: most tiles of the residual stream that a block owns
//   OVERLAY        see Shared; SHARED_BYTES: of a block; PROFILE: clock readings, see MARK
//   BLOCKS         gridDim.x; ATTENTION_TEAMS: 1 or 2, see decode/attention.cuh
//   ATTENTION_ALONE  0: attention is the work of teams, 1: of single warps, 2: of what suits the lengths of a step; the bits
//                  are the same, a kernel with one of the two is shorter and so 1 to 2 % faster
//   VALUE_MAP      values may come by the copy engine, see decode/values.cuh
//   DIRECT         results go from block to block as tagged words (ptx/exchange.cuh) instead of through a grid barrier:
//                  a shorter way, but twice the bytes, and every block reads nearly all of them; for few rows
#pragma once
#include "common/chunk_merge.cuh"
#include "common/types.cuh"

constexpr int HIDDEN = MODEL_HIDDEN, HEADS = MODEL_HEADS, KV_HEADS = MODEL_KV_HEADS, HEAD_DIM = MODEL_HEAD_DIM;
constexpr int INTERMEDIATE = MODEL_INTERMEDIATE, VOCAB = MODEL_VOCAB, LAYERS = MODEL_LAYERS;
constexpr int GROUP = HEADS / KV_HEADS, Q_SIZE = HEADS * HEAD_DIM, QKV_SIZE = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int WARPS = 16, THREADS = WARPS * 32;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// ---- products. Their order in a step: QKV, O, GATE_UP, DOWN in every layer, then HEAD: "phase" 0 ... 4 LAYERS.
enum Product { QKV, O, GATE_UP, DOWN, HEAD };
constexpr int PHASES = 4 * LAYERS + 1;

// Outputs and inputs of each weight, and the segments that its sums are cut into.
__device__ constexpr int product_n(int p) {
  return p == QKV ? QKV_SIZE : p == GATE_UP ? 2 * INTERMEDIATE : p == HEAD ? VOCAB : HIDDEN;
}
__device__ constexpr int product_k(int p) { return p == O ? Q_SIZE : p == DOWN ? INTERMEDIATE : HIDDEN; }
__device__ constexpr int product_segment(int p) {
  return p == QKV ? SEGMENT_QKV : p == O ? SEGMENT_O : p == GATE_UP ? SEGMENT_GATE_UP : p == DOWN ? SEGMENT_DOWN : SEGMENT_HEAD;
}
__device__ constexpr int product_segments(int p) { return ceil_div(product_k(p), product_segment(p)); }

// A tile is 8 rows of the weight; of GATE_UP, 4 rows of gate and the 4 rows of up that belong to them. A block owns a
// contiguous range of tiles. A unit is one segment of one tile, or with PAIRS two: unit u of a product is part u % units of the
// block's tile u / units. The units of all phases, one after another, go to streams 0, 1, ... STREAMS - 1, 0, ... in turn.
__device__ constexpr int product_tiles(int p) { return product_n(p) / 8; }
// The stream of this warp; negative where it has none.
__device__ __forceinline__ int stream_index() { return (int)(threadIdx.x >> 5) - (WARPS - STREAMS); }

// Two neighbouring segments are multiplied at once: rows of the mma's A are 8 rows of the weight in the first and in the second
// segment, columns of B the rows of x in the first and in the second; half of the sums are of use. Where the batch is small, a
// warp's ring is exactly such a unit, and no product of a layer has more units than a block has warps.
constexpr int PAIR_SEGMENT = 256, PAIR_CHUNKS = 4;
__device__ constexpr bool can_pair(int p) {
  return product_segment(p) == PAIR_SEGMENT && product_k(p) % (2 * PAIR_SEGMENT) == 0 &&
         ceil_div(product_tiles(p), BLOCKS) * (product_k(p) / (2 * PAIR_SEGMENT)) <= WARPS;
}
constexpr bool PAIRS = DIRECT && STREAMS == WARPS && RING_K * PAIR_CHUNKS == 2 * PAIR_SEGMENT &&
                       RING_SLOTS == PAIR_CHUNKS && can_pair(QKV) && can_pair(O) && can_pair(GATE_UP) && can_pair(DOWN);
__device__ constexpr bool paired(int p) { return PAIRS && p != HEAD; }
__device__ constexpr int unit_k(int p) { return paired(p) ? 2 * PAIR_SEGMENT : product_segment(p); }
__device__ constexpr int product_units(int p) { return ceil_div(product_k(p), unit_k(p)); }  // of a tile
// With few streams, short units are dealt in runs of neighbours, one for each stream.
__device__ constexpr bool in_runs(int p) {
  return STREAMS < WARPS && ROWS <= 8 && product_units(p) > 1 && unit_k(p) % RING_K == 0 && product_k(p) % unit_k(p) == 0;
}
// While the heads are computed, everybody waits for a few blocks, the first ones (as long as no sequence has more chunks than a
// block has teams). These get less of the products, so that they are early: no part of QKV if the others can take all of it in
// one round of pairs, else what the others do not take without becoming later; of what is small, O and down, likewise.
constexpr int HEAD_BLOCKS = ROWS * KV_HEADS;
constexpr bool SPARED = ATTENTION_ALONE != 1 && HEAD_BLOCKS * 8 <= BLOCKS;
__device__ constexpr int tiles_without(int p) {  // of each other block, at most
  const int most = ceil_div(product_tiles(p), BLOCKS), all = ceil_div(product_tiles(p), larger(BLOCKS - HEAD_BLOCKS, 1));
  return p == QKV && PAIRS && all * product_units(p) <= WARPS && all * product_segments(p) <= PARTIALS ? all : most;
}
__device__ constexpr int head_block_tiles(int p) {  // of all of them together
  if (p != QKV && !(PAIRS && (p == O || p == DOWN))) return ceil_div(product_tiles(p) * HEAD_BLOCKS, BLOCKS);
  return larger(product_tiles(p) - (BLOCKS - HEAD_BLOCKS) * tiles_without(p), 0);
}
__device__ __forceinline__ int first_tile(int p, int block, bool spared) {
  if constexpr (SPARED)
    if (spared) {
      const int theirs = head_block_tiles(p), others = product_tiles(p) - theirs;
      if (block <= HEAD_BLOCKS) return theirs * block / HEAD_BLOCKS;
      return theirs + (int)((i64)others * (block - HEAD_BLOCKS) / (BLOCKS - HEAD_BLOCKS));
    }
  return (int)((i64)product_tiles(p) * block / BLOCKS);
}

static_assert(GROUP * KV_HEADS == HEADS && GROUP <= 16, "query heads of a key/value head are rows of one mma tile");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "a chunk of keys and values fits shared memory");
static_assert(HIDDEN % 16 == 0 && Q_SIZE % 16 == 0 && INTERMEDIATE % 16 == 0 && VOCAB % 8 == 0, "whole k-steps and tiles");
static_assert(ROWS >= 1 && ROWS <= 16, "rows of one mma tile");
static_assert(STREAMS >= 1 && STREAMS <= WARPS, "streams are warps");

// ---- attention
// With DIRECT, a chunk of a head in words: accumulators, l of four lanes, m, which is sent ahead, unused.
constexpr int PART_L = HEAD_DIM, PART_M = HEAD_DIM + 4, PART_WORDS = HEAD_DIM + 8;

// ---- shared memory
constexpr int RING_ELEMENTS = 8 * RING_K;  // of a slot
constexpr int KEYS = ATTENTION_CHUNK, KEY_TILE = ATTENTION_TILE, KEY_GROUPS = KEYS / 16;
constexpr int PAD = 8;  // elements between rows of x: the rows that ldmatrix reads together lie in different banks
constexpr int PAIR_PAD = 32;  // and behind a segment, where segments are multiplied in pairs
// x in shared memory: ROWS rows of K elements.
__device__ constexpr int x_pitch(int k) { return k + PAD + (DIRECT ? k / 256 * PAIR_PAD : 0); }

constexpr int LONGEST_K = larger(larger(HIDDEN, Q_SIZE), INTERMEDIATE);
constexpr int X_BYTES = ROWS * x_pitch(LONGEST_K) * 2;
constexpr int TEAMS = ATTENTION_TEAMS, TEAM_WARPS = 8, TEAM_THREADS = TEAM_WARPS * 32;  // see decode/attention.cuh
constexpr int KV_BYTES = larger(TEAMS * KEYS * HEAD_DIM * 2, (int)sizeof(MergeMemory));  // values of an item of each team

struct RowState {  // of a sequence; does not change during a step
  i64 slot;
  int length, chunks, first_item, embedding;  // embedding: row of the table, -1 for an id outside the vocabulary
  int position_inside, slot_of_last;          // slot_of_last: whether `slot` is where the block table puts the last key
};

struct LayerPointers {
  u64 input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, down;
};

struct Plan {
  LayerPointers layers[LAYERS];
  u64 head;
  u64 values_there[2], rows_there;   // mbarriers, see decode/values.cuh
  int first[5], units[5], dealt[5];  // tiles, units, and what goes to streams in turn: units or runs of them
  short couples, alone;              // see decode/attention.cuh
  short by_engine[2];                // whether a team's first values come by the copy engine
#if PROFILE
  u32 *marks[WARPS];  // where each warp writes its clock, [MARKS][WARPS] of the layer
#endif
};

// With PROFILE every warp writes its clock at MARKS points of a layer; cukern/bench/profile_decode.py names them.
constexpr int MARKS = 48;
__device__ constexpr int first_mark(int p) { return p == O ? 25 : p == GATE_UP ? 34 : p == DOWN ? 42 : 3; }
#if PROFILE
#define MARK(plan, point) \
  if ((threadIdx.x & 31) == 0) (plan).marks[threadIdx.x >> 5][(point) * WARPS] = (u32)clock()
#else
#define MARK(plan, point)
#endif

struct TeamShared {  // of attention
  static constexpr int q = 0;                            // T [16, HEAD_DIM], see store_query
  static constexpr int p = q + 16 * HEAD_DIM * 2;        // T [16, KEYS]
  static constexpr int new_key = p + 16 * KEYS * 2;      // T [HEAD_DIM]
  static constexpr int key_max = new_key + HEAD_DIM * 2;  // float [16, KEY_GROUPS]
  static constexpr int key_sum = key_max + 16 * KEY_GROUPS * 4;
  static constexpr int head_norms = key_sum + 64 * KEY_GROUPS * 4;  // float [2][HEAD_DIM]: of queries, of keys
  static constexpr int first = head_norms + 2 * HEAD_DIM * 4;  // its first item and their number: int [4]
  static constexpr int first_pages = first + 16;                    // its pages: int [32]
  static constexpr int first_keys = first_pages + 128;  // of its keys 0, 16, ...: row in a layer's cache, or -1: int [32]
  static constexpr int bytes = first_keys + 128;
};

// Where every warp works on items of its own (decode/warp_attention.cuh), it uses the memory of the teams otherwise.
constexpr int HEAD_LANES = HEAD_DIM > 128 ? 16 : HEAD_DIM > 64 ? 8 : HEAD_DIM > 32 ? 4 : HEAD_DIM > 16 ? 2 : 1;
constexpr int SLOT_KEYS = 16;  // keys or values of a slot
struct WarpShared {
  static constexpr int query_pitch = ceil_div(HEAD_DIM, 32) * 32 + 32;  // elements
  static constexpr int items_known = 3;
  static constexpr int head_norms = 0;                           // float [2][HEAD_DIM]: of queries, of keys
  static constexpr int first = head_norms + 2 * HEAD_DIM * 4;    // int: the block's first item
  static constexpr int units = first + 4;                        // int: and their number
  static constexpr int warps = first + 16;                       // of a warp:
  static constexpr int queries = 0;                              // T [GROUP][query_pitch]
  static constexpr int items = queries + GROUP * query_pitch * 2;  // int2 [items_known]
  static constexpr int pages = items + 32;                         // int [32]: of its first item
  static constexpr int warp_bytes = pages + 128;
  static constexpr int bytes = warps + WARPS * warp_bytes;
};
constexpr int ALONE = ATTENTION_ALONE;
static_assert(ALONE == 0 || (TEAMS == 2 && GROUP <= 8 && WarpShared::bytes <= TEAMS * TeamShared::bytes),
              "decode_step.py lets single warps attend where they have no room for it");

// Byte offsets. With OVERLAY the values lie over x, and are fetched only when the product before is done; else behind the
// rings, at a multiple of 1,024 bytes, which the swizzle of the copy engine wants.
struct Shared {
  static constexpr int ring = 0;
  static constexpr int ring_end = ring + STREAMS * RING_SLOTS * RING_ELEMENTS * 2;
  static constexpr int zeros = OVERLAY ? ring_end : ring_end + KV_BYTES;
  static constexpr int x = zeros + 16;
  static constexpr int kv = OVERLAY ? x : ring_end;
  static constexpr int teams = x + (OVERLAY ? larger(X_BYTES, KV_BYTES) : X_BYTES);
  static constexpr int partial = teams + TEAMS * TeamShared::bytes;
  static constexpr int own = partial + PARTIALS * ROWS * 32;
  static constexpr int groups = own + OWNED * ROWS * 32;
  static constexpr int rotations = groups + ROWS * 32;
  static constexpr int rows = rotations + ROWS * HEAD_DIM * 4;
  static constexpr int plan = rows + ROWS * (int)sizeof(RowState);
  static constexpr int bytes = plan + (int)sizeof(Plan);
};
static_assert(OVERLAY || Shared::kv % 1024 == 0, "alignment of the values");
static_assert(Shared::x % 16 == 0 && X_BYTES % 16 == 0 && KV_BYTES % 16 == 0 && sizeof(RowState) == 32, "alignment");
static_assert(Shared::bytes <= SHARED_BYTES, "decode_step.py asks for too little shared memory");
