// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/cpu/isa.h"

#include "exl3/cpu/amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace exl3::cpu {
namespace {

#if defined(__x86_64__)
// GCC 12 has no name for this one in __builtin_cpu_supports.
bool has_avx512fp16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);
}

Isa machine_isa() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni")) {
    if (!has_avx512fp16()) return Isa::kAvx512;
    return has_amx() ? Isa::kAmx : Isa::kAvx512Fp16;
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
  if (name == nullptr || std::strcmp(name, "amx") == 0) return Isa::kAmx;
  if (std::strcmp(name, "avx512fp16") == 0) return Isa::kAvx512Fp16;
  if (std::strcmp(name, "avx512") == 0) return Isa::kAvx512;
  return std::strcmp(name, "avx2") == 0 ? Isa::kAvx2 : Isa::kPortable;
}

}  // namespace

Isa usable_isa() {
  static const Isa machine = machine_isa();
  return std::min(machine, allowed_isa());
}

}  // namespace exl3::cpu
