// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/encode/tiers.h"

#include "exl3/cpu/isa.h"

namespace exl3::encode {

Tier usable_tier() {
#if defined(__x86_64__)
  // Better instruction sets include these; the search has no use for what they add.
  const cpu::Isa isa = cpu::usable_isa();
  if (isa >= cpu::Isa::kAvx512) return avx512_tier();
  if (isa >= cpu::Isa::kAvx2) return avx2_tier();
#endif
  return portable_tier();
}

}  // namespace exl3::encode
