// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/cpu/amx.h"
#include "exl3/cpu/avx2.h"
#include "exl3/cpu/avx512.h"
#include "exl3/cpu/kernel.h"
#include "exl3/cpu/portable.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {

// Below this, decoding is most of the work; above, kAvx512Fp16's short blocks cost more
// than its decoding saves.
[[maybe_unused]] constexpr int64_t kFewRows = 16;

const Kernel& select_kernel(Isa isa, Codebook codebook, int64_t rows, bool exact) {
  const int index = static_cast<int>(codebook);
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) {
    if (exact) return kAvx512Exact[index];
    if (isa == Isa::kAmx && rows >= kFewRows) return kAmx[index];
    if (codebook == Codebook::kMul1) return kAvx512Mul1;
    const bool halves = isa >= Isa::kAvx512Fp16 && rows < kFewRows;
    return halves ? kAvx512Fp16[index] : kAvx512Float[index];
  }
  if (isa == Isa::kAvx2) {
    if (exact) return kAvx2Exact[index];
    return codebook == Codebook::kMul1 ? kAvx2Mul1 : kAvx2Float[index];
  }
#endif
  return kPortable[index];
}

const Rotation& select_rotation(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return kAvx512Rotation;
  if (isa == Isa::kAvx2) return kAvx2Rotation;
#endif
  return kPortableRotation;
}

}  // namespace exl3::cpu
