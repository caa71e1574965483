// Device mathematics. float functions are the C library's (correctly rounded or within 1 ulp); the fast forms (__expf ...)
// follow the GPU's own composition from base-2 instructions, not its rounding.
#pragma once
#define EMU_F1(NAME)                                                         \
  EMU_INLINE float NAME##f(float x) { return __builtin_##NAME##f(x); }       \
  EMU_INLINE float NAME(float x) { return __builtin_##NAME##f(x); }          \
  EMU_INLINE double NAME(double x) { return __builtin_##NAME(x); }
#define EMU_F2(NAME)                                                                              \
  EMU_INLINE float NAME##f(float x, float y) { return __builtin_##NAME##f(x, y); }                \
  EMU_INLINE float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }                   \
  EMU_INLINE double NAME(double x, double y) { return __builtin_##NAME(x, y); }
EMU_F1(sqrt) EMU_F1(exp) EMU_F1(exp2) EMU_F1(expm1) EMU_F1(log) EMU_F1(log2) EMU_F1(log10) EMU_F1(log1p)
EMU_F1(sin) EMU_F1(cos) EMU_F1(tan) EMU_F1(asin) EMU_F1(acos) EMU_F1(atan) EMU_F1(sinh) EMU_F1(cosh) EMU_F1(tanh)
EMU_F1(floor) EMU_F1(ceil) EMU_F1(trunc) EMU_F1(round) EMU_F1(rint) EMU_F1(nearbyint) EMU_F1(fabs) EMU_F1(cbrt) EMU_F1(erf)
EMU_F1(erfc) EMU_F1(lgamma) EMU_F1(tgamma)
EMU_F2(pow) EMU_F2(fmod) EMU_F2(atan2) EMU_F2(hypot) EMU_F2(copysign) EMU_F2(fdim) EMU_F2(nextafter)
EMU_F2(remainder)
#undef EMU_F1
#undef EMU_F2
// As in PTX: a NaN loses against a number, +0 is larger than -0.
#define EMU_LARGER(T, NAME, SUFFIX, SIGN_A)                                                       \
  EMU_INLINE T NAME##SUFFIX(T a, T b) {                                                           \
    return a != a ? b : b != b ? a : a == b ? (SIGN_A __builtin_signbit(a) ? b : a) : SIGN_A(a < b) ? b : a; \
  }
EMU_LARGER(float, fmax, f, )
EMU_LARGER(float, fmin, f, !)
EMU_LARGER(float, fmax, , )
EMU_LARGER(float, fmin, , !)
EMU_LARGER(double, fmax, , )
EMU_LARGER(double, fmin, , !)
#undef EMU_LARGER
EMU_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
EMU_INLINE float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
EMU_INLINE double ldexp(double x, int e) { return __builtin_ldexp(x, e); }
EMU_INLINE float frexpf(float x, int *e) { return __builtin_frexpf(x, e); }
EMU_INLINE float modff(float x, float *i) { return __builtin_modff(x, i); }
EMU_INLINE void sincosf(float x, float *s, float *c) { *s = __builtin_sinf(x), *c = __builtin_cosf(x); }
EMU_INLINE void sincos(double x, double *s, double *c) { *s = __builtin_sin(x), *c = __builtin_cos(x); }
EMU_INLINE float exp10f(float x) { return __builtin_powf(10.f, x); }
EMU_INLINE float rsqrtf(float x) { return (float)(1.0 / __builtin_sqrt((double)x)); }
EMU_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
EMU_INLINE bool isnan(float x) { return x != x; }
EMU_INLINE bool isnan(double x) { return x != x; }
EMU_INLINE bool isinf(float x) { return __builtin_isinf(x); }
EMU_INLINE bool isinf(double x) { return __builtin_isinf(x); }
EMU_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
EMU_INLINE bool isfinite(double x) { return __builtin_isfinite(x); }
EMU_INLINE bool signbit(float x) { return __builtin_signbit(x); }
EMU_INLINE bool signbit(double x) { return __builtin_signbit(x); }
EMU_INLINE int abs(int x) { return x < 0 ? -x : x; }
EMU_INLINE long abs(long x) { return x < 0 ? -x : x; }
EMU_INLINE long long abs(long long x) { return x < 0 ? -x : x; }
EMU_INLINE float abs(float x) { return __builtin_fabsf(x); }
EMU_INLINE double abs(double x) { return __builtin_fabs(x); }
EMU_INLINE long long llabs(long long x) { return x < 0 ? -x : x; }
#define EMU_MINMAX(T)                                                  \
  EMU_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }       \
  EMU_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(int) EMU_MINMAX(unsigned) EMU_MINMAX(long) EMU_MINMAX(unsigned long) EMU_MINMAX(long long) EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
EMU_INLINE unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
EMU_INLINE unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
EMU_INLINE unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
EMU_INLINE unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
EMU_INLINE double min(float a, double b) { return fmin((double)a, b); }
EMU_INLINE double min(double a, float b) { return fmin(a, (double)b); }
EMU_INLINE double max(float a, double b) { return fmax((double)a, b); }
EMU_INLINE double max(double a, float b) { return fmax(a, (double)b); }

