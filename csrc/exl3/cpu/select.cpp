// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/cpu/amx.h"
#include "exl3/cpu/avx2.h"
#include "exl3/cpu/avx512.h"
#include "exl3/cpu/kernel.h"
#include "exl3/cpu/portable.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {

// Measured: an AMX product takes as long for one row as for 16, and kAvx512Fp16's short
// blocks cost many rows more than they save in decoding.
[[maybe_unused]] constexpr int64_t kAmxRows = 8;
[[maybe_unused]] constexpr int64_t kHalvesRows = 16;

const Kernel& select_kernel(Isa isa, Codebook codebook, [[maybe_unused]] int64_t rows,
                            [[maybe_unused]] bool exact) {
  const int index = static_cast<int>(codebook);
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) {
    if (exact) return kAvx512Exact[index];
    if (isa == Isa::kAmx && rows >= kAmxRows) return kAmx[index];
    if (codebook == Codebook::kMul1) return kAvx512Mul1;
    const bool halves = isa >= Isa::kAvx512Fp16 && rows < kHalvesRows;
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
