// The arithmetic of mma.m16n8k16, bit for bit as on an H200 (tests/conformance/rules.py found the rule, golden.npz shows
// it): the 16 products, exact, and the accumulator are aligned to the largest exponent among them, cut to 25 bits below it,
// added as integers, and the sum is cut to float. A product's exponent is the sum of its factors' exponents, whether or not
// the product of the significands reaches 2; a subnormal factor has the smallest normal exponent.
#pragma once
#include "emu/narrow.h"

namespace mma {
enum { KEPT = 25, ZERO = -1000, SPECIAL = 3000 };  // SPECIAL + ZERO is beyond all others: 0 x infinity is NaN

struct Half {
  static constexpr int fraction = 10, smallest = -14;
  static inline float to_float(uint16_t h) {  // finite values; written so that a loop over it becomes vector code
    const float magnitude = emu::bits<float>((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    return emu::bits<float>(emu::bits<uint32_t>(magnitude) | (uint32_t)(h & 0x8000) << 16);
  }
  static inline bool special(uint16_t h) { return (h & 0x7c00) == 0x7c00; }
  static float any_to_float(uint16_t h) { return emu::half_to_float(h); }
};
struct Bf16 {
  static constexpr int fraction = 7, smallest = -126;
  static inline float to_float(uint16_t h) { return emu::bf16_to_float(h); }
  static inline bool special(uint16_t h) { return (h & 0x7f80) == 0x7f80; }
  static float any_to_float(uint16_t h) { return emu::bf16_to_float(h); }
};

// Exponent as the adder sees it.
static inline int exponent(float x, int smallest) {
  const uint32_t u = emu::bits<uint32_t>(x);
  int e = (int)(u >> 23 & 255) - 127;
  e = e < smallest ? smallest : e;
  return (u << 1) == 0 ? ZERO : e;
}
// x * 2^by as an integer, cut towards zero
static inline int64_t shifted(int64_t x, int by) {
  const int64_t magnitude = x < 0 ? -x : x, r = by >= 0 ? magnitude << by : by > -63 ? magnitude >> -by : 0;
  return x < 0 ? -r : r;
}

// One result by the book: any exponents, infinities and NaN.
template <class T> static float exact(const uint16_t *a, const uint16_t *b, float c) {
  float sum = c;  // only its class matters
  bool special = __builtin_isnan(c) || __builtin_isinf(c);
  for (int k = 0; k < 16; ++k)
    if (T::special(a[k]) || T::special(b[k])) {
      special = true;
      sum += T::any_to_float(a[k]) * T::any_to_float(b[k]);
    }
  if (special) return sum != sum ? emu::bits<float>(0x7fffffffu) : sum;
  int64_t product[16];
  int e[16], largest = exponent(c, -126);
  for (int k = 0; k < 16; ++k) {
    const float x = T::any_to_float(a[k]), y = T::any_to_float(b[k]);
    const int ex = exponent(x, T::smallest), ey = exponent(y, T::smallest);
    product[k] = 0, e[k] = ZERO;
    if (ex == ZERO || ey == ZERO) continue;
    // significands as integers: value * 2^(fraction - exponent)
    product[k] = (int64_t)__builtin_ldexp(x, T::fraction - ex) * (int64_t)__builtin_ldexp(y, T::fraction - ey);
    e[k] = ex + ey;
    largest = e[k] > largest ? e[k] : largest;
  }
  if (largest == ZERO) return 0.f;
  int64_t total = 0;
  for (int k = 0; k < 16; ++k)
    if (e[k] != ZERO) total += shifted(product[k], KEPT - 2 * T::fraction - (largest - e[k]));
  const int ec = exponent(c, -126);
  if (ec != ZERO) total += shifted((int64_t)__builtin_ldexp((double)c, 23 - ec), KEPT - 23 - (largest - ec));
  const double value = __builtin_ldexp((double)total, largest - KEPT);
  const float r = (float)value;
  if (__builtin_isinf(r)) return __builtin_fabs(value) < 0x1p128 ? __builtin_copysignf(0x1.fffffep127f, r) : r;
  return __builtin_fabs((double)r) > __builtin_fabs(value) ? emu::bits<float>(emu::bits<uint32_t>(r) - 1) : r;
}

// C += A * B for matrices in rows; bt is B transposed.
template <class T> static void multiply(const uint16_t (&a)[16][16], const uint16_t (&bt)[8][16], float (&c)[16][8]) {
  alignas(64) float fa[16][16], fb[16][8], columns[8][16];
  alignas(64) int ea[16][16], eb[16][8];
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k) {
      fa[i][k] = T::to_float(a[i][k]);
      ea[i][k] = T::special(a[i][k]) ? SPECIAL : exponent(fa[i][k], T::smallest);
    }
  for (int j = 0; j < 8; ++j)
    for (int k = 0; k < 16; ++k) columns[j][k] = T::special(bt[j][k]) ? __builtin_inff() : T::to_float(bt[j][k]);
  for (int k = 0; k < 16; ++k)
    for (int j = 0; j < 8; ++j) fb[k][j] = columns[j][k];
  for (int k = 0; k < 16; ++k)
    for (int j = 0; j < 8; ++j) {
      const int e = exponent(fb[k][j], T::smallest);
      eb[k][j] = e == 128 ? SPECIAL : e;
    }
  for (int i = 0; i < 16; ++i) {
    alignas(32) int largest[8], sum[8] = {}, own[8];
    alignas(32) float scale[8];
    alignas(32) double r[8];
    for (int j = 0; j < 8; ++j) largest[j] = exponent(c[i][j], -126);
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) {
        const int e = ea[i][k] + eb[k][j];
        largest[j] = e > largest[j] ? e : largest[j];
      }
    int outside = 0;  // of the exponents for which float arithmetic below is exact
    for (int j = 0; j < 8; ++j) {
      largest[j] = largest[j] <= ZERO / 2 ? 0 : largest[j];
      outside |= largest[j] < -90 || largest[j] > 100;
    }
    if (outside) {
      for (int j = 0; j < 8; ++j) c[i][j] = exact<T>(a[i], bt[j], c[i][j]);
      continue;
    }
    for (int j = 0; j < 8; ++j) scale[j] = emu::bits<float>((uint32_t)(KEPT - largest[j] + 127) << 23);
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) sum[j] += (int)(fa[i][k] * fb[k][j] * scale[j]);  // below 2^31 in sum
    for (int j = 0; j < 8; ++j) own[j] = (int)(c[i][j] * scale[j]);
    for (int j = 0; j < 8; ++j) {
      const uint64_t total = emu::bits<uint64_t>((double)sum[j] + (double)own[j]) & ~(((uint64_t)1 << 29) - 1);
      r[j] = emu::bits<double>(total) * emu::bits<double>((uint64_t)(largest[j] - KEPT + 1023) << 52);
    }
    for (int j = 0; j < 8; ++j) c[i][j] = (float)r[j];
  }
}
}  // namespace mma
