// Fibers, barriers and warp collectives of one block.
#pragma once
#include "faults.h"
#include <stdlib.h>
#include <sys/mman.h>

static inline void make_ready(Worker *w, Thread *t) {
  t->state = READY;
  w->ready[w->ready_tail] = t;
  if (++w->ready_tail == w->ready.count) w->ready_tail = 0;
}
static inline bool nothing_ready(Worker *w) { return w->ready_head == w->ready_tail; }
static inline Thread *take_ready(Worker *w) {
  Thread *t = w->ready[w->ready_head];
  if (++w->ready_head == w->ready.count) w->ready_head = 0;
  return t;
}
static inline uint64_t next_random(Worker *w) {
  uint64_t x = w->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return w->random = x;
}
static char *take_stack(Worker *w) {
  if (!w->free_stacks.empty()) return w->free_stacks.pop();
  if (w->pool_used == w->pool_size) {
    w->pool_size = 1024, w->pool_used = 0;
    void *p = mmap(nullptr, w->pool_size * (STACK_BYTES + GUARD_BYTES), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      w->pool_size = 0;
      fail(F_RESOURCE, nullptr, 0, "no memory for the stacks of the emulated threads");
    }
    w->pool = (char *)p;
    w->pools.push((uintptr_t)p);
  }
  char *s = w->pool + w->pool_used++ * (STACK_BYTES + GUARD_BYTES);
  if (w->guarded) mprotect(s, GUARD_BYTES, PROT_NONE);
  w->all_stacks.push(s + GUARD_BYTES);
  return s + GUARD_BYTES;
}
static Thread *start_thread(Worker *w) {
  Thread *t = &w->threads[(size_t)w->permutation[w->started++]];
  t->state = READY;
  t->copy_group = 0;
  t->copies.count = 0;
  t->what = t->file = nullptr;
  return t;
}
static void fiber_main();

// Switch to whatever runs next; `from` receives the present context. With nothing runnable the block's main loop decides
// whether the block is finished, at a grid barrier, or stuck.
static void dispatch(Worker *w, Context *from) {
  if (__builtin_expect(w->shared->stop, 0)) leave(w);
  ++w->switches;
  if (!nothing_ready(w)) {
    Thread *t = take_ready(w);
    w->current = t;
    if (from != &t->context) context_switch(from, &t->context);
    return;
  }
  if (w->started < w->thread_count) {
    char *s = take_stack(w);
    Thread *t = start_thread(w);
    t->stack = s;
    context_make(&t->context, s, STACK_BYTES, fiber_main);
    w->current = t;
    context_switch(from, &t->context);
    return;
  }
  context_switch(from, &w->main);
}

static void release_barrier(Worker *w, Barrier &b) {
  using namespace emu;
  const int result = b.mode == B_PLAIN ? 0 : b.mode == B_COUNT ? b.sum : b.mode == B_AND ? b.sum == b.arrived : b.sum != 0;
  Thread *t = b.head;
  b.head = nullptr, b.arrived = 0, b.sum = 0;
  ++w->epoch;
  Thread *in_order = nullptr;  // of arrival; the list is last in, first out
  while (t) {
    Thread *n = t->next;
    t->next = in_order, in_order = t, t = n;
  }
  t = in_order;
  const size_t first = w->ready_tail;
  size_t n = 0;
  for (; t; t = t->next, ++n) {
    t->barrier_result = result;
    make_ready(w, t);
  }
  if (w->launch->order == RANDOM) {
    const size_t size = w->ready.count;
    for (size_t i = n; i > 1; --i) {
      const size_t j = next_random(w) % i, a = (first + i - 1) % size, c = (first + j) % size;
      Thread *x = w->ready[a];
      w->ready[a] = w->ready[c], w->ready[c] = x;
    }
  }
}
static void wake_lanes(Worker *w, Warp *warp, uint32_t lanes) {
  if (w->launch->order == DOWN)
    for (; lanes; lanes &= ~(1u << (31 - __builtin_clz(lanes)))) make_ready(w, warp->threads + (31 - __builtin_clz(lanes)));
  else if (w->launch->order == UP)
    for (; lanes; lanes &= lanes - 1) make_ready(w, warp->threads + __builtin_ctz(lanes));
  else {
    const int turn = (int)(next_random(w) & 31);
    uint32_t rotated = turn ? lanes >> turn | lanes << (32 - turn) : lanes;
    for (; rotated; rotated &= rotated - 1) make_ready(w, warp->threads + ((__builtin_ctz(rotated) + turn) & 31));
  }
}
static void exit_thread(Worker *w, Thread *t) {
  t->state = DONE;
  --w->live;
  Warp *warp = t->warp;
  warp->live &= ~(1u << t->lane);
  // A thread that has exited counts as arrived everywhere.
  if (w->barriers[0].arrived && w->barriers[0].arrived == w->live) release_barrier(w, w->barriers[0]);
  for (int i = 0; i < warp->waiting; ++i) {
    Collective g = warp->group[i];
    if (g.arrived != (g.mask & warp->live)) continue;
    if (g.op) g.op(w, warp, g.arrived);
    else ++warp->epoch;
    warp->group[i--] = warp->group[--warp->waiting];
    wake_lanes(w, warp, g.arrived);
  }
}
static void fiber_main() {
  Worker *w = tls_worker;
  for (;;) {
    w->launch->thunk(w->launch->args);
    Thread *t = w->current;
    char *stack = t->stack;
    finish_copies(w, t, -1);
    exit_thread(w, t);
    if (nothing_ready(w) && w->started < w->thread_count) {  // kernels without barriers become a plain loop
      if (w->shared->stop) leave(w);
      Thread *u = start_thread(w);
      u->stack = stack;
      w->current = u;
      continue;
    }
    w->free_stacks.push(stack);
    Context unused;
    dispatch(w, &unused);
  }
}

