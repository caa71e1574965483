// A launch: workers take blocks from a counter; the calling thread waits, watches the clock and can cancel.
#pragma once
#include "memory_check.h"
#include "schedule.h"
#include <errno.h>
#include <link.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
PUBLIC long long emu_clock() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

// ---- printf: collected and handed to Python, so that notebooks and test runners see it
PUBLIC int emu_printf(const char *format, ...) {
  Worker *w = tls_worker;
  Launch *l = w->launch;
  char text[2048];
  va_list ap;
  va_start(ap, format);
  int n = vsnprintf(text, sizeof text, format, ap);
  va_end(ap);
  if (n >= (int)sizeof text) n = (int)sizeof text - 1;
  w->in_fiber = false;
  pthread_mutex_lock(&w->shared->print_mutex);
  if (n > 0 && l->print_used + (uint64_t)n <= l->print_capacity) {
    memcpy(l->print_buffer + l->print_used, text, (size_t)n);
    l->print_used += (uint64_t)n;
  } else if (n > 0) l->print_lost += (uint64_t)n;
  pthread_mutex_unlock(&w->shared->print_mutex);
  w->in_fiber = true;
  return n;
}

// ---- blocks
[[noreturn]] static void deadlock(Worker *w) {
  // lanes that wait for each other with different masks: that is the fault, not the standstill that follows
  for (int i = 0; i < w->warp_count; ++i) {
    Warp &warp = w->warps[i];
    for (int a = 0; a < warp.waiting; ++a)
      for (int b = 0; b < warp.waiting; ++b) {
        const Collective &x = warp.group[a], &y = warp.group[b];
        if (a == b || !(x.mask & ~x.arrived & y.arrived)) continue;
        w->current = warp.threads + __builtin_ctz(x.arrived);
        fail(F_MASK, x.file, x.line, "%s with mask 0x%08x waits for lanes 0x%08x, which wait in %s with mask 0x%08x at %s:%d", x.what, x.mask,
             x.mask & ~x.arrived & y.arrived, y.what, y.mask, y.file, y.line);
      }
  }
  char text[900];
  int used = 0;
  bool seen[1024] = {};
  const Thread *first = nullptr;
  text[0] = 0;
  for (int i = 0; i < w->thread_count && used < 700; ++i) {
    Thread &a = w->threads[i];
    if (seen[i] || a.state == DONE) continue;
    if (!first) first = &a;
    int count = 0;
    for (int j = i; j < w->thread_count; ++j) {
      Thread &b = w->threads[j];
      if (b.state != DONE && b.what == a.what && b.line == a.line && b.file == a.file) seen[j] = true, ++count;
    }
    used += snprintf(text + used, sizeof text - (size_t)used, "%s%d (first: thread %d) wait in %s at %s:%d", used ? "; " : "", count, i, a.what ? a.what : "?",
                     a.file ? a.file : "?", a.line);
  }
  w->current = nullptr;
  fail(F_DEADLOCK, first ? first->file : nullptr, first ? first->line : 0, "deadlock among %d threads of the block: %s; %d have exited", w->thread_count, text,
       w->thread_count - w->live);
}
static void wait_for_grid(Worker *w) {
  LaunchState *s = w->shared;
  pthread_mutex_lock(&s->mutex);
  const unsigned generation = s->grid_generation;
  if (++s->grid_waiting == s->block_count) {
    s->grid_waiting = 0;
    ++s->grid_generation;
    pthread_cond_broadcast(&s->changed);
  }
  while (s->grid_generation == generation && !s->stop) {
    if (s->grid_exited && s->grid_waiting + s->grid_exited == s->block_count) {
      const unsigned waiting = s->grid_waiting, exited = s->grid_exited;
      pthread_mutex_unlock(&s->mutex);
      w->current = nullptr;
      fail(F_DEADLOCK, w->threads[0].file, w->threads[0].line, "deadlock: %u blocks wait at the grid barrier, %u have exited", waiting, exited);
    }
    pthread_cond_wait(&s->changed, &s->mutex);
  }
  pthread_mutex_unlock(&s->mutex);
  if (s->stop) leave(w);
}
static void run_block(Worker *w, uint32_t b) {
  Launch *l = w->launch;
  w->block_index = {b % l->grid[0], b / l->grid[0] % l->grid[1], b / (l->grid[0] * l->grid[1])};
  w->live = w->thread_count, w->started = 0, w->ready_head = w->ready_tail = 0, w->current = nullptr;
  w->block_epoch = ++w->epoch;
  for (int i = 0; i < w->warp_count; ++i) {
    Warp &warp = w->warps[i];
    const int lanes = w->thread_count - i * 32;
    warp.live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    warp.waiting = 0, warp.epoch = 0, warp.threads = &w->threads[(size_t)i * 32];
  }
  memset(w->barriers, 0, sizeof w->barriers);
  // 0xff...: NaN as half, bfloat16 and float, -1 as an integer
  if (l->dynamic_bytes) memset(w->dynamic, 0xff, l->dynamic_bytes);
  if (w->static_bytes) memset(w->statics, 0xff, w->static_bytes);
  w->random = (l->seed + 1) * 0x9E3779B97F4A7C15ull ^ (b + 1) * 0xD1B54A32D192ED03ull;
  if (!w->random) w->random = 1;
  for (int i = 0; i < w->thread_count; ++i) w->permutation[i] = l->order == DOWN ? w->thread_count - 1 - i : i;
  if (l->order == RANDOM)
    for (int i = w->thread_count - 1; i > 0; --i) {
      const int j = (int)(next_random(w) % (uint64_t)(i + 1)), x = w->permutation[i];
      w->permutation[i] = w->permutation[j], w->permutation[j] = x;
    }
  for (;;) {
    dispatch(w, &w->main);
    w->current = nullptr;
    if (!w->live) return;
    for (int i = 0; i < w->thread_count; ++i)
      if (w->threads[i].state != DONE && w->threads[i].state != AT_GRID) deadlock(w);
    w->in_fiber = false;
    wait_for_grid(w);
    w->in_fiber = true;
    ++w->epoch;
    for (int i = 0; i < w->thread_count; ++i)
      if (w->threads[i].state == AT_GRID) make_ready(w, &w->threads[i]);
  }
}

