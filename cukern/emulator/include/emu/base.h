// Integer types and helpers shared by kernels and runtime.
#pragma once
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#define EMU_INLINE inline __attribute__((always_inline))

namespace emu {
template <class D, class S> EMU_INLINE D bits(S s) {
  static_assert(sizeof(D) == sizeof(S), "bits: sizes differ");
  D d;
  __builtin_memcpy(&d, &s, sizeof d);
  return d;
}
}  // namespace emu