PUBLIC uint3 emu_thread_idx() { return tls_worker->current->index; }
PUBLIC uint3 emu_block_idx() { return tls_worker->block_index; }
PUBLIC uint3 emu_block_dim() { return tls_worker->block_dim; }
PUBLIC uint3 emu_grid_dim() { return tls_worker->grid_dim; }
PUBLIC int emu_lane() { return tls_worker->current->lane; }
PUBLIC void *emu_dynamic_shared() { return tls_worker->dynamic; }
PUBLIC unsigned emu_dynamic_shared_size() { return (unsigned)tls_worker->launch->dynamic_bytes; }
PUBLIC uint32_t emu_active_mask() { return tls_worker->current->warp->live; }
PUBLIC void emu_yield() {
  Worker *w = tls_worker;
  Thread *t = w->current;
  make_ready(w, t);
  dispatch(w, &t->context);
}
// Two places in one file usually share the string, but the compiler need not merge them.
static inline bool different(const char *a, const char *b) { return a != b && strcmp(a, b); }
PUBLIC int emu_barrier(int id, int count, int mode, int pred, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  Barrier &b = w->barriers[id];
  if (b.arrived == 0) b.file = file, b.line = line, b.mode = mode;
  else if (b.line != line || different(b.file, file))
    fail(F_BARRIER, file, line, "threads of one block wait at different barriers: %d at %s:%d, this one at %s:%d", b.arrived, b.file, b.line, file, line);
  ++b.arrived;
  b.sum += pred;
  t->next = b.head;
  b.head = t;
  if (b.arrived == (count ? count : w->live)) release_barrier(w, b);
  else t->state = AT_BARRIER, t->what = "__syncthreads", t->file = file, t->line = line;
  dispatch(w, &t->context);
  return t->barrier_result;
}

// The one mechanism behind every warp operation: lanes have posted their operands in the Warp; the last to arrive does the
// work for all of them and runs on, the others become ready.
static void collective(Worker *w, Thread *t, uint32_t mask, WarpOp op, const char *what, const char *file, int line) {
  Warp *warp = t->warp;
  if (!(mask >> t->lane & 1)) fail(F_MASK, file, line, "%s with mask 0x%08x, which does not contain the calling lane %d", what, mask, t->lane);
  Collective *g = nullptr;
  for (int i = 0; i < warp->waiting; ++i) {
    if (warp->group[i].mask == mask) {
      g = &warp->group[i];
      break;
    }
  }
  if (!g) {
    if (warp->waiting == 16) fail(F_MASK, file, line, "%s: more than 16 divergent warp operations at once", what);
    g = &warp->group[warp->waiting++];
    *g = {mask, 0, op, what, file, line};
  } else if (g->op != op || g->line != line || different(g->what, what) || different(g->file, file))
    fail(F_MASK, file, line, "lanes of one warp meet in different operations: %s at %s:%d waits, lane %d arrives in %s", g->what, g->file, g->line, t->lane, what);
  g->arrived |= 1u << t->lane;
  if (g->arrived != (mask & warp->live)) {
    t->state = AT_WARP, t->what = what, t->file = file, t->line = line;
    dispatch(w, &t->context);
    return;
  }
  ++w->collectives;
  const uint32_t lanes = g->arrived;
  *g = warp->group[--warp->waiting];
  if (op) op(w, warp, lanes);
  else ++warp->epoch;
  wake_lanes(w, warp, lanes & ~(1u << t->lane));
}
#define FOR_LANES(l, lanes) for (uint32_t m_ = lanes, l = 0; m_ && (l = (uint32_t)__builtin_ctz(m_), true); m_ &= m_ - 1)

