// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The switch of fibers: callee-saved registers and the stack pointer, nothing else.
#include "emu/fiber.h"

#include <cstdint>

#if defined(EMU_SWITCH_IN_ASSEMBLY)

extern "C" void emu_fiber_switch(void** save, void* load);

asm(R"(
.text
.globl emu_fiber_switch
.type emu_fiber_switch, @function
emu_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_fiber_switch, .-emu_fiber_switch
)");

namespace emu {

void Fiber::prepare(char* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
  auto* slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;                         // entry's return address: it has none
  *--slot = reinterpret_cast<void*>(entry);  // what the first switch returns to
  for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
  stack_pointer_ = slot;
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  emu_fiber_switch(&from.stack_pointer_, to.stack_pointer_);
}

}  // namespace emu

#else

namespace emu {

void Fiber::prepare(char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  swapcontext(&from.context_, &to.context_);
}

}  // namespace emu

#endif
