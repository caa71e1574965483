// Check mode: the compiler's thread-sanitizer instrumentation calls __tsan_* before every access to memory that is not a
// plain local, and the undefined-behaviour sanitizer calls __ubsan_*. No sanitizer library is linked: the hooks are here.
#pragma once
#include "faults.h"

// Flags above the 10-bit thread number in Shadow::writer and Shadow::reader.
enum : uint16_t {
  S_THREAD = 0x3ff,
  S_LOW = 0x400,      // the even byte took part
  S_HIGH = 0x800,     // the odd byte took part
  S_BYTES = S_LOW | S_HIGH,
  S_IN_FLIGHT = 0x1000,  // writer: a cp.async that has not been waited for
  S_INIT = 3,            // writer: shift from S_LOW, S_HIGH to the bytes that anybody has written in this block
  S_WARP = 0x2000,       // reader: several lanes of this thread's warp
  S_BLOCK = 0x4000,      // reader: threads of several warps
};
#define TIMEOUT_TEXT "no end after %.1f s: an endless loop, or a wait for another block"
static const char *access_name(int write) { return write ? "write" : "read"; }

[[noreturn]] static void race(void *pc, const char *file, int line, const void *p, size_t n, int write, unsigned other, const char *others, const char *what) {
  char text[256];
  snprintf(text, sizeof text, "race on shared memory: this thread's %s meets a %s by thread %u%s with no barrier in between", access_name(write), what, other, others);
  fail_access(F_SHARED_RACE, pc, file, line, p, n, write, -1, text);
}

// GCC tests a guard byte before it "initialises" a thread-local array of class type; that read is nobody's fault.
static bool is_guard(const Launch *l, bool in_statics, size_t offset) {
  if (in_statics)
    for (int i = 0; i < l->guard_count; ++i)
      if (l->guards[i] == offset) return true;
  return false;
}

struct SharedAccess {
  Worker *w;
  Shadow *table;
  size_t offset, bytes;
  int write;
  void *pc;
  const char *file;
  int line;
  const void *address;
};
[[noreturn]] static void report(const SharedAccess &a, FaultKind kind, const char *text) {
  fail_access(kind, a.pc, a.file, a.line, a.address, a.bytes, a.write, -1, text);
}

// What one access of the current thread does to the history of two bytes, of which `mask` says the touched ones.
static inline void touch(const SharedAccess &a, Shadow &s, uint16_t mask) {
  const Thread *t = a.w->current;
  const uint16_t me = (uint16_t)t->linear, my_warp = me >> 5, warp_epoch = (uint16_t)t->warp->epoch;
  const uint32_t now = a.w->epoch, born = a.w->block_epoch;
  const unsigned writer = s.writer & S_THREAD, reader = s.reader & S_THREAD;
  if (s.write_epoch >= born && s.writer & S_IN_FLIGHT && s.writer & mask)
    report(a, F_SHARED_RACE, a.write ? "race on shared memory: write to the target of a cp.async that has not been waited for"
                                     : "race on shared memory: read of the target of a cp.async that has not been waited for");
  if (s.write_epoch == now && writer != me && s.writer & mask && !(writer >> 5 == my_warp && s.write_warp_epoch < warp_epoch))
    race(a.pc, a.file, a.line, a.address, a.bytes, a.write, writer, "", "write");
  if (a.write) {
    if (s.read_epoch == now && s.reader & mask) {
      const bool same_warp = reader >> 5 == my_warp && !(s.reader & S_BLOCK);
      if ((reader != me || s.reader & (S_WARP | S_BLOCK)) && !(same_warp && s.read_warp_epoch < warp_epoch))
        race(a.pc, a.file, a.line, a.address, a.bytes, 1, reader, s.reader & (S_WARP | S_BLOCK) ? " and others" : "", "read");
    }
    // one thread may write the bytes one after the other; of two threads the later one counts as the writer
    uint16_t flags = (uint16_t)(mask | mask << S_INIT);
    if (s.write_epoch >= born) flags |= (uint16_t)(s.writer & (S_BYTES << S_INIT));
    if (s.write_epoch == now && writer == me) flags |= (uint16_t)(s.writer & S_BYTES);
    s.write_epoch = now, s.write_warp_epoch = warp_epoch;
    s.writer = (uint16_t)(me | flags);
    s.read_epoch = 0;
    return;
  }
  if (s.write_epoch < born || mask << S_INIT & ~s.writer) {
    if (is_guard(a.w->launch, a.table == a.w->static_shadow.items, a.offset)) return;
    report(a, F_UNINITIALISED, "read of shared memory that this block has not written");
  }
  if (s.read_epoch != now) s.reader = (uint16_t)(me | mask), s.read_warp_epoch = warp_epoch;
  else if (reader == me || s.reader & S_BLOCK) s.reader |= mask, s.read_warp_epoch = warp_epoch;
  else if (reader >> 5 == my_warp) s.reader |= (uint16_t)(S_WARP | mask), s.read_warp_epoch = warp_epoch;
  else s.reader |= (uint16_t)(S_BLOCK | mask);
  s.read_epoch = now;
}

