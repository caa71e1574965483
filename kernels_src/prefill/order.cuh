// In which order the Hopper kernels of prefill attention work: number -> query tile of a head. A column is a query head, of a
// sequence where the arrays are dense, of all sequences in a packed batch. Columns come in sections whose keys and values
// together stay in L2; a section's columns take turns, so that the query heads of a key/value head are neighbours. Causal: the
// tiles of a section go from many keys to few or the other way, so that tiles at a section's border are alike, and the last
// ones are short: dealt out forwards and backwards in turn, blocks get about equal shares.
// Test: tests/test_attention_prefill_sm90.py
#pragma once
#include "common/packed_tiles.cuh"

constexpr int SECTION_BYTES = 16 << 20;  // of keys and values in a section
enum Layout { Dense, Packed, Paged };

// Rows: of a tile. Dense: the first `tall` tiles of a sequence have so many, the others 64 fewer.
template <int D, int Kind, int Rows> struct WorkOrder {
  using Lengths = PackedLengths<Kind == Paged>;
  PackedTiles<Rows, Kind == Paged> packed;
  int tiles;    // of a column
  int wide;     // columns of a section
  int section;  // the last one asked for

  // single: no block does more than one item, the order does not matter.
  __device__ __forceinline__ void init(const Lengths &lengths, int batch, int q_tokens, int kv_tokens, int num_heads, int group,
                                       int tall, bool single) {
    int columns = num_heads, chunks = 0;  // of 128 keys, in a column
    if constexpr (Kind == Dense) {
      columns *= batch;
      tiles = tall + ceil_div(max(q_tokens - tall * Rows, 0), Rows - 64);
      chunks = ceil_div(kv_tokens, 128);
    } else if (single) {
      tiles = 0x7fffffff / num_heads;
    } else {
      tiles = 0;
#pragma unroll 1
      for (int b = threadIdx.x & 31; b < batch; b += 32) {
        tiles += packed.tiles_of(lengths, b);
        chunks += ceil_div(lengths.keys(b), 128);
      }
      tiles = __reduce_add_sync(0xffffffffu, tiles);
      chunks = __reduce_add_sync(0xffffffffu, chunks);
    }
    const int groups = columns / group, fit = max(SECTION_BYTES / (4 * 128 * D) / max(chunks, 1), 1);
    wide = ceil_div(groups, ceil_div(groups, fit)) * group;
    section = -1;
  }

  // False: there is none of this number. A warp asks together, for numbers that do not fall.
  __device__ __forceinline__ bool find(const Lengths &lengths, int batch, int num_heads, int causal, u32 number, int &sequence,
                                       int &tile, int &head) {
    const int now = number / max((u32)(wide * tiles), 1u);
    const int rest = (Kind == Dense ? batch : 1) * num_heads - now * wide;  // columns from this section on
    if (rest <= 0) return false;
    const bool backwards = ((rest - 1) / wide) & 1;
    const int left = number - now * wide * tiles, columns = min(wide, rest);
    const int rank = left / columns, column = now * wide + left % columns;
    if constexpr (Kind == Dense) {
      sequence = column / num_heads;
      head = column % num_heads;
      tile = backwards == (causal != 0) ? rank : tiles - 1 - rank;
      return true;
    } else {
      if (now != section) packed.reset(backwards);
      section = now;
      head = column;
      return packed.find(lengths, batch, causal, rank, sequence, tile);
    }
  }
};
