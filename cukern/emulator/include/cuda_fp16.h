// Subset of CUDA's cuda_fp16.h: IEEE binary16, round to nearest even, one rounding per operation.
#pragma once
#include "emu/half_ops.h"

struct __attribute__((aligned(2))) __half_raw { unsigned short x; };
struct __attribute__((aligned(2))) __half {
  uint16_t __x;
  __half() = default;
  EMU_INLINE __half(float f) : __x(emu::float_to_half(f)) {}
  EMU_INLINE __half(double f) : __x(emu::double_to_narrow<emu::float_to_half>(f)) {}
  EMU_INLINE __half(int i) : __x(emu::double_to_narrow<emu::float_to_half>((double)i)) {}
  EMU_INLINE __half(unsigned i) : __x(emu::double_to_narrow<emu::float_to_half>((double)i)) {}
  EMU_INLINE __half(__half_raw r) : __x(r.x) {}
  EMU_INLINE operator float() const { return emu::half_to_float(__x); }
  EMU_INLINE operator __half_raw() const { return {__x}; }
};
struct __attribute__((aligned(4))) __half2_raw { unsigned short x, y; };
struct __attribute__((aligned(4))) __half2 {
  __half x, y;
  __half2() = default;
  EMU_INLINE __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;
EMU_NARROW_FLOAT(__half, __half2, half, half_to_float, float_to_half)
EMU_INLINE __half2 make_half2(__half a, __half b) { return {a, b}; }
EMU_INLINE __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
EMU_INLINE __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
EMU_INLINE __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }
EMU_INLINE __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
EMU_INLINE __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
EMU_INLINE __half2 atomicAdd(__half2 *p, __half2 v, EMU_SITE) {
  return emu::bits<__half2>(emu_atomic32(emu::A_HALF2_ADD, p, emu::bits<uint32_t>(v), 0, EMU_HERE));
}
