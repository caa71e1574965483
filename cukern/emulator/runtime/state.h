// Data of a launch. One OS thread (Worker) runs one block at a time; every CUDA thread of the block is a fiber (Thread).
#pragma once
#include "fiber.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include "list.h"

enum FaultKind {  // mirrored by _native.py
  F_NONE, F_OUT_OF_BOUNDS, F_READ_ONLY, F_SHARED_RACE, F_UNINITIALISED, F_BARRIER, F_DEADLOCK, F_MISALIGNED, F_MASK, F_STACK,
  F_TIMEOUT, F_ARITHMETIC, F_ASSERT, F_RESOURCE, F_CANCELLED
};

// Structures shared with Python (cukern/emulator/_native.py): change both.
struct Range {  // memory that the kernel may use
  uintptr_t lo, hi, base;  // base: of the allocation, which a GPU would align to 256 bytes
  int32_t read_only, argument;  // argument -1: belongs to the emulator
};
struct Fault {
  int32_t kind, line, write, bytes, argument, has_block, has_thread, shared;  // shared: SharedKind of `offset`
  uint32_t block[3], thread[3];
  uint64_t pc, address;
  int64_t offset;
  char file[256], text[1024];
};
enum SharedKind { NOT_SHARED, DYNAMIC_SHARED, STATIC_SHARED };
struct Launch {
  void (*thunk)(void **);
  void **args;
  void *(*tls_anchor)();
  uint32_t grid[3], block[3];
  uint64_t dynamic_bytes, dynamic_align;
  int32_t cooperative, check, order, workers;
  uint64_t seed;
  double timeout;
  const Range *ranges;
  int32_t range_count, guard_count;
  const uint32_t *guards;  // offsets of the compiler's own variables in static shared memory
  Fault fault;
  char *print_buffer;  // printf output, delivered after the launch
  uint64_t print_capacity, print_used, print_lost;
  uint64_t switches, collectives, static_bytes, load_address;
  void *state;
};

enum ThreadState : uint8_t { READY, AT_BARRIER, AT_WARP, AT_GRID, DONE };
enum Order { UP, DOWN, RANDOM };

struct CopyInFlight {  // cp.async
  void *dst;
  const void *src;
  int bytes, src_bytes;
  unsigned group;
  const char *file;
  int line;
};

struct Warp;
struct Thread {
  uint3 index;
  int linear, lane;
  ThreadState state;
  Warp *warp;
  char *stack;
  Context context;
  const char *what, *file;  // where it waits
  int line, barrier_result;
  unsigned copy_group;
  List<CopyInFlight> copies;
  Thread *next;
};

struct Worker;
typedef void (*WarpOp)(Worker *, Warp *, uint32_t lanes);
struct Collective {  // lanes that wait for each other in one warp operation
  uint32_t mask, arrived;
  WarpOp op;
  const char *what, *file;
  int line;
};
struct Warp {
  uint32_t live;
  int waiting;  // collectives in progress
  Collective group[16];
  uint32_t epoch;  // counts __syncwarp, for the race check
  Thread *threads;
  // operands and results of collectives, by lane
  uint64_t value[32];
  int source[32];
  uint32_t word[10][32];
};

struct Barrier {
  int arrived, mode, sum;
  Thread *head;
  const char *file;
  int line;
};

struct Shadow {  // history of two bytes of shared memory (check mode)
  uint32_t write_epoch, read_epoch;
  uint16_t write_warp_epoch, read_warp_epoch;
  uint16_t writer, reader;  // thread number and flags, see memory_check.cpp
};

struct LaunchState {
  Launch *launch;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  uint32_t next_block, block_count;
  int running;
  volatile int stop;
  unsigned grid_waiting, grid_generation, grid_exited;
  double deadline;
  int pings;
  List<Worker *> workers;
  pthread_mutex_t print_mutex;
};

struct Segment {
  uintptr_t lo, hi;
};
struct Worker {
  LaunchState *shared;
  Launch *launch;
  pthread_t os_thread;
  Thread *current;
  Context main;
  uint3 block_index, block_dim, grid_dim;
  int thread_count, live, started, warp_count;
  List<Thread> threads;
  List<Warp> warps;
  Barrier barriers[16];
  List<Thread *> ready;  // ring buffer
  size_t ready_head, ready_tail;
  List<int> permutation;
  uint64_t random;

  List<char *> free_stacks, all_stacks;
  List<uintptr_t> pools;
  char *pool;
  size_t pool_size, pool_used;

  char *dynamic_map, *dynamic;  // dynamic shared memory ends at a guard page
  size_t dynamic_capacity;
  char *statics;  // the kernel's thread-local segment
  size_t static_bytes;
  List<Shadow> dynamic_shadow, static_shadow;
  uint32_t epoch, block_epoch;  // epoch counts barriers; block_epoch is its value at the start of the block
  const Range *last_read, *last_write;  // the ranges that accesses fell into most recently
  List<Segment> segments;  // of the kernel's shared object

  uint64_t switches, collectives;
  sigjmp_buf escape;
  volatile bool in_fiber, interrupted;
  void *signal_stack;
  int done;
  bool guarded;  // its stacks end at a guard page
  uint32_t own_block;  // cooperative launch: one worker per block
};

static const size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4096;
// Every guard page makes two mappings, of which a process may have some 65,000. The workers made first, which every launch
// takes first, have one below each of up to 1,024 stacks; those that only a large cooperative launch needs do without.
static const int GUARDED_WORKERS = 16;
static __thread Worker *tls_worker __attribute__((tls_model("initial-exec")));
#define PUBLIC extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

[[noreturn]] static void fail(FaultKind kind, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
[[noreturn]] static void fail_at(FaultKind kind, void *pc, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void check_access(const void *p, size_t bytes, int write, void *pc, const char *file, int line);
static void begin_copy(Worker *w, const CopyInFlight &c, void *pc);
static void finish_copies(Worker *w, Thread *t, int pending);
