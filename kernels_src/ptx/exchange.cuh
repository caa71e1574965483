// Data from block to block without a barrier: every 8-byte word in global memory carries 4 bytes of payload and, above them,
// a tag. A reader asks for the words themselves until all of them bear the tag that it expects; an 8-byte access is never torn,
// so no fence, flag or atomic is needed, and the way from a writer to a reader is one store and one load. Words are used again
// with another tag when every reader of the old ones is known to be done. All blocks must be resident (cooperative launch).
// The memory stream beside it would push the words out of L2 between two layers, and whoever asks for one early would then
// wait for DRAM: they are the last to leave.
// PTX ISA, "ld.relaxed", "st.relaxed". Test: tests/test_decode_step.py
#pragma once
#include "common/types.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/site.cuh"

__device__ __forceinline__ u64 tagged_word(u32 payload, u32 tag) { return (u64)tag << 32 | payload; }

__device__ __forceinline__ void send_word(u64 *word, u32 payload, u32 tag PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(word, 8, 1, 8, "send_word", PTX_HERE);
  *word = tagged_word(payload, tag);
#else
  asm volatile("st.relaxed.gpu.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(word), "l"(tagged_word(payload, tag)),
               "l"(L2_LEAVES_LAST)
               : "memory");
#endif
}

// Two neighbouring words, 16-byte aligned.
__device__ __forceinline__ void send_words(u64 *words, u32 first, u32 second, u32 tag PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(words, 16, 1, 16, "send_words", PTX_HERE);
  words[0] = tagged_word(first, tag);
  words[1] = tagged_word(second, tag);
#else
  asm volatile("st.relaxed.gpu.global.L2::cache_hint.v2.u64 [%0], {%1, %2}, %3;" ::"l"(words), "l"(tagged_word(first, tag)),
               "l"(tagged_word(second, tag)), "l"(L2_LEAVES_LAST)
               : "memory");
#endif
}

// Groups of four words, two neighbours each at two places, 16-byte aligned, those whose bit is set in `wanted`; returns when
// all of them bear the tag. The loads of all groups are in flight together. Under emulation the words must be there already.
// WholeWarp: every lane calls it, and all leave it together.
template <int N, bool WholeWarp = false>
__device__ __forceinline__ void receive_words(u32 (&payload)[N][4], const u64 *const (&first)[N],
                                              const u64 *const (&second)[N], u32 wanted, u32 tag PTX_SITE) {
  u64 w[N][4] = {};  // a register that is written under a condition alone would be live everywhere
#ifdef CUKERN_EMU
  for (int n = 0; n < N; ++n) {
    if (!(wanted >> n & 1)) continue;
    emu_access(first[n], 16, 0, 16, "receive_words", PTX_HERE);
    emu_access(second[n], 16, 0, 16, "receive_words", PTX_HERE);
    for (int i = 0; i < 4; ++i) {
      w[n][i] = i < 2 ? first[n][i] : second[n][i - 2];
      if ((u32)(w[n][i] >> 32) != tag) emu_trap("receive_words: a word that was not sent", PTX_HERE);
    }
  }
#else
  bool all;
  do {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (wanted >> n & 1) {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w[n][0]), "=l"(w[n][1]) : "l"(first[n]) : "memory");
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w[n][2]), "=l"(w[n][3]) : "l"(second[n]) : "memory");
      }
    all = true;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) all = all && (!(wanted >> n & 1) || (u32)(w[n][i] >> 32) == tag);
  } while (WholeWarp ? !__all_sync(0xffffffffu, all) : !all);
#endif
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) payload[n][i] = wanted >> n & 1 ? (u32)w[n][i] : 0u;
}

// One look at groups of four words each, `apart` words from one group to the next, those whose bit is set in `wanted`: which of
// them bear the tag. Under emulation they must.
template <int N>
__device__ __forceinline__ u32 poll_words(u32 (&payload)[N][4], const u64 *first, const u64 *second, int apart, u32 wanted,
                                          u32 tag PTX_SITE) {
  u64 w[N][4] = {};
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (wanted >> n & 1) {
#ifdef CUKERN_EMU
      emu_access(first + n * apart, 16, 0, 16, "poll_words", PTX_HERE);
      emu_access(second + n * apart, 16, 0, 16, "poll_words", PTX_HERE);
      for (int i = 0; i < 4; ++i) {
        w[n][i] = (i < 2 ? first : second - 2)[n * apart + i];
        if ((u32)(w[n][i] >> 32) != tag) emu_trap("poll_words: a word that was not sent", PTX_HERE);
      }
#else
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(w[n][0]), "=l"(w[n][1])
                   : "l"(first + n * apart)
                   : "memory");
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(w[n][2]), "=l"(w[n][3])
                   : "l"(second + n * apart)
                   : "memory");
#endif
    }
  u32 there = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    bool all = wanted >> n & 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      all = all && (u32)(w[n][i] >> 32) == tag;
      payload[n][i] = (u32)w[n][i];
    }
    if (all) there |= 1u << n;
  }
  return there;
}

// The same for single words; only the payloads of those that bear the tag are changed.
template <int N>
__device__ __forceinline__ u32 poll_single_words(u32 (&payload)[N], const u64 *first, int apart, u32 wanted, u32 tag PTX_SITE) {
  u64 w[N] = {};
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (wanted >> n & 1) {
#ifdef CUKERN_EMU
      emu_access(first + n * apart, 8, 0, 8, "poll_single_words", PTX_HERE);
      w[n] = first[n * apart];
      if ((u32)(w[n] >> 32) != tag) emu_trap("poll_single_words: a word that was not sent", PTX_HERE);
#else
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(w[n]) : "l"(first + n * apart) : "memory");
#endif
    }
  u32 there = 0;
#pragma unroll
  for (int n = 0; n < N; ++n)
    if ((wanted >> n & 1) && (u32)(w[n] >> 32) == tag) {
      payload[n] = (u32)w[n];
      there |= 1u << n;
    }
  return there;
}

// Every block, between sending and the first receive of what others send: nothing on a GPU. Under emulation, where blocks do
// not spin, it is the wait.
__device__ __forceinline__ void meet_senders(PTX_SITE0) {
#ifdef CUKERN_EMU
  emu_grid_barrier(PTX_HERE);
#endif
}
