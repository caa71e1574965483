// Block barriers, fences and warp collectives.
#pragma once
EMU_INLINE void __syncthreads(EMU_SITE) { emu_barrier(0, 0, emu::B_PLAIN, 0, EMU_HERE); }
EMU_INLINE int __syncthreads_count(int p, EMU_SITE) { return emu_barrier(0, 0, emu::B_COUNT, !!p, EMU_HERE); }
EMU_INLINE int __syncthreads_and(int p, EMU_SITE) { return emu_barrier(0, 0, emu::B_AND, !!p, EMU_HERE); }
EMU_INLINE int __syncthreads_or(int p, EMU_SITE) { return emu_barrier(0, 0, emu::B_OR, !!p, EMU_HERE); }
EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { emu_warp_barrier(mask, EMU_HERE); }
EMU_INLINE unsigned __activemask() { return emu_active_mask(); }
EMU_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_INLINE void __threadfence_block() {}
EMU_INLINE void __nanosleep(unsigned) { emu_yield(); }

namespace emu {
// A value of any size, eight bytes at a time; all lanes of one call have the same T.
template <class T> EMU_INLINE T shuffle(unsigned mask, T value, int source, const char *what, const char *file, int line) {
  constexpr int words = (sizeof(T) + 7) / 8;
  uint64_t w[words] = {};
  __builtin_memcpy(w, &value, sizeof value);
  for (int i = 0; i < words; ++i) w[i] = emu_shuffle(mask, w[i], source, what, file, line);
  __builtin_memcpy(&value, w, sizeof value);
  return value;
}
EMU_INLINE uint32_t reduce(unsigned m, ReduceOp op, uint32_t v, const char *w, const char *f, int l) {
  return emu_reduce(m, op, v, w, f, l);
}
}  // namespace emu

template <class T> EMU_INLINE T __shfl_sync(unsigned mask, T v, int source, int width = 32, EMU_SITE) {
  const int lane = emu_lane();
  return emu::shuffle(mask, v, (lane & ~(width - 1)) | (source & (width - 1)), "__shfl_sync", EMU_HERE);
}
template <class T> EMU_INLINE T __shfl_xor_sync(unsigned mask, T v, int step, int width = 32, EMU_SITE) {
  const int lane = emu_lane(), source = lane ^ step;
  return emu::shuffle(mask, v, source > (lane | (width - 1)) ? lane : source, "__shfl_xor_sync", EMU_HERE);
}
template <class T> EMU_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned step, int width = 32, EMU_SITE) {
  const int lane = emu_lane(), source = lane + (int)step;
  return emu::shuffle(mask, v, source > (lane | (width - 1)) ? lane : source, "__shfl_down_sync", EMU_HERE);
}
template <class T> EMU_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned step, int width = 32, EMU_SITE) {
  const int lane = emu_lane(), source = lane - (int)step;
  return emu::shuffle(mask, v, source < (lane & ~(width - 1)) ? lane : source, "__shfl_up_sync", EMU_HERE);
}
EMU_INLINE unsigned __ballot_sync(unsigned mask, int p, EMU_SITE) { return emu_vote(mask, p, "__ballot_sync", EMU_HERE); }
EMU_INLINE int __any_sync(unsigned mask, int p, EMU_SITE) { return emu_vote(mask, p, "__any_sync", EMU_HERE) != 0; }
EMU_INLINE int __all_sync(unsigned mask, int p, EMU_SITE) { return emu_vote(mask, !p, "__all_sync", EMU_HERE) == 0; }
template <class T> EMU_INLINE unsigned __match_any_sync(unsigned mask, T v, EMU_SITE) {
  uint64_t w = 0;
  __builtin_memcpy(&w, &v, sizeof v);
  return (unsigned)emu_match(mask, w, 0, EMU_HERE);
}
template <class T> EMU_INLINE unsigned __match_all_sync(unsigned mask, T v, int *pred, EMU_SITE) {
  uint64_t w = 0;
  __builtin_memcpy(&w, &v, sizeof v);
  const unsigned same = (unsigned)emu_match(mask, w, 1, EMU_HERE);
  *pred = same != 0;
  return same;
}
#define EMU_REDUCE(T, NAME, OP)                                                                                  \
  EMU_INLINE T NAME(unsigned mask, T v, EMU_SITE) { return (T)emu::reduce(mask, emu::OP, (uint32_t)v, #NAME, EMU_HERE); }
EMU_REDUCE(int, __reduce_add_sync, R_ADD)
EMU_REDUCE(unsigned, __reduce_add_sync, R_ADD)
EMU_REDUCE(int, __reduce_min_sync, R_MIN)
EMU_REDUCE(unsigned, __reduce_min_sync, R_UMIN)
EMU_REDUCE(int, __reduce_max_sync, R_MAX)
EMU_REDUCE(unsigned, __reduce_max_sync, R_UMAX)
EMU_REDUCE(unsigned, __reduce_and_sync, R_AND)
EMU_REDUCE(unsigned, __reduce_or_sync, R_OR)
EMU_REDUCE(unsigned, __reduce_xor_sync, R_XOR)
#undef EMU_REDUCE
