// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// A fiber: a stack of its own, entered and left by a switch. One CUDA thread each.
#pragma once

#include <cstddef>

// EMU_UCONTEXT asks for what other processors use.
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_SWITCH_IN_ASSEMBLY
#else
#include <ucontext.h>
#endif

namespace emu {

class Fiber {
 public:
  // Prepares the fiber to run entry() on stack[0, bytes) when it is first switched to.
  // entry must never return; its last act is a switch to another fiber.
  void prepare(char* stack, size_t bytes, void (*entry)());

  // Saves the running fiber in `from` and goes on in `to`.
  static void switch_to(Fiber& from, Fiber& to);

 private:
#if defined(EMU_SWITCH_IN_ASSEMBLY)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};  // slower (a system call a switch), but runs anywhere
#endif
};

}  // namespace emu
