// What a compiled kernel calls in the runtime library. Operands travel in registers, so that check mode has nothing to
// instrument on the way.
#pragma once
#include "emu/vector_types.h"

struct EmuFloat4 { float v[4]; };
struct EmuWord4 { uint32_t v[4]; };

#define EMU_CONST __attribute__((const))  // a fiber's place in the grid never changes: calls may be merged and hoisted
extern "C" {
uint3 emu_thread_idx() EMU_CONST;
uint3 emu_block_idx() EMU_CONST;
uint3 emu_block_dim() EMU_CONST;
uint3 emu_grid_dim() EMU_CONST;
int emu_lane() EMU_CONST;
void *emu_dynamic_shared() EMU_CONST;
unsigned emu_dynamic_shared_size() EMU_CONST;

int emu_barrier(int id, int count, int mode, int pred, const char *file, int line);
uint64_t emu_shuffle(uint32_t mask, uint64_t value, int source, const char *what, const char *file, int line);
uint32_t emu_vote(uint32_t mask, int pred, const char *what, const char *file, int line);
uint64_t emu_match(uint32_t mask, uint64_t value, int all, const char *file, int line);
uint32_t emu_reduce(uint32_t mask, int op, uint32_t value, const char *what, const char *file, int line);
void emu_warp_barrier(uint32_t mask, const char *file, int line);
uint32_t emu_active_mask();
void emu_grid_barrier(const char *file, int line);
void emu_yield();
long long emu_clock();

EmuFloat4 emu_mma_call(float c0, float c1, float c2, float c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                       uint32_t b0, uint32_t b1, int is_half, const char *file, int line);
EmuWord4 emu_ldmatrix_call(const void *row, int n, int trans, const char *file, int line);
void emu_cp_async(void *dst, const void *src, int bytes, int src_bytes, const char *file, int line);
void emu_cp_commit();
void emu_cp_wait(int pending);  // negative: all
void emu_access(const void *p, unsigned bytes, bool write, unsigned align, const char *what, const char *file, int line);

uint32_t emu_atomic32(int op, void *p, uint32_t value, uint32_t compare, const char *file, int line);
uint64_t emu_atomic64(int op, void *p, uint64_t value, uint64_t compare, const char *file, int line);
int emu_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));
void emu_trap(const char *what, const char *file, int line) __attribute__((noreturn));
}
namespace emu {
enum AtomicOp { A_ADD, A_FADD, A_MIN, A_MAX, A_UMIN, A_UMAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC, A_HALF2_ADD, A_BF162_ADD };
enum ReduceOp { R_ADD, R_MIN, R_MAX, R_UMIN, R_UMAX, R_AND, R_OR, R_XOR };
enum BarrierMode { B_PLAIN, B_COUNT, B_AND, B_OR };
}  // namespace emu
