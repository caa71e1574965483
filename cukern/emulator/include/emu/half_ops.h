// Operations common to half and bfloat16. A float holds every value of both and the sum or product of two of them is
// rounded correctly by float arithmetic followed by one conversion (24 >= 2 * 11 + 2 bits).
#pragma once
#include "emu/narrow.h"

#define EMU_NARROW_FLOAT(H, H2, P, TO_FLOAT, FROM_FLOAT)                                                       \
  EMU_INLINE H operator+(H a, H b) { return H((float)a + (float)b); }                                          \
  EMU_INLINE H operator-(H a, H b) { return H((float)a - (float)b); }                                          \
  EMU_INLINE H operator*(H a, H b) { return H((float)a * (float)b); }                                          \
  EMU_INLINE H operator/(H a, H b) { return H((float)a / (float)b); }                                          \
  EMU_INLINE H operator-(H a) { a.__x ^= 0x8000; return a; }                                                   \
  EMU_INLINE H operator+(H a) { return a; }                                                                    \
  EMU_INLINE H &operator+=(H &a, H b) { return a = a + b; }                                                    \
  EMU_INLINE H &operator-=(H &a, H b) { return a = a - b; }                                                    \
  EMU_INLINE H &operator*=(H &a, H b) { return a = a * b; }                                                    \
  EMU_INLINE H &operator/=(H &a, H b) { return a = a / b; }                                                    \
  EMU_INLINE bool operator<(H a, H b) { return (float)a < (float)b; }                                          \
  EMU_INLINE bool operator>(H a, H b) { return (float)a > (float)b; }                                          \
  EMU_INLINE bool operator<=(H a, H b) { return (float)a <= (float)b; }                                        \
  EMU_INLINE bool operator>=(H a, H b) { return (float)a >= (float)b; }                                        \
  EMU_INLINE bool operator==(H a, H b) { return (float)a == (float)b; }                                        \
  EMU_INLINE bool operator!=(H a, H b) { return (float)a != (float)b; }                                        \
  EMU_INLINE H __hadd(H a, H b) { return a + b; }                                                              \
  EMU_INLINE H __hsub(H a, H b) { return a - b; }                                                              \
  EMU_INLINE H __hmul(H a, H b) { return a * b; }                                                              \
  EMU_INLINE H __hdiv(H a, H b) { return a / b; }                                                              \
  EMU_INLINE H __hneg(H a) { return -a; }                                                                      \
  EMU_INLINE H __habs(H a) { a.__x &= 0x7fff; return a; }                                                      \
  EMU_INLINE H __hfma(H a, H b, H c) { return H((double)(float)a * (double)(float)b + (double)(float)c); }     \
  EMU_INLINE bool __hisnan(H a) { return a != a; }                                                             \
  EMU_INLINE int __hisinf(H a) { return (a.__x & 0x7fff) == emu::FROM_FLOAT(__builtin_inff()) ? (a.__x >> 15 ? -1 : 1) : 0; } \
  EMU_INLINE H __hmax(H a, H b) { return H(fmaxf(a, b)); }                                           \
  EMU_INLINE H __hmin(H a, H b) { return H(fminf(a, b)); }                                           \
  EMU_INLINE bool __hgt(H a, H b) { return a > b; }                                                            \
  EMU_INLINE bool __hge(H a, H b) { return a >= b; }                                                           \
  EMU_INLINE bool __hlt(H a, H b) { return a < b; }                                                            \
  EMU_INLINE bool __hle(H a, H b) { return a <= b; }                                                           \
  EMU_INLINE bool __heq(H a, H b) { return a == b; }                                                           \
  EMU_INLINE bool __hne(H a, H b) { return (float)a < (float)b || (float)a > (float)b; }                       \
  EMU_INLINE H hexp(H a) { return H(__builtin_expf(a)); }                                                      \
  EMU_INLINE H hexp2(H a) { return H(__builtin_exp2f(a)); }                                                    \
  EMU_INLINE H hlog(H a) { return H(__builtin_logf(a)); }                                                      \
  EMU_INLINE H hsqrt(H a) { return H(__builtin_sqrtf(a)); }                                                    \
  EMU_INLINE H hrsqrt(H a) { return H(rsqrtf(a)); }                                                            \
  EMU_INLINE H hrcp(H a) { return H(1.f / (float)a); }                                                         \
  EMU_INLINE H2 __hadd2(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                                         \
  EMU_INLINE H2 __hsub2(H2 a, H2 b) { return {a.x - b.x, a.y - b.y}; }                                         \
  EMU_INLINE H2 __hmul2(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                                         \
  EMU_INLINE H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }           \
  EMU_INLINE H2 __hmax2(H2 a, H2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                           \
  EMU_INLINE H2 __hmin2(H2 a, H2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                           \
  EMU_INLINE H2 __hneg2(H2 a) { return {-a.x, -a.y}; }                                                         \
  EMU_INLINE H2 __habs2(H2 a) { return {__habs(a.x), __habs(a.y)}; }                                           \
  EMU_INLINE H2 operator+(H2 a, H2 b) { return __hadd2(a, b); }                                                \
  EMU_INLINE H2 operator-(H2 a, H2 b) { return __hsub2(a, b); }                                                \
  EMU_INLINE H2 operator*(H2 a, H2 b) { return __hmul2(a, b); }                                                \
  EMU_INLINE H __low2##P(H2 a) { return a.x; }                                                                 \
  EMU_INLINE H __high2##P(H2 a) { return a.y; }                                                                \
  EMU_INLINE float __low2float(H2 a) { return a.x; }                                                           \
  EMU_INLINE float __high2float(H2 a) { return a.y; }                                                          \
  EMU_INLINE H2 __halves2##P##2(H a, H b) { return {a, b}; }                                                   \
  EMU_INLINE H2 __##P##2##P##2(H a) { return {a, a}; }                                                         \
  EMU_INLINE float __##P##2float(H a) { return a; }                                                            \
  EMU_INLINE H __float2##P(float f) { return H(f); }                                                           \
  EMU_INLINE H __float2##P##_rn(float f) { return H(f); }                                                      \
  EMU_INLINE H __double2##P(double f) { return H(f); }                                                         \
  EMU_INLINE H __int2##P##_rn(int i) { return H(i); }                                                          \
  EMU_INLINE H __uint2##P##_rn(unsigned i) { return H(i); }                                                    \
  EMU_INLINE int __##P##2int_rn(H a) { return __float2int_rn(a); }                                             \
  EMU_INLINE int __##P##2int_rz(H a) { return __float2int_rz(a); }                                             \
  EMU_INLINE float2 __##P##22float2(H2 a) { return {(float)a.x, (float)a.y}; }                                 \
  EMU_INLINE H2 __floats2##P##2_rn(float a, float b) { return {H(a), H(b)}; }                                  \
  EMU_INLINE H2 __float22##P##2_rn(float2 a) { return {H(a.x), H(a.y)}; }                                      \
  EMU_INLINE H2 __float2##P##2_rn(float a) { return {H(a), H(a)}; }                                            \
  EMU_INLINE unsigned short __##P##_as_ushort(H a) { return a.__x; }                                           \
  EMU_INLINE short __##P##_as_short(H a) { return (short)a.__x; }                                              \
  EMU_INLINE H __ushort_as_##P(unsigned short u) { H h; h.__x = u; return h; }                                 \
  EMU_INLINE H __short_as_##P(short u) { H h; h.__x = (uint16_t)u; return h; }