static void op_shuffle(Worker *w, Warp *warp, uint32_t lanes) {
  uint64_t in[32];
  memcpy(in, warp->value, sizeof in);
  FOR_LANES(l, lanes) {
    const int s = warp->source[l] & 31;
    if (!(lanes >> s & 1)) {
      Thread *t = w->current = warp->threads + l;
      fail(F_MASK, t->file, t->line, "lane %d shuffles from lane %d, which does not take part", (int)l, s);
    }
    warp->value[l] = in[s];
  }
}
PUBLIC uint64_t emu_shuffle(uint32_t mask, uint64_t value, int source, const char *what, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  Warp *warp = t->warp;
  warp->value[t->lane] = value;
  warp->source[t->lane] = source;
  t->file = file, t->line = line;
  collective(w, t, mask, op_shuffle, what, file, line);
  return warp->value[t->lane];
}
static void op_vote(Worker *, Warp *warp, uint32_t lanes) {
  uint32_t ballot = 0;
  FOR_LANES(l, lanes) ballot |= (uint32_t)(warp->value[l] != 0) << l;
  FOR_LANES(l, lanes) warp->value[l] = ballot;
}
PUBLIC uint32_t emu_vote(uint32_t mask, int pred, const char *what, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  t->warp->value[t->lane] = (uint64_t)(pred != 0);
  collective(w, t, mask, op_vote, what, file, line);
  return (uint32_t)t->warp->value[t->lane];
}
static void op_match(Worker *, Warp *warp, uint32_t lanes) {
  uint64_t in[32];
  memcpy(in, warp->value, sizeof in);
  FOR_LANES(l, lanes) {
    uint32_t same = 0;
    FOR_LANES(k, lanes) same |= (uint32_t)(in[k] == in[l]) << k;
    warp->value[l] = same;
  }
}
PUBLIC uint64_t emu_match(uint32_t mask, uint64_t value, int all, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  t->warp->value[t->lane] = value;
  const uint32_t taking_part = mask & t->warp->live;
  collective(w, t, mask, op_match, all ? "__match_all_sync" : "__match_any_sync", file, line);
  const uint32_t same = (uint32_t)t->warp->value[t->lane];
  return all && same != taking_part ? 0 : same;
}
template <class F> static void reduce_lanes(Warp *warp, uint32_t lanes, F f) {
  uint32_t r = 0;
  bool first = true;
  FOR_LANES(l, lanes) {
    const uint32_t x = (uint32_t)warp->value[l];
    r = first ? x : f(r, x);
    first = false;
  }
  FOR_LANES(l, lanes) warp->value[l] = r;
}
static void op_reduce(Worker *, Warp *warp, uint32_t lanes) {
  using namespace emu;
  switch (warp->source[__builtin_ctz(lanes)]) {
    case R_ADD: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a + b; });
    case R_MIN: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return (int)a < (int)b ? a : b; });
    case R_MAX: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return (int)a > (int)b ? a : b; });
    case R_UMIN: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
    case R_UMAX: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    case R_AND: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a & b; });
    case R_OR: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a | b; });
    default: return reduce_lanes(warp, lanes, [](uint32_t a, uint32_t b) { return a ^ b; });
  }
}
PUBLIC uint32_t emu_reduce(uint32_t mask, int op, uint32_t value, const char *what, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  t->warp->value[t->lane] = value;
  t->warp->source[t->lane] = op;
  collective(w, t, mask, op_reduce, what, file, line);
  return (uint32_t)t->warp->value[t->lane];
}
PUBLIC void emu_warp_barrier(uint32_t mask, const char *file, int line) {
  Worker *w = tls_worker;
  collective(w, w->current, mask, nullptr, "__syncwarp", file, line);
}
PUBLIC void emu_grid_barrier(const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  if (!w->launch->cooperative) fail(F_BARRIER, file, line, "grid barrier in a launch that is not cooperative");
  t->state = AT_GRID, t->what = "the grid barrier", t->file = file, t->line = line;
  dispatch(w, &t->context);
}
