// Subset of CUDA's cuda_bf16.h: the upper half of a float, round to nearest even, one rounding per operation.
#pragma once
#include "emu/half_ops.h"

struct __attribute__((aligned(2))) __nv_bfloat16_raw { unsigned short x; };
struct __attribute__((aligned(2))) __nv_bfloat16 {
  uint16_t __x;
  __nv_bfloat16() = default;
  EMU_INLINE __nv_bfloat16(float f) : __x(emu::float_to_bf16(f)) {}
  EMU_INLINE __nv_bfloat16(double f) : __x(emu::double_to_narrow<emu::float_to_bf16>(f)) {}
  EMU_INLINE __nv_bfloat16(int i) : __x(emu::double_to_narrow<emu::float_to_bf16>((double)i)) {}
  EMU_INLINE __nv_bfloat16(unsigned i) : __x(emu::double_to_narrow<emu::float_to_bf16>((double)i)) {}
  EMU_INLINE __nv_bfloat16(__nv_bfloat16_raw r) : __x(r.x) {}
  EMU_INLINE operator float() const { return emu::bf16_to_float(__x); }
  EMU_INLINE operator __nv_bfloat16_raw() const { return {__x}; }
};
struct __attribute__((aligned(4))) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  EMU_INLINE __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
EMU_NARROW_FLOAT(__nv_bfloat16, __nv_bfloat162, bfloat16, bf16_to_float, float_to_bf16)
EMU_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
EMU_INLINE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 a) { return {a.x, a.x}; }
EMU_INLINE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 a) { return {a.y, a.y}; }
EMU_INLINE __nv_bfloat162 atomicAdd(__nv_bfloat162 *p, __nv_bfloat162 v, EMU_SITE) {
  return emu::bits<__nv_bfloat162>(emu_atomic32(emu::A_BF162_ADD, p, emu::bits<uint32_t>(v), 0, EMU_HERE));
}
