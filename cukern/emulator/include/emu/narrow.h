// half and bfloat16 from and to float, bit patterns as integers.
#pragma once
#include "emu/base.h"

namespace emu {
#if defined(__x86_64__) && defined(__F16C__) && defined(__FLT16_MANT_DIG__)
typedef _Float16 NativeHalf;
#define EMU_NATIVE_HALF 1
#elif defined(__aarch64__)
typedef __fp16 NativeHalf;  // g++ 12 defines __FLT16_MANT_DIG__ for AArch64 but has no _Float16 in C++
#define EMU_NATIVE_HALF 1
#endif
#ifdef EMU_NATIVE_HALF
EMU_INLINE float half_to_float(uint16_t h) { return (float)bits<NativeHalf>(h); }
EMU_INLINE uint16_t float_to_half(float f) {
  if (f != f) return 0x7fff;
  return bits<uint16_t>((NativeHalf)f);
}
#else
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return bits<float>(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0u));  // NaN becomes quiet
  if (e) return bits<float>(sign | (e + 112) << 23 | m << 13);
  const float r = (float)m * 5.9604644775390625e-8f;  // subnormal: m * 2^-24
  return sign ? -r : r;
}
inline uint16_t float_to_half(float f) {
  uint32_t u = bits<uint32_t>(f);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return 0x7fff;
  if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
  if (u < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded result in the low bits
    const float r = bits<float>(u) + 0.5f;
    return (uint16_t)(sign | (bits<uint32_t>(r) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000u) >> 13));
}
#endif

EMU_INLINE float bf16_to_float(uint16_t h) { return bits<float>((uint32_t)h << 16); }
EMU_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t u = bits<uint32_t>(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// double -> float rounded to odd, so that the second rounding, to 11 or 8 bits, is right.
template <uint16_t (*Narrow)(float)> inline uint16_t double_to_narrow(double d) {
  float f = (float)d;
  if (f == f && (double)f != d && !__builtin_isinf(f)) {
    uint32_t u = bits<uint32_t>(f);
    if ((__builtin_fabs((double)f) > __builtin_fabs(d))) --u;  // towards zero
    f = bits<float>(u | 1);
  }
  return Narrow(f);
}
}  // namespace emu