// fast forms: base-2 instruction times a constant
EMU_INLINE float __expf(float x) { return __builtin_exp2f(x * 1.4426950408889634f); }
EMU_INLINE float __exp2f(float x) { return __builtin_exp2f(x); }
EMU_INLINE float __exp10f(float x) { return __builtin_exp2f(x * 3.3219280948873623f); }
EMU_INLINE float __log2f(float x) { return __builtin_log2f(x); }
EMU_INLINE float __logf(float x) { return __builtin_log2f(x) * 0.6931471805599453f; }
EMU_INLINE float __log10f(float x) { return __builtin_log2f(x) * 0.30102999566398120f; }
EMU_INLINE float __powf(float x, float y) { return __builtin_exp2f(y * __builtin_log2f(x)); }
EMU_INLINE float __sinf(float x) { return __builtin_sinf(x); }
EMU_INLINE float __cosf(float x) { return __builtin_cosf(x); }
EMU_INLINE float __tanf(float x) { return __builtin_tanf(x); }
EMU_INLINE void __sincosf(float x, float *s, float *c) { sincosf(x, s, c); }
EMU_INLINE float __saturatef(float x) { return fminf(fmaxf(x, 0.f), 1.f); }
EMU_INLINE float __fdividef(float a, float b) { return a / b; }

// explicit rounding; the compiler never contracts (-ffp-contract=off)
EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMU_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __frcp_rn(float a) { return 1.f / a; }
EMU_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
EMU_INLINE float __frsqrt_rn(float a) { return rsqrtf(a); }
EMU_INLINE double __dadd_rn(double a, double b) { return a + b; }
EMU_INLINE double __dmul_rn(double a, double b) { return a * b; }
EMU_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

// integers
EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
EMU_INLINE unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
EMU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t v = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = (unsigned)(v >> 8 * (s >> 4 * i & 7) & 255);
    if (s >> 4 * i & 8) byte = byte & 128 ? 255 : 0;  // replicate the sign
    r |= byte << 8 * i;
  }
  return r;
}
EMU_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { s &= 31; return s ? hi << s | lo >> (32 - s) : hi; }
EMU_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { s &= 31; return s ? lo >> s | hi << (32 - s) : lo; }
EMU_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
EMU_INLINE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
EMU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
EMU_INLINE int __mul24(int a, int b) { return (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)); }
EMU_INLINE unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
EMU_INLINE unsigned __sad(int a, int b, unsigned c) { return c + (a > b ? (unsigned)a - (unsigned)b : (unsigned)b - (unsigned)a); }
EMU_INLINE int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
  return c;
}

// bits
EMU_INLINE int __float_as_int(float x) { return emu::bits<int>(x); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
EMU_INLINE float __int_as_float(int x) { return emu::bits<float>(x); }
EMU_INLINE float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
EMU_INLINE long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
EMU_INLINE double __longlong_as_double(long long x) { return emu::bits<double>(x); }

// conversions saturate on a GPU, NaN becomes 0
EMU_INLINE int __float2int_rz(float x) {
  return x != x ? 0 : x >= 2147483648.f ? 2147483647 : x < -2147483648.f ? -2147483647 - 1 : (int)x;
}
EMU_INLINE int __float2int_rn(float x) { return __float2int_rz(__builtin_rintf(x)); }
EMU_INLINE int __float2int_rd(float x) { return __float2int_rz(__builtin_floorf(x)); }
EMU_INLINE int __float2int_ru(float x) { return __float2int_rz(__builtin_ceilf(x)); }
EMU_INLINE unsigned __float2uint_rz(float x) { return !(x > 0.f) ? 0u : x >= 4294967296.f ? 4294967295u : (unsigned)x; }
EMU_INLINE unsigned __float2uint_rn(float x) { return __float2uint_rz(__builtin_rintf(x)); }
EMU_INLINE float __int2float_rn(int x) { return (float)x; }
EMU_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
EMU_INLINE float __ll2float_rn(long long x) { return (float)x; }
EMU_INLINE float __ull2float_rn(unsigned long long x) { return (float)x; }
EMU_INLINE float __double2float_rn(double x) { return (float)x; }

// memory: cache hints change nothing here
template <class T> EMU_INLINE T __ldg(const T *p) { return *p; }
template <class T> EMU_INLINE T __ldcg(const T *p) { return *p; }
template <class T> EMU_INLINE T __ldca(const T *p) { return *p; }
template <class T> EMU_INLINE T __ldcs(const T *p) { return *p; }
template <class T> EMU_INLINE T __ldcv(const T *p) { return *p; }
template <class T> EMU_INLINE T __ldlu(const T *p) { return *p; }
template <class T> EMU_INLINE void __stcs(T *p, T v) { *p = v; }
template <class T> EMU_INLINE void __stcg(T *p, T v) { *p = v; }
template <class T> EMU_INLINE void __stwb(T *p, T v) { *p = v; }
template <class T> EMU_INLINE void __stwt(T *p, T v) { *p = v; }
EMU_INLINE size_t __cvta_generic_to_shared(const void *p) { return (size_t)((const char *)p - (const char *)emu_dynamic_shared()); }
EMU_INLINE size_t __cvta_generic_to_global(const void *p) { return (size_t)p; }
EMU_INLINE void __prefetch_global_l1(const void *) {}
EMU_INLINE long long clock64() { return emu_clock(); }
EMU_INLINE int clock() { return (int)emu_clock(); }
EMU_INLINE unsigned long long __globaltimer() { return (unsigned long long)emu_clock(); }
#define memcpy(d, s, n) __builtin_memcpy(d, s, n)
#define memset(d, c, n) __builtin_memset(d, c, n)
