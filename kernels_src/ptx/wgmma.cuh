// wgmma of sm_90a: D[64,N] (+)= A[64,16] * B[16,N], fp16 or bf16 in, fp32 accumulators; four consecutive warps together, B in
// shared memory, A there or in registers. No CPU body: not emulated.
// Operands in shared memory lie K-major, 64 elements (128 bytes) to a row, rows of 8 in 1024-byte atoms with the copy engine's
// 128-byte swizzle: 16-byte chunk c of row r at chunk c ^ (r & 7). An atom starts at a multiple of 1024 bytes. B may also lie
// N-major: rows are then k, and a row holds 64 of the N columns.
// A in registers: warp w of the four holds rows 16 w .. 16 w + 15 as the A fragment of mma.m16n8k16 (mma.cuh).
// Accumulators, warp w of the four, lane 4 g + t: d[4 j + e] is D[16 w + g + 8 (e >> 1)][8 j + 2 t + (e & 1)], as in mma.cuh.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Test: tests/test_linear_sm90.py
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"

// Descriptor of an operand tile: address, bytes from one atom of eight rows to the next (1024), 128-byte swizzle. The sixteen
// columns at element 16 s of the row are 32 s bytes further: add 2 s.
__device__ __forceinline__ u64 wgmma_descriptor(const void *tile) {
  return (u64)((shared_address(tile) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Descriptor of an N-major B: `block` is the number of bytes from one block of 64 columns to the next, atoms of eight rows are
// 1024 bytes apart. The sixteen rows from row 16 s on are 2048 s bytes further: add 128 s.
__device__ __forceinline__ u64 wgmma_descriptor_n_major(const void *tile, int block) {
  return (u64)((shared_address(tile) & 0x3ffff) >> 4) | (u64)(block >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Before the first wgmma that touches registers which ordinary instructions wrote.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `Pending` of the latest groups are unfinished.
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving ordinary uses of accumulators across this point (after a wait, before a fence).
template <int Count> __device__ __forceinline__ void wgmma_pin(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for operands in registers: after the wait they may change.
__device__ __forceinline__ void wgmma_pin(u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Wgmma<T, N>::multiply(d, a, b, accumulate): `accumulate` 0 starts from zero and does not read d.
template <class T, int N> struct Wgmma;

// Operand lists: WGMMA_Lk names the first 8 k accumulators, WGMMA_k(i) binds k of them from i on.
#define WGMMA_L1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_L2 WGMMA_L1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_L3 WGMMA_L2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_L4 WGMMA_L3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_L5 WGMMA_L4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_L6 WGMMA_L5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_L7 WGMMA_L6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_L8 WGMMA_L7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_L9 WGMMA_L8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_L10 WGMMA_L9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_L11 WGMMA_L10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_L12 WGMMA_L11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_L13 WGMMA_L12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_L14 WGMMA_L13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_L15 WGMMA_L14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_L16 WGMMA_L15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_16(i) WGMMA_8(i), WGMMA_8(i + 8)
#define WGMMA_32(i) WGMMA_16(i), WGMMA_16(i + 16)
#define WGMMA_64(i) WGMMA_32(i), WGMMA_32(i + 32)

// A, B, P: the numbers of the operands behind the accumulators: N/2 and on.
#define WGMMA_DEFINE(T, KIND, N, A, B, P, LIST, ...)                                                    \
  template <> struct Wgmma<T, N> {                                                                      \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, int accumulate) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" LIST "}, %" #A  \
                   ", %" #B ", p, 1, 1, 0, 0;\n}"                                                       \
                   : __VA_ARGS__                                                                        \
                   : "l"(a), "l"(b), "r"(accumulate));                                                  \
    }                                                                                                   \
  };
#define WGMMA_BOTH(N, A, B, P, LIST, ...)                  \
  WGMMA_DEFINE(half, "f16", N, A, B, P, LIST, __VA_ARGS__) \
  WGMMA_DEFINE(bf16, "bf16", N, A, B, P, LIST, __VA_ARGS__)

WGMMA_BOTH(16, 8, 9, 10, WGMMA_L1, WGMMA_8(0))
WGMMA_BOTH(32, 16, 17, 18, WGMMA_L2, WGMMA_16(0))
WGMMA_BOTH(48, 24, 25, 26, WGMMA_L3, WGMMA_16(0), WGMMA_8(16))
WGMMA_BOTH(64, 32, 33, 34, WGMMA_L4, WGMMA_32(0))
WGMMA_BOTH(96, 48, 49, 50, WGMMA_L6, WGMMA_32(0), WGMMA_16(32))
WGMMA_BOTH(128, 64, 65, 66, WGMMA_L8, WGMMA_64(0))
WGMMA_BOTH(160, 80, 81, 82, WGMMA_L10, WGMMA_64(0), WGMMA_16(64))
WGMMA_BOTH(192, 96, 97, 98, WGMMA_L12, WGMMA_64(0), WGMMA_32(64))
WGMMA_BOTH(256, 128, 129, 130, WGMMA_L16, WGMMA_64(0), WGMMA_64(64))

// WgmmaRegisters<T, N, NMajor>::multiply(d, a, b, accumulate): A in registers; NMajor 1: B lies N-major.
template <class T, int N, int NMajor> struct WgmmaRegisters;

// A0 .. A3, B, P: the numbers of the operands behind the accumulators: N/2 and on.
#define WGMMA_DEFINE_REGISTERS(T, KIND, N, MAJOR, A0, A1, A2, A3, B, P, LIST, ...)                                     \
  template <> struct WgmmaRegisters<T, N, MAJOR> {                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" LIST "}, {%" #A0 ",%" #A1      \
                   ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, " #MAJOR ";\n}"                                             \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
  };
#define WGMMA_BOTH_REGISTERS(N, MAJOR, A0, A1, A2, A3, B, P, LIST, ...)                           \
  WGMMA_DEFINE_REGISTERS(half, "f16", N, MAJOR, A0, A1, A2, A3, B, P, LIST, __VA_ARGS__)          \
  WGMMA_DEFINE_REGISTERS(bf16, "bf16", N, MAJOR, A0, A1, A2, A3, B, P, LIST, __VA_ARGS__)

WGMMA_BOTH_REGISTERS(64, 0, 32, 33, 34, 35, 36, 37, WGMMA_L4, WGMMA_32(0))
WGMMA_BOTH_REGISTERS(64, 1, 32, 33, 34, 35, 36, 37, WGMMA_L4, WGMMA_32(0))
WGMMA_BOTH_REGISTERS(128, 1, 64, 65, 66, 67, 68, 69, WGMMA_L8, WGMMA_64(0))

// For products of few rows.
WGMMA_BOTH(72, 36, 37, 38, WGMMA_L4 ",%32,%33,%34,%35", WGMMA_32(0), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]))
