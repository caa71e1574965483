// Forced in front of every kernel: CUDA C++ as seen by an ordinary C++17 compiler. Language and intrinsics are here and in
// emu/*.h; scheduling, checks and tensor-core arithmetic are in ../runtime. As under NVRTC there are no standard headers:
// that keeps a compile short and lets a kernel that needs one fail here too.
#pragma once
#define CUKERN_EMU 1

#include "emu/base.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
// One OS thread runs one block at a time, so a thread-local variable is block-shared memory. "used": a variable that nobody
// writes, or nobody reads, would be taken for a constant, or left out, before its accesses can be watched.
#define __shared__ static __thread __attribute__((used))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __align__(...) __attribute__((aligned(__VA_ARGS__)))

// Default arguments that carry the caller's position into a fault report.
#define EMU_SITE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_HERE emu_file, emu_line

#include "emu/runtime_abi.h"

#define threadIdx (::emu_thread_idx())
#define blockIdx (::emu_block_idx())
#define blockDim (::emu_block_dim())
#define gridDim (::emu_grid_dim())
static constexpr int warpSize = 32;

#define printf emu_printf
#define assert(c) ((c) ? (void)0 : ::emu_trap("assertion failed: " #c, __FILE__, __LINE__))
#define __trap() ::emu_trap("__trap()", __FILE__, __LINE__)
#define __brkpt() ((void)0)


#include "emu/math.h"
#include "emu/sync.h"
#include "emu/atomics.h"
#include "emu/ptx.h"
#include "emu/launch.h"