// One access of this thread to shared memory: `offset` bytes into the region that `table` describes.
static void check_shared(Worker *w, Shadow *table, size_t offset, size_t bytes, int write, void *pc, const char *file, int line, const void *p) {
  const SharedAccess a = {w, table, offset, bytes, write, pc, file, line, p};
  const size_t end = offset + bytes;
  for (size_t i = offset >> 1; i < (end + 1) >> 1; ++i)
    touch(a, table[i], (uint16_t)((i * 2 >= offset ? S_LOW : 0) | (i * 2 + 1 < end ? S_HIGH : 0)));
}

[[noreturn]] static void out_of_bounds(Worker *w, uintptr_t a, size_t bytes, int write, void *pc, const char *file, int line) {
  const Launch *l = w->launch;
  char text[256];
  const Range *nearest = nullptr;
  uintptr_t distance = 0;
  for (int i = 0; i < l->range_count; ++i) {
    const Range *r = &l->ranges[i];
    if (r->argument < 0) continue;
    const uintptr_t d = a < r->lo ? r->lo - a : a >= r->hi ? a - r->hi : 0;
    if (!nearest || d < distance) nearest = r, distance = d;
  }
  if (a < 4096) {
    snprintf(text, sizeof text, "%s of %zu bytes through a null pointer (address %#zx)", access_name(write), bytes, (size_t)a);
    nearest = nullptr;
  } else if (nearest && distance < ((uintptr_t)1 << 32)) snprintf(text, sizeof text, "out-of-bounds %s of %zu bytes", access_name(write), bytes);
  else snprintf(text, sizeof text, "out-of-bounds %s of %zu bytes at %#zx, far from every argument", access_name(write), bytes, (size_t)a), nearest = nullptr;
  fail_access(F_OUT_OF_BOUNDS, pc, file, line, (void *)a, bytes, write, nearest ? nearest->argument : -1, text);
}

static __attribute__((noinline)) void check_elsewhere(Worker *w, uintptr_t a, size_t bytes, int write, void *pc, const char *file, int line) {
  const Launch *l = w->launch;
  if (w->interrupted) {
    if (w->shared->stop) leave(w);
    fail_at(F_TIMEOUT, pc, TIMEOUT_TEXT, l->timeout);
  }
  if (w->dynamic_map && a - (uintptr_t)w->dynamic_map < w->dynamic_capacity + GUARD_BYTES) {
    if (a < (uintptr_t)w->dynamic || a + bytes > (uintptr_t)w->dynamic + l->dynamic_bytes) {
      char text[256];
      snprintf(text, sizeof text, "out-of-bounds %s of %zu bytes at offset %td of dynamic shared memory, which has %zu bytes", access_name(write), bytes,
               (ptrdiff_t)(a - (uintptr_t)w->dynamic), (size_t)l->dynamic_bytes);
      fail_access(F_OUT_OF_BOUNDS, pc, file, line, (void *)a, bytes, write, -1, text);
    }
    const size_t offset = a - (uintptr_t)w->dynamic;
    return check_shared(w, w->dynamic_shadow.items, offset, bytes, write, pc, file, line, (void *)a);
  }
  if (w->statics && a - (uintptr_t)w->statics < w->static_bytes) {
    const size_t offset = a - (uintptr_t)w->statics;
    if (bytes > w->static_bytes - offset) bytes = w->static_bytes - offset;
    return check_shared(w, w->static_shadow.items, offset, bytes, write, pc, file, line, (void *)a);
  }
  const Range *forbidden = nullptr;
  for (int i = 0; i < l->range_count; ++i) {
    const Range *r = &l->ranges[i];
    if (a < r->lo || a + bytes > r->hi) continue;
    if (write && r->read_only) {
      forbidden = r;
      continue;
    }
    (write ? w->last_write : w->last_read) = r;
    return;
  }
  if (forbidden) fail_access(F_READ_ONLY, pc, file, line, (void *)a, bytes, write, forbidden->argument, "write to a read-only array");
  for (const Segment &s : w->segments)  // __constant__ and __device__ variables, literals
    if (a >= s.lo && a + bytes <= s.hi) return;
  for (uintptr_t p : w->pools)  // a local of another thread of the block, reached through a pointer
    if (a - p < 1024 * (STACK_BYTES + GUARD_BYTES)) return;
  out_of_bounds(w, a, bytes, write, pc, file, line);
}
static inline void check_access(const void *p, size_t bytes, int write, void *pc, const char *file, int line) {
  Worker *w = tls_worker;
  if (!w || !w->current) return;
  const uintptr_t a = (uintptr_t)p;
  if (a - (uintptr_t)w->current->stack < STACK_BYTES) return;
  const Range *r = write ? w->last_write : w->last_read;
  if (r && a >= r->lo && a + bytes <= r->hi) return;
  check_elsewhere(w, a, bytes, write, pc, file, line);
}
static inline void check_aligned(const void *p, size_t bytes, int write, void *pc) {
  if (__builtin_expect((uintptr_t)p & (bytes - 1), 0)) {
    char text[128];
    snprintf(text, sizeof text, "misaligned %s of %zu bytes at address %p", access_name(write), bytes, p);
    fail_access(F_MISALIGNED, pc, nullptr, 0, p, bytes, write, -1, text);
  }
}

