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
#include <stdexcept>
#include <string>
#include <utility>

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

constexpr std::pair<const char*, Isa> kNames[] = {
    {"portable", Isa::kPortable},     {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512},
    {"avx512fp16", Isa::kAvx512Fp16}, {"amx", Isa::kAmx},
};

Isa allowed_isa() {
  const char* given = std::getenv("EXL3_CPU_ISA");
  if (given == nullptr) return Isa::kAmx;
  for (const auto& [name, isa] : kNames) {
    if (std::strcmp(given, name) == 0) return isa;
  }
  throw std::invalid_argument(std::string("EXL3_CPU_ISA is '") + given +
                              "'; it can be portable, avx2, avx512, avx512fp16 or amx");
}

}  // namespace

Isa usable_isa() {
  static const Isa machine = machine_isa();
  return std::min(machine, allowed_isa());
}

}  // namespace exl3::cpu
