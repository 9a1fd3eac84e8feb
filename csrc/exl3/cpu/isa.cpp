// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace exl3::cpu {
namespace {

#if defined(__x86_64__)
Isa machine_isa() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return Isa::kAvx2;
  }
  return Isa::kPortable;
}
#else
Isa machine_isa() { return Isa::kPortable; }
#endif

Isa allowed_isa() {
  const char* name = std::getenv("EXL3_CPU_ISA");
  if (name == nullptr || std::strcmp(name, "avx512") == 0) return Isa::kAvx512;
  return std::strcmp(name, "avx2") == 0 ? Isa::kAvx2 : Isa::kPortable;
}

}  // namespace

Isa usable_isa() {
  static const Isa machine = machine_isa();
  return std::min(machine, allowed_isa());
}

}  // namespace exl3::cpu