static Shadow *shared_shadow(Worker *w, const void *p, size_t *offset) {
  const uintptr_t a = (uintptr_t)p;
  if ((*offset = a - (uintptr_t)w->dynamic) < w->launch->dynamic_bytes) return w->dynamic_shadow.items;
  if (w->statics && (*offset = a - (uintptr_t)w->statics) < w->static_bytes) return w->static_shadow.items;
  return nullptr;
}
// A cp.async: the target is a write by this thread that nobody, this thread included, may touch before the wait.
static void begin_copy(Worker *w, const CopyInFlight &c, void *pc) {
  size_t offset;
  Shadow *s = shared_shadow(w, c.dst, &offset);
  if (!s) fail_access(F_OUT_OF_BOUNDS, pc, c.file, c.line, c.dst, (size_t)c.bytes, 1, -1, "cp.async to an address that is not in shared memory");
  for (size_t i = offset / 2; i < (offset + (size_t)c.bytes) / 2; ++i) s[i].writer |= S_IN_FLIGHT;
}
static void end_copy(Worker *w, const CopyInFlight &c) {
  size_t offset;
  Shadow *s = shared_shadow(w, c.dst, &offset);
  for (size_t i = offset / 2; i < (offset + (size_t)c.bytes) / 2; ++i) s[i].writer &= (uint16_t)~S_IN_FLIGHT;
  check_access(c.dst, (size_t)c.bytes, 1, nullptr, c.file, c.line);
}

PUBLIC void __tsan_init() {}
PUBLIC void __tsan_func_entry(void *) {}
PUBLIC void __tsan_func_exit() {}
#define HOOKS(N)                                                                                                            \
  PUBLIC void __tsan_read##N(void *p) { check_access(p, N, 0, CALLER, nullptr, 0), check_aligned(p, N, 0, CALLER); }        \
  PUBLIC void __tsan_write##N(void *p) { check_access(p, N, 1, CALLER, nullptr, 0), check_aligned(p, N, 1, CALLER); }       \
  PUBLIC void __tsan_unaligned_read##N(void *p) { check_access(p, N, 0, CALLER, nullptr, 0); }                              \
  PUBLIC void __tsan_unaligned_write##N(void *p) { check_access(p, N, 1, CALLER, nullptr, 0); }                             \
  PUBLIC void __tsan_volatile_read##N(void *p) { check_access(p, N, 0, CALLER, nullptr, 0), check_aligned(p, N, 0, CALLER); }   \
  PUBLIC void __tsan_volatile_write##N(void *p) { check_access(p, N, 1, CALLER, nullptr, 0), check_aligned(p, N, 1, CALLER); }  \
  PUBLIC void __tsan_unaligned_volatile_read##N(void *p) { check_access(p, N, 0, CALLER, nullptr, 0); }                     \
  PUBLIC void __tsan_unaligned_volatile_write##N(void *p) { check_access(p, N, 1, CALLER, nullptr, 0); }                    \
  PUBLIC void __tsan_read_write##N(void *p) {                                                                               \
    check_access(p, N, 0, CALLER, nullptr, 0), check_access(p, N, 1, CALLER, nullptr, 0), check_aligned(p, N, 1, CALLER);   \
  }                                                                                                                         \
  PUBLIC void __tsan_unaligned_read_write##N(void *p) { check_access(p, N, 0, CALLER, nullptr, 0), check_access(p, N, 1, CALLER, nullptr, 0); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