// ---- signals
static const int FAULT_SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#define STOP_SIGNAL (SIGRTMIN + 7)
static struct sigaction previous_actions[5];
static void on_signal(int signal, siginfo_t *info, void *context) {
  Worker *w = tls_worker;
  if (!w) {  // not one of our threads: hand over to whoever was there
    for (int i = 0; i < 4; ++i)
      if (FAULT_SIGNALS[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    return;
  }
#if defined(__x86_64__)
  void *pc = (void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  const char *sp = (const char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RSP];
#elif defined(__aarch64__)
  void *pc = (void *)((ucontext_t *)context)->uc_mcontext.pc;
  const char *sp = (const char *)((ucontext_t *)context)->uc_mcontext.sp;
#else
  void *pc = nullptr;
  const char *sp = (const char *)~(uintptr_t)0;
  (void)context;
#endif
  if (signal == STOP_SIGNAL) {
    // only out of kernel code: a jump out of malloc or of the scheduler would leave its locks taken
    bool in_kernel = false;
    for (const Segment &s : w->segments) in_kernel |= (uintptr_t)pc >= s.lo && (uintptr_t)pc < s.hi;
    if (!w->in_fiber) return;
    if (!in_kernel) {  // perhaps in a check, which looks at this when its shortcut fails
      w->interrupted = true;
      w->last_read = w->last_write = nullptr;
      return;
    }
    if (w->shared->stop) leave(w);
    fail_at(F_TIMEOUT, (char *)pc + 1, TIMEOUT_TEXT, w->launch->timeout);
  }
  pc = (char *)pc + 1;  // positions are looked up one byte before, as for a return address
  if (signal == SIGFPE) fail_at(F_ARITHMETIC, pc, "integer division by zero or overflow");
  const char *a = (char *)info->si_addr;
  // a frame larger than the stack reaches far below the guard page
  if (w->current && (sp < w->current->stack || (a >= w->current->stack - GUARD_BYTES && a < w->current->stack + 64)))
    fail_at(F_STACK, pc, "an emulated thread overflowed its stack of %zu KiB", STACK_BYTES >> 10);
  char text[160];
  const Range *near = nullptr;
  for (int i = 0; i < w->launch->range_count; ++i) {
    const Range *r = &w->launch->ranges[i];
    if (r->argument >= 0 && (uintptr_t)a >= r->hi && (!near || r->hi > near->hi)) near = r;
  }
  if (near && (uintptr_t)a - near->hi > (1 << 20)) near = nullptr;
  if ((uintptr_t)a < 4096) snprintf(text, sizeof text, "access through a null pointer (address %p)", a), near = nullptr;
  else if (w->dynamic_map && (uintptr_t)(a - w->dynamic_map) < w->dynamic_capacity + GUARD_BYTES)
    snprintf(text, sizeof text, "out-of-bounds access at offset %td of dynamic shared memory, which has %zu bytes", (ptrdiff_t)(a - w->dynamic), (size_t)w->launch->dynamic_bytes), near = nullptr;
  else snprintf(text, sizeof text, "%s at address %p", near ? "out-of-bounds access" : "invalid access", a);
  fail_access(F_OUT_OF_BOUNDS, pc, nullptr, 0, a, 1, -1, near ? near->argument : -1, text);
}

static bool handling;  // whether the handlers are ours
static void take_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 4; ++i) sigaction(FAULT_SIGNALS[i], &action, &previous_actions[i]);
  sigaction(STOP_SIGNAL, &action, &previous_actions[4]);
  handling = true;
}
static void give_signals_back() {
  for (int i = 0; i < 4; ++i) sigaction(FAULT_SIGNALS[i], &previous_actions[i], nullptr);
  sigaction(STOP_SIGNAL, &previous_actions[4], nullptr);
  handling = false;
}

// ---- forks: a child has none of the parent's workers. Those of a launch that ran meanwhile are lost to it, the idle ones
// are its own; the lock keeps it from inheriting a list, handlers or the loader's state that were just being changed.
static pthread_mutex_t between_launches = PTHREAD_MUTEX_INITIALIZER;
static void before_fork() { pthread_mutex_lock(&between_launches); }
static void after_fork() { pthread_mutex_unlock(&between_launches); }
static void after_fork_in_child() {
  if (handling) give_signals_back();
  pthread_mutex_unlock(&between_launches);
}
__attribute__((constructor)) static void watch_forks() { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

// ---- workers
static int find_segments(struct dl_phdr_info *info, size_t, void *p) {
  Worker *w = (Worker *)p;
  bool mine = false;
  size_t tls_bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto &h = info->dlpi_phdr[i];
    const uintptr_t lo = info->dlpi_addr + h.p_vaddr, pc = (uintptr_t)w->launch->thunk;
    if (h.p_type == PT_LOAD && pc >= lo && pc < lo + h.p_memsz) mine = true;
    if (h.p_type == PT_TLS) tls_bytes = h.p_memsz;
  }
  if (!mine) return 0;
  w->launch->load_address = info->dlpi_addr;
  w->statics = (char *)info->dlpi_tls_data;
  w->static_bytes = tls_bytes;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto &h = info->dlpi_phdr[i];
    if (h.p_type == PT_LOAD) w->segments.push({info->dlpi_addr + h.p_vaddr, info->dlpi_addr + h.p_vaddr + h.p_memsz});
  }
  return 1;
}
static void *worker_main(void *p) {
  Worker *w = (Worker *)p;
  tls_worker = w;
  Launch *l = w->launch;
  LaunchState *s = w->shared;
  stack_t alternative = {};
  alternative.ss_sp = w->signal_stack, alternative.ss_size = 64 << 10;
  sigaltstack(&alternative, nullptr);
  l->tls_anchor();  // brings this thread's copy of the static shared memory into being
  w->statics = nullptr, w->static_bytes = 0;
  w->segments.count = 0;
  pthread_mutex_lock(&between_launches);  // a child forked meanwhile would inherit the loader's own lock, which is held in it
  dl_iterate_phdr(find_segments, w);
  pthread_mutex_unlock(&between_launches);
  if (l->check) {
    // what earlier launches left is recognised by its epoch
    if (w->dynamic_shadow.count < l->dynamic_bytes / 2 + 1) w->dynamic_shadow.resize(l->dynamic_bytes / 2 + 1);
    if (w->static_shadow.count < w->static_bytes / 2 + 1) w->static_shadow.resize(w->static_bytes / 2 + 1);
    if (w->epoch > 1u << 31) {
      w->dynamic_shadow.reset(w->dynamic_shadow.count);
      w->static_shadow.reset(w->static_shadow.count);
      w->epoch = 0;
    }
  }
  if (sigsetjmp(w->escape, 1) == 0) {
    w->in_fiber = true;
    if (l->cooperative) run_block(w, w->own_block);
    else
      for (;;) {
        const uint32_t b = __atomic_fetch_add(&s->next_block, 1, __ATOMIC_RELAXED);
        if (b >= s->block_count || s->stop) break;
        run_block(w, l->order == DOWN ? s->block_count - 1 - b : b);
      }
  } else w->free_stacks.copy(w->all_stacks);
  w->in_fiber = false, w->current = nullptr;
  pthread_mutex_lock(&s->mutex);
  w->done = 1;
  --s->running;
  ++s->grid_exited;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->mutex);
  alternative.ss_flags = SS_DISABLE;
  sigaltstack(&alternative, nullptr);
  tls_worker = nullptr;
  return nullptr;
}
static List<Worker *> idle_workers;

