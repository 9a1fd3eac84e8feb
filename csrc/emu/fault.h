// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the emulator finds wrong, and where.
#pragma once

#include <stdexcept>
#include <string>

namespace emu {

// A place in the kernel's source. `Here here = Here::at()` as a function's last
// parameter is the caller's place.
struct Here {
  const char* file = "";
  int line = 0;

  static constexpr Here at(const char* file = __builtin_FILE(),
                           int line = __builtin_LINE()) {
    return {file, line};
  }
};

bool operator==(Here a, Here b);

// "gemm.cuh:120": the file without its folders.
std::string to_string(Here here);

// Why a launch was stopped. The text begins with the fault's name, so that a test can
// ask for one: out-of-bounds, misaligned, read-only, uninitialized, race, in-flight,
// unordered, divergence, deadlock, stack-overflow, launch.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Stops the launch from inside a kernel: adds block, thread and place to the message.
// Does not unwind the kernel's frames, so a kernel must own nothing.
[[noreturn]] void fail(const std::string& message, Here here);

}  // namespace emu
