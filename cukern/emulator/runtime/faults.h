// Recording the first fault of a launch and leaving the kernel.
#pragma once
#include "state.h"
#include <stdarg.h>
#include <stdio.h>

static void record(Worker *w, FaultKind kind, void *pc, const char *file, int line, const char *format, va_list ap) {
  w->in_fiber = false;
  pthread_mutex_lock(&w->shared->mutex);
  if (!w->shared->stop) {
    w->shared->stop = 1;
    Fault &f = w->launch->fault;
    f.kind = kind;
    f.pc = (uint64_t)pc;
    f.line = line;
    snprintf(f.file, sizeof f.file, "%s", file ? file : "");
    vsnprintf(f.text, sizeof f.text, format, ap);
    f.has_block = 1;
    f.block[0] = w->block_index.x, f.block[1] = w->block_index.y, f.block[2] = w->block_index.z;
    if (w->current) {
      f.has_thread = 1;
      f.thread[0] = w->current->index.x, f.thread[1] = w->current->index.y, f.thread[2] = w->current->index.z;
    }
    pthread_cond_broadcast(&w->shared->changed);
  }
  pthread_mutex_unlock(&w->shared->mutex);
}
// Every fiber of the block is abandoned: kernels own no resources.
[[noreturn]] static void leave(Worker *w) { siglongjmp(w->escape, 1); }

static void fail(FaultKind kind, const char *file, int line, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  record(tls_worker, kind, nullptr, file, line, format, ap);
  va_end(ap);
  leave(tls_worker);
}
static void fail_at(FaultKind kind, void *pc, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  record(tls_worker, kind, pc, nullptr, 0, format, ap);
  va_end(ap);
  leave(tls_worker);
}
// A fault about one address: Python turns address and argument into an array index.
[[noreturn]] static void fail_access(FaultKind kind, void *pc, const char *file, int line, const void *address, size_t bytes,
                                     int write, int argument, const char *text) {
  Worker *w = tls_worker;
  pthread_mutex_lock(&w->shared->mutex);
  if (!w->shared->stop) {
    Fault &f = w->launch->fault;
    f.address = (uint64_t)address;
    f.bytes = (int32_t)bytes;
    f.write = write;
    f.argument = argument;
    const uintptr_t a = (uintptr_t)address;
    if (w->dynamic_map && a - (uintptr_t)w->dynamic_map < w->dynamic_capacity + GUARD_BYTES)
      f.shared = DYNAMIC_SHARED, f.offset = (int64_t)(a - (uintptr_t)w->dynamic);
    else if (w->statics && a - (uintptr_t)w->statics < w->static_bytes)
      f.shared = STATIC_SHARED, f.offset = (int64_t)(a - (uintptr_t)w->statics);
  }
  pthread_mutex_unlock(&w->shared->mutex);
  if (file) fail(kind, file, line, "%s", text);
  fail_at(kind, pc, "%s", text);
}
PUBLIC void emu_trap(const char *what, const char *file, int line) { fail(F_ASSERT, file, line, "%s", what); }