PUBLIC void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
PUBLIC void __tsan_atomic_signal_fence(int) {}
PUBLIC void __tsan_vptr_update(void **, void *) {}
PUBLIC void __tsan_vptr_read(void **) {}
PUBLIC void __tsan_read_range(void *p, size_t n) { check_access(p, n, 0, CALLER, nullptr, 0); }
PUBLIC void __tsan_write_range(void *p, size_t n) { check_access(p, n, 1, CALLER, nullptr, 0); }
// Copies of structs: a hook in recent compilers, a call of memcpy in others, which the linker redirects (--wrap).
#define COPY_HOOKS(PREFIX)                                                                      \
  PUBLIC void *PREFIX##memcpy(void *d, const void *s, size_t n) {                               \
    check_access(s, n, 0, CALLER, nullptr, 0), check_access(d, n, 1, CALLER, nullptr, 0);       \
    return memcpy(d, s, n);                                                                     \
  }                                                                                             \
  PUBLIC void *PREFIX##memmove(void *d, const void *s, size_t n) {                              \
    check_access(s, n, 0, CALLER, nullptr, 0), check_access(d, n, 1, CALLER, nullptr, 0);       \
    return memmove(d, s, n);                                                                    \
  }                                                                                             \
  PUBLIC void *PREFIX##memset(void *d, int c, size_t n) {                                       \
    check_access(d, n, 1, CALLER, nullptr, 0);                                                  \
    return memset(d, c, n);                                                                     \
  }
COPY_HOOKS(__tsan_)
COPY_HOOKS(__wrap_)

// Undefined behaviour: every handler's data begins with the position in the source.
struct UbPosition {
  const char *file;
  uint32_t line, column;
};
struct UbType {
  uint16_t kind, info;
  char name[1];
};
#define UB(NAME, KIND, TEXT)                                                                                       \
  PUBLIC void __ubsan_handle_##NAME(UbPosition *d) { fail(KIND, d->file, (int)d->line, TEXT); }                    \
  PUBLIC void __ubsan_handle_##NAME##_abort(UbPosition *d) { fail(KIND, d->file, (int)d->line, TEXT); }
UB(shift_out_of_bounds, F_ARITHMETIC, "shift by a negative amount or by the width of the type or more")
UB(divrem_overflow, F_ARITHMETIC, "integer division by zero or overflow")
UB(builtin_unreachable, F_ARITHMETIC, "code marked unreachable was reached")
UB(missing_return, F_ARITHMETIC, "a function that returns a value ended without one")
UB(local_out_of_bounds, F_OUT_OF_BOUNDS, "index outside a local array")
UB(alignment_assumption, F_MISALIGNED, "pointer is not aligned as __builtin_assume_aligned promises")
UB(vla_bound_not_positive, F_ARITHMETIC, "array of negative or zero length")
static void ub_index(UbPosition *d, uintptr_t index) {
  const UbType *type = *(UbType **)(d + 1);
  char text[256];
  snprintf(text, sizeof text, "index %ld is outside the array of type %s", (long)index, type->name);
  fail_access(F_OUT_OF_BOUNDS, nullptr, d->file, (int)d->line, nullptr, 0, 0, -1, text);
}
PUBLIC void __ubsan_handle_out_of_bounds(UbPosition *d, uintptr_t i) { ub_index(d, i); }
PUBLIC void __ubsan_handle_out_of_bounds_abort(UbPosition *d, uintptr_t i) { ub_index(d, i); }
struct UbMismatch {
  UbPosition position;
  const UbType *type;
  uint8_t log_alignment, check_kind;
};
static void ub_pointer(UbPosition *d, uintptr_t p) {
  const UbMismatch *m = (const UbMismatch *)d;
  const UbType *type = m->type;
  // NumPy aligns to 16 bytes, a GPU to 256: what counts is the offset in the allocation
  const Launch *l = tls_worker->launch;
  for (int i = 0; i < l->range_count; ++i)
    if (p >= l->ranges[i].lo && p < l->ranges[i].hi && (p - l->ranges[i].base) % ((uintptr_t)1 << m->log_alignment) == 0) return;
  char text[256];
  snprintf(text, sizeof text, p ? "misaligned access to %s at address %#zx" : "access to %s through a null pointer", type->name, (size_t)p);
  fail_access(p ? F_MISALIGNED : F_OUT_OF_BOUNDS, nullptr, d->file, (int)d->line, (void *)p, 0, 0, -1, text);
}
PUBLIC void __ubsan_handle_type_mismatch_v1(UbPosition *d, uintptr_t p) { ub_pointer(d, p); }
PUBLIC void __ubsan_handle_type_mismatch_v1_abort(UbPosition *d, uintptr_t p) { ub_pointer(d, p); }

PUBLIC void emu_access(const void *p, unsigned bytes, bool write, unsigned align, const char *what, const char *file, int line) {
  if ((uintptr_t)p % align) {
    char text[256];
    snprintf(text, sizeof text, "%s: address %p is not aligned to %u bytes", what, p, align);
    fail_access(F_MISALIGNED, nullptr, file, line, p, bytes, write, -1, text);
  }
  if (tls_worker->launch->check) check_access(p, bytes, write, nullptr, file, line);
}
