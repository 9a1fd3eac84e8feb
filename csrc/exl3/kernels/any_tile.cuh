// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The main loop for tiles of a kind that is known when the block runs: experts of one
// layer may differ in bits and codebook. All threads of a block take the same case, so
// a mixed layer costs nothing but the kernel's size.
#pragma once

#include "exl3/kernels/pipeline.cuh"
#include "exl3/kernels/words.h"

namespace exl3 {

// Shared memory of the largest stage.
template <int kRows>
constexpr int any_tile_bytes() {
  int most = 0;
#define EXL3_CASE(words) \
  most = Pipeline<kRows, words>::kBytes > most ? Pipeline<kRows, words>::kBytes : most;
  EXL3_FOR_EACH_WORDS(EXL3_CASE)
#undef EXL3_CASE
  return most;
}

// Half rates are mul1's only.
template <int kRows, int kWords>
__device__ __forceinline__ void multiply(uint32_t base, const Operands& from,
                                         Decoder decoder, Accumulators<kRows>& sums) {
  if constexpr (kWords % 16 == 0) {
    if (decoder == Decoder::kHalves) {
      return Pipeline<kRows, kWords>::template run<Decoder::kHalves>(base, from, sums);
    }
  }
  Pipeline<kRows, kWords>::template run<Decoder::kBytes>(base, from, sums);
}

template <int kRows>
__device__ __forceinline__ void multiply_any(uint32_t base, const Operands& from,
                                             int words, Decoder decoder,
                                             Accumulators<kRows>& sums) {
  switch (words) {
#define EXL3_CASE(words) \
  case words:            \
    return multiply<kRows, words>(base, from, decoder, sums);
    EXL3_FOR_EACH_WORDS(EXL3_CASE)
#undef EXL3_CASE
  }
}

}  // namespace exl3