static void prepare(Worker *w, LaunchState *s, uint32_t i) {
  Launch *l = s->launch;
  const size_t n = (size_t)l->block[0] * l->block[1] * l->block[2];
  w->shared = s, w->launch = l, w->thread_count = (int)n, w->warp_count = (int)((n + 31) / 32);
  w->block_dim = {l->block[0], l->block[1], l->block[2]}, w->grid_dim = {l->grid[0], l->grid[1], l->grid[2]};
  if (w->threads.count < n + 31) w->threads.resize(n + 31);
  if (w->warps.count < (size_t)w->warp_count) w->warps.resize((size_t)w->warp_count);
  if (w->ready.count < n + 1) w->ready.resize(n + 1);
  w->permutation.resize(n);
  for (unsigned u = 0; u < n; ++u) {
    Thread &t = w->threads[u];
    t.index = {u % w->block_dim.x, u / w->block_dim.x % w->block_dim.y, u / (w->block_dim.x * w->block_dim.y)};
    t.linear = (int)u, t.lane = (int)(u & 31), t.warp = &w->warps[u >> 5];
  }
  w->switches = w->collectives = 0, w->done = 0, w->own_block = i, w->last_read = w->last_write = nullptr, w->interrupted = false;
  const size_t align = l->dynamic_align, need = (l->dynamic_bytes + 2 * align + 4095) / 4096 * 4096;
  if (!w->dynamic_map || w->dynamic_capacity < need) {
    if (w->dynamic_map) munmap(w->dynamic_map, w->dynamic_capacity + GUARD_BYTES);
    w->dynamic_map = (char *)mmap(nullptr, need + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    w->dynamic_capacity = need;
    mprotect(w->dynamic_map + need, GUARD_BYTES, PROT_NONE);
  }
  // As close to the guard page as the alignment allows, and aligned to no more than the kernel asked for.
  uintptr_t base = ((uintptr_t)w->dynamic_map + w->dynamic_capacity - l->dynamic_bytes) & ~(uintptr_t)(align - 1);
  if (!(base & align)) base -= align;
  w->dynamic = (char *)base;
}
// Memory between two inaccessible pages, for arrays that a kernel writes without check mode.
PUBLIC void *emu_map_guarded(uint64_t bytes) {
  char *p = (char *)mmap(nullptr, bytes + 2 * GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  mprotect(p, GUARD_BYTES, PROT_NONE);
  mprotect(p + GUARD_BYTES + bytes, GUARD_BYTES, PROT_NONE);
  return p + GUARD_BYTES;
}
PUBLIC void emu_unmap_guarded(void *p, uint64_t bytes) { munmap((char *)p - GUARD_BYTES, bytes + 2 * GUARD_BYTES); }
PUBLIC void emu_start(Launch *l) {
  LaunchState *s = (LaunchState *)calloc(1, sizeof(LaunchState));
  if (!s) abort();
  l->state = s;
  s->launch = l;
  pthread_mutex_init(&s->mutex, nullptr);
  pthread_mutex_init(&s->print_mutex, nullptr);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&s->changed, &attributes);
  s->block_count = l->grid[0] * l->grid[1] * l->grid[2];
  uint32_t n = l->cooperative ? s->block_count : (uint32_t)l->workers;
  if (n > s->block_count) n = s->block_count;
  pthread_mutex_lock(&between_launches);
  take_signals();
  s->deadline = seconds_now() + (l->timeout < 1e9 ? l->timeout : 1e9);
  for (uint32_t i = 0; i < n; ++i) {
    Worker *w;
    if (idle_workers.empty()) {
      w = (Worker *)calloc(1, sizeof(Worker));
      if (!w || !(w->signal_stack = malloc(64 << 10))) abort();
      static int made;
      w->guarded = made++ < GUARDED_WORKERS;
    } else w = idle_workers.pop();
    prepare(w, s, i);
    s->workers.push(w);
  }
  s->running = (int)n;
  for (Worker *w : s->workers)
    if (pthread_create(&w->os_thread, nullptr, worker_main, w)) abort();
  pthread_mutex_unlock(&between_launches);
}
// Wait up to `seconds`; true when the launch has ended. `cancel` stops the kernel as soon as possible.
PUBLIC int emu_wait(Launch *l, double seconds, int cancel) {
  LaunchState *s = (LaunchState *)l->state;
  const double until = seconds_now() + seconds;
  pthread_mutex_lock(&s->mutex);
  if (cancel && !s->stop) {
    s->stop = 1;
    l->fault.kind = F_CANCELLED;
    pthread_cond_broadcast(&s->changed);
  }
  while (s->running) {
    const double now = seconds_now();
    const bool late = now > s->deadline;
    if (now >= until) break;
    if (s->stop || late) {
      if (!s->stop && ++s->pings > 10) {  // never found in kernel code: it keeps synchronising
        s->stop = 1;
        l->fault.kind = F_TIMEOUT;
        snprintf(l->fault.text, sizeof l->fault.text, "no end after %.1f s: its threads keep synchronising", l->timeout);
        pthread_cond_broadcast(&s->changed);
      }
      for (Worker *w : s->workers)
        if (!w->done) pthread_kill(w->os_thread, STOP_SIGNAL);
    }
    double wake = s->stop || late ? now + 0.005 : s->deadline < until ? s->deadline + 0.001 : until;
    timespec t;
    t.tv_sec = (time_t)wake;
    t.tv_nsec = (long)((wake - (double)t.tv_sec) * 1e9);
    pthread_cond_timedwait(&s->changed, &s->mutex, &t);
  }
  const bool ended = !s->running;
  pthread_mutex_unlock(&s->mutex);
  if (!ended) return 0;
  for (Worker *w : s->workers) {
    pthread_join(w->os_thread, nullptr);
    l->switches += w->switches, l->collectives += w->collectives, l->static_bytes = w->static_bytes;
  }
  pthread_mutex_lock(&between_launches);
  for (size_t i = s->workers.count; i-- > 0;) idle_workers.push(s->workers.items[i]);  // the first made is taken first
  give_signals_back();
  pthread_mutex_unlock(&between_launches);
  free(s->workers.items);
  free(s);
  return 1;
}
