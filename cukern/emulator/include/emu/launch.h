// What the loader appends to a kernel: a thunk that unpacks its arguments, and a description of its parameters.
#pragma once
namespace emu {
struct ParamInfo {
  char kind;              // 'p' pointer, 'i' signed, 'u' unsigned, 'f' floating point, 'b' bool, 's' anything else
  char pointee;           // kind of what a pointer points to, '-' for the rest
  unsigned char is_const; // pointer to const
  unsigned size, pointee_size;
};
template <class T> struct Bare { typedef T type; static constexpr bool is_const = false; };
template <class T> struct Bare<const T> { typedef T type; static constexpr bool is_const = true; };
template <class T> struct Bare<volatile T> { typedef T type; static constexpr bool is_const = false; };
template <class T> struct Bare<const volatile T> { typedef T type; static constexpr bool is_const = true; };
template <class T> struct Kind { static constexpr char value = __is_enum(T) ? 'i' : 's'; };
#define EMU_KIND(T, K) template <> struct Kind<T> { static constexpr char value = K; };
EMU_KIND(bool, 'b') EMU_KIND(float, 'f') EMU_KIND(double, 'f')
EMU_KIND(char, 'i') EMU_KIND(signed char, 'i') EMU_KIND(short, 'i') EMU_KIND(int, 'i') EMU_KIND(long, 'i') EMU_KIND(long long, 'i')
EMU_KIND(unsigned char, 'u') EMU_KIND(unsigned short, 'u') EMU_KIND(unsigned, 'u') EMU_KIND(unsigned long, 'u')
EMU_KIND(unsigned long long, 'u')
#undef EMU_KIND
template <class T> struct SizeOf { static constexpr unsigned value = sizeof(T); };
template <> struct SizeOf<void> { static constexpr unsigned value = 0; };
template <class T> struct Param {
  static constexpr ParamInfo value = {Kind<typename Bare<T>::type>::value, '-', 0, sizeof(T), 0};
};
template <class T> struct Param<T *> {
  typedef typename Bare<T>::type U;
  static constexpr ParamInfo value = {'p', Kind<U>::value, Bare<T>::is_const, sizeof(T *), SizeOf<U>::value};
};
template <class T> struct Param<T *const> : Param<T *> {};
template <class T> struct Param<T *__restrict__> : Param<T *> {};

template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I> struct MakeIndices<0, I...> { typedef Indices<I...> type; };
// The argument block is the emulator's own: not instrumented.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))
template <class... A, size_t... I> EMU_UNCHECKED EMU_INLINE void call(void (*f)(A...), void **a, Indices<I...>) {
  f(*(typename Bare<A>::type *)a[I]...);
}
template <class... A> EMU_UNCHECKED EMU_INLINE void call(void (*f)(A...), void **a) {
  call(f, a, typename MakeIndices<sizeof...(A)>::type());
}
template <class... A> struct Params {
  static constexpr int count = sizeof...(A);
  static constexpr ParamInfo table[sizeof...(A) + 1] = {Param<A>::value..., ParamInfo{}};
};
template <class... A> constexpr Params<A...> params_of(void (*)(A...)) { return {}; }
}  // namespace emu
#ifdef EMU_DEBUG
// For a debugger: print emu_where(), break kernel.cu:12 if emu_where().thread.x == 3
struct EmuWhere { uint3 block, thread; int lane; };
extern "C" __attribute__((used, visibility("default"))) EmuWhere emu_where() {
  return {emu_block_idx(), emu_thread_idx(), emu_lane()};
}
#endif
#define EMU_PUBLIC extern "C" __attribute__((visibility("default")))
#define EMU_EXPORT(...)                                                                                       \
  EMU_PUBLIC EMU_UNCHECKED void emu_thunk(void **a) { emu::call(&__VA_ARGS__, a); }                                         \
  EMU_PUBLIC const emu::ParamInfo *emu_params() { return decltype(emu::params_of(&__VA_ARGS__))::table; }     \
  EMU_PUBLIC int emu_param_count() { return decltype(emu::params_of(&__VA_ARGS__))::count; }                  \
  EMU_PUBLIC void *emu_tls_anchor() { static __thread char anchor; return &anchor; }
