// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// From a codebook, known at run time, to the constant that kernels are compiled for.
#pragma once

#include <stdexcept>
#include <string>

#include "exl3/kernels/trellis.cuh"
#include "exl3/kernels/words.h"

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
