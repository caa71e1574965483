// float4, uint2, dim3 ...: sizes and alignments as in CUDA's vector_types.h.
#pragma once
#include "emu/base.h"
#define EMU_VECTORS(T, N, ALIGN4)                                                   \
  struct __attribute__((aligned(sizeof(T)))) N##1 { T x; };                         \
  struct __attribute__((aligned(sizeof(T) * 2))) N##2 { T x, y; };                  \
  struct N##3 { T x, y, z; };                                                       \
  struct __attribute__((aligned(ALIGN4))) N##4 { T x, y, z, w; };                   \
  EMU_INLINE N##1 make_##N##1(T x) { return {x}; }                                  \
  EMU_INLINE N##2 make_##N##2(T x, T y) { return {x, y}; }                          \
  EMU_INLINE N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                  \
  EMU_INLINE N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char, 4)
EMU_VECTORS(unsigned char, uchar, 4)
EMU_VECTORS(short, short, 8)
EMU_VECTORS(unsigned short, ushort, 8)
EMU_VECTORS(int, int, 16)
EMU_VECTORS(unsigned, uint, 16)
EMU_VECTORS(long, long, 16)
EMU_VECTORS(unsigned long, ulong, 16)
EMU_VECTORS(long long, longlong, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16)
EMU_VECTORS(float, float, 16)
EMU_VECTORS(double, double, 16)
#undef EMU_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  operator uint3() const { return {x, y, z}; }
};
