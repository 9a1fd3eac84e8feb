// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/encode/tiers.h"

#include <cstdlib>
#include <cstring>

namespace exl3::encode {
namespace {

Tier choose() {
#if defined(__x86_64__)
  const char* best = std::getenv("EXL3_CPU_ISA");
  const auto allowed = [&](const char* isa) {
    return !best || !std::strcmp(best, isa);
  };
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) {
    return avx512_tier();
  }
  if ((allowed("avx512") || allowed("avx2")) && __builtin_cpu_supports("avx2")) {
    return avx2_tier();
  }
#endif
  return portable_tier();
}

}  // namespace

const Tier& tier() {
  static const Tier chosen = choose();
  return chosen;
}

}  // namespace exl3::encode
