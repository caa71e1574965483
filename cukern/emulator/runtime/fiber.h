// Switching between the stacks of emulated threads. By hand on x86-64 and AArch64 (11 ns); ucontext elsewhere.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(EMU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#include <ucontext.h>
struct Context {
  ucontext_t uc;
};
static void context_switch(Context *from, Context *to) { swapcontext(&from->uc, &to->uc); }
static void context_make(Context *c, void *stack, size_t size, void (*entry)()) {
  getcontext(&c->uc);
  c->uc.uc_stack.ss_sp = stack;
  c->uc.uc_stack.ss_size = size;
  c->uc.uc_link = nullptr;
  makecontext(&c->uc, entry, 0);
}
#else
struct Context {
  void *sp;
};
extern "C" void emu_switch_stacks(void **save, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl emu_switch_stacks
.hidden emu_switch_stacks
.type emu_switch_stacks,@function
emu_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch_stacks,.-emu_switch_stacks
)");
static void context_make(Context *c, void *stack, size_t size, void (*entry)()) {
  void **p = (void **)(((uintptr_t)stack + size) & ~(uintptr_t)15);
  *--p = nullptr;  // keeps rsp % 16 == 8 at entry, as after a call
  *--p = (void *)entry;
  p -= 6;
  memset(p, 0, 48);
  c->sp = p;
}
#else
asm(R"(
.text
.p2align 4
.globl emu_switch_stacks
.hidden emu_switch_stacks
.type emu_switch_stacks,%function
emu_switch_stacks:
  sub sp,sp,#160
  stp x19,x20,[sp]
  stp x21,x22,[sp,#16]
  stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]
  stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x9,sp
  str x9,[x0]
  mov sp,x1
  ldp x19,x20,[sp]
  ldp x21,x22,[sp,#16]
  ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]
  ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
.size emu_switch_stacks,.-emu_switch_stacks
)");
static void context_make(Context *c, void *stack, size_t size, void (*entry)()) {
  uint64_t *p = (uint64_t *)(((uintptr_t)stack + size) & ~(uintptr_t)15) - 20;
  memset(p, 0, 160);
  p[11] = (uint64_t)entry;  // x30
  c->sp = p;
}
#endif
static inline void context_switch(Context *from, Context *to) { emu_switch_stacks(&from->sp, to->sp); }
#endif
