// Atomics: relaxed on a GPU, sequentially consistent here.
#pragma once
#define EMU_ATOMIC(BITS, T, NAME, OP)                                                                     \
  EMU_INLINE T NAME(T *p, T v, EMU_SITE) {                                                                \
    return emu::bits<T>(emu_atomic##BITS(emu::OP, p, emu::bits<uint##BITS##_t>(v), 0, EMU_HERE));         \
  }
EMU_ATOMIC(32, int, atomicAdd, A_ADD)
EMU_ATOMIC(32, unsigned, atomicAdd, A_ADD)
EMU_ATOMIC(32, float, atomicAdd, A_FADD)
EMU_ATOMIC(64, unsigned long long, atomicAdd, A_ADD)
EMU_ATOMIC(64, double, atomicAdd, A_FADD)
EMU_ATOMIC(32, int, atomicMin, A_MIN)
EMU_ATOMIC(32, int, atomicMax, A_MAX)
EMU_ATOMIC(32, unsigned, atomicMin, A_UMIN)
EMU_ATOMIC(32, unsigned, atomicMax, A_UMAX)
EMU_ATOMIC(64, long long, atomicMin, A_MIN)
EMU_ATOMIC(64, long long, atomicMax, A_MAX)
EMU_ATOMIC(64, unsigned long long, atomicMin, A_UMIN)
EMU_ATOMIC(64, unsigned long long, atomicMax, A_UMAX)
EMU_ATOMIC(32, int, atomicAnd, A_AND)
EMU_ATOMIC(32, unsigned, atomicAnd, A_AND)
EMU_ATOMIC(32, int, atomicOr, A_OR)
EMU_ATOMIC(32, unsigned, atomicOr, A_OR)
EMU_ATOMIC(32, int, atomicXor, A_XOR)
EMU_ATOMIC(32, unsigned, atomicXor, A_XOR)
EMU_ATOMIC(64, unsigned long long, atomicAnd, A_AND)
EMU_ATOMIC(64, unsigned long long, atomicOr, A_OR)
EMU_ATOMIC(64, unsigned long long, atomicXor, A_XOR)
EMU_ATOMIC(32, int, atomicExch, A_EXCH)
EMU_ATOMIC(32, unsigned, atomicExch, A_EXCH)
EMU_ATOMIC(32, float, atomicExch, A_EXCH)
EMU_ATOMIC(64, unsigned long long, atomicExch, A_EXCH)
EMU_ATOMIC(32, unsigned, atomicInc, A_INC)
EMU_ATOMIC(32, unsigned, atomicDec, A_DEC)
#undef EMU_ATOMIC
EMU_INLINE int atomicSub(int *p, int v, EMU_SITE) { return atomicAdd(p, (int)(0u - (unsigned)v), EMU_HERE); }
EMU_INLINE unsigned atomicSub(unsigned *p, unsigned v, EMU_SITE) { return atomicAdd(p, 0u - v, EMU_HERE); }
EMU_INLINE int atomicCAS(int *p, int c, int v, EMU_SITE) {
  return (int)emu_atomic32(emu::A_CAS, p, (uint32_t)v, (uint32_t)c, EMU_HERE);
}
EMU_INLINE unsigned atomicCAS(unsigned *p, unsigned c, unsigned v, EMU_SITE) {
  return emu_atomic32(emu::A_CAS, p, v, c, EMU_HERE);
}
EMU_INLINE unsigned long long atomicCAS(unsigned long long *p, unsigned long long c, unsigned long long v, EMU_SITE) {
  return emu_atomic64(emu::A_CAS, p, v, c, EMU_HERE);
}
