// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What kernels are compiled for: every number of int16 words that a tile can have (the
// build compiles a .cu once with each EXL3_WORDS), and every number of rows of a block.
#pragma once

#include <stdexcept>
#include <string>

#include "exl3/kernels/trellis.cuh"

// A build may name fewer: the emulator's mutants need one of each.
// clang-format off
#if !defined(EXL3_FOR_EACH_WORDS)
#define EXL3_FOR_EACH_WORDS(apply)                              \
  apply(16) apply(24) apply(32) apply(40) apply(48) apply(56)   \
  apply(64) apply(80) apply(96) apply(112) apply(128)
#endif
#if !defined(EXL3_FOR_EACH_BLOCK_ROWS)
#define EXL3_FOR_EACH_BLOCK_ROWS(apply) \
  apply(16) apply(32) apply(48) apply(64) apply(128)
#endif
// clang-format on

namespace exl3 {

// Calls with_codebook(integral constant) for the codebook; half rates are mul1's only.
template <int kWords, class Call>
void with_codebook(Codebook codebook, Call call) {
  if constexpr (kWords % 16 == 0) {
    if (codebook == Codebook::k3Inst) {
      return call(std::integral_constant<Codebook, Codebook::k3Inst>{});
    }
    if (codebook == Codebook::kMcg) {
      return call(std::integral_constant<Codebook, Codebook::kMcg>{});
    }
  }
  if (codebook == Codebook::kMul1) {
    return call(std::integral_constant<Codebook, Codebook::kMul1>{});
  }
  throw std::runtime_error("exl3: tiles of " + std::to_string(kWords) +
                           " words with codebook " +
                           std::to_string(static_cast<int>(codebook)) + " don't exist");
}

// The same with the codebook's decoder: 3inst and mcg share one.
template <int kWords, class Call>
void with_decoder(Codebook codebook, Call call) {
  with_codebook<kWords>(codebook, [&](auto constant) {
    call(std::integral_constant<Decoder, decoder_of(decltype(constant)::value)>{});
  });
}

}  // namespace exl3
