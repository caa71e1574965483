#pragma once
#include "memory_check.h"

// Atomics on shared memory do not race with each other; on global memory they are checked like a write.
static void check_atomic(void *p, size_t bytes, const char *file, int line) {
  Worker *w = tls_worker;
  if ((uintptr_t)p % bytes) {
    char text[128];
    snprintf(text, sizeof text, "atomic on address %p, which is not aligned to %zu bytes", p, bytes);
    fail_access(F_MISALIGNED, nullptr, file, line, p, bytes, 1, -1, text);
  }
  size_t offset;
  if (w->launch->check && !shared_shadow(w, p, &offset)) check_access(p, bytes, 1, nullptr, file, line);
}
template <class T, class F> static T atomic_update(T *p, F f) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED), next;
  do next = f(old);
  while (!__atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return old;
}
template <float (*Widen)(uint16_t), uint16_t (*Narrow)(float)> static uint32_t add_pairs(uint32_t a, uint32_t b) {
  return Narrow(Widen((uint16_t)a) + Widen((uint16_t)b)) | (uint32_t)Narrow(Widen((uint16_t)(a >> 16)) + Widen((uint16_t)(b >> 16))) << 16;
}
PUBLIC uint32_t emu_atomic32(int op, void *p, uint32_t v, uint32_t compare, const char *file, int line) {
  using namespace emu;
  check_atomic(p, 4, file, line);
  return atomic_update((uint32_t *)p, [=](uint32_t o) -> uint32_t {
    switch (op) {
      case A_ADD: return o + v;
      case A_FADD: return bits<uint32_t>(bits<float>(o) + bits<float>(v));
      case A_MIN: return (int32_t)v < (int32_t)o ? v : o;
      case A_MAX: return (int32_t)v > (int32_t)o ? v : o;
      case A_UMIN: return v < o ? v : o;
      case A_UMAX: return v > o ? v : o;
      case A_AND: return o & v;
      case A_OR: return o | v;
      case A_XOR: return o ^ v;
      case A_EXCH: return v;
      case A_CAS: return o == compare ? v : o;
      case A_INC: return o >= v ? 0 : o + 1;
      case A_DEC: return o == 0 || o > v ? v : o - 1;
      case A_HALF2_ADD: return add_pairs<half_to_float, float_to_half>(o, v);
      default: return add_pairs<bf16_to_float, float_to_bf16>(o, v);
    }
  });
}
PUBLIC uint64_t emu_atomic64(int op, void *p, uint64_t v, uint64_t compare, const char *file, int line) {
  using namespace emu;
  check_atomic(p, 8, file, line);
  return atomic_update((uint64_t *)p, [=](uint64_t o) -> uint64_t {
    switch (op) {
      case A_ADD: return o + v;
      case A_FADD: return bits<uint64_t>(bits<double>(o) + bits<double>(v));
      case A_MIN: return (int64_t)v < (int64_t)o ? v : o;
      case A_MAX: return (int64_t)v > (int64_t)o ? v : o;
      case A_UMIN: return v < o ? v : o;
      case A_UMAX: return v > o ? v : o;
      case A_AND: return o & v;
      case A_OR: return o | v;
      case A_XOR: return o ^ v;
      case A_EXCH: return v;
      default: return o == compare ? v : o;
    }
  });
}
