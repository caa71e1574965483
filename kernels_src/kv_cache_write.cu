// Write into the paged cache:  token t of k and v goes to slot slots[t], row slot % block_size of block slot / block_size.
//
// Layouts   k, v [tokens, heads, D]; k_cache, v_cache [blocks, heads, block_size, D]; slots int64 [tokens]
// Bound     memory: k and v read once, written once
// Launch    one block for every THREADS vectors of k, counted through all tokens
// Template  T storage type; Width: elements of a vector (16 bytes, or 1 where D is not made of whole vectors)
// Measured: see docs/performance.md
//
// A negative slot is skipped, and so is one past the cache: nothing is written out of bounds.
#include "common/paged.cuh"
#include "common/rows.cuh"

constexpr int THREADS = 256;

template <class T, int Width>
__global__ void __launch_bounds__(THREADS)
    kv_cache_write(const T *k, const T *v, T *k_cache, T *v_cache, const i64 *slots, i64 tokens, int heads, int dim,
                   int block_size, i64 num_slots) {
  const u32 vectors = dim / Width;  // of a head
  const RowWalk at((i64)blockIdx.x * THREADS + threadIdx.x, THREADS, heads * vectors);
  if (at.row >= tokens) return;
  const i64 slot = slots[at.row];
  if (slot < 0 || slot >= num_slots) return;
  const u32 head = at.column / vectors, element = at.column % vectors * Width;
  const i64 source = (at.row * heads + head) * dim + element;
  const i64 target = slot_offset(slot, head, heads, block_size, dim) + element;
  const Vec<T, Width> key = load_vec_once<T, Width>(k + source), value = load_vec_once<T, Width>(v + source);
  store_vec<T, Width>(k_cache + target, key);
  store_vec<T, Width>(v_cache + target, value);
}
