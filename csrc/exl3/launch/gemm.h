// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Starts the dense product. gemm.cu is compiled once for each number of words that a
// tile can have.
#pragma once

#include "exl3/kernels/gemm.cuh"
#include "exl3/launch/launch.cuh"

// A build may name fewer: the emulator's mutants need one.
// clang-format off
#if !defined(EXL3_FOR_EACH_WORDS)
#define EXL3_FOR_EACH_WORDS(apply)                              \
  apply(16) apply(24) apply(32) apply(40) apply(48) apply(56)   \
  apply(64) apply(80) apply(96) apply(112) apply(128)
#endif
// clang-format on

namespace exl3 {

// block_rows: 16, 32, 48, 64 or 128.
template <int kWords>
void launch_gemm(Codebook codebook, int block_rows, int splits, Stream stream,
                 const GemmParams& params);

#define EXL3_DECLARE(words)                                              \
  template <>                                                            \
  void launch_gemm<words>(Codebook codebook, int block_rows, int splits, \
                          Stream stream, const GemmParams& params);
EXL3_FOR_EACH_WORDS(EXL3_DECLARE)
#undef EXL3_DECLARE

inline void launch_gemm(int words, Codebook codebook, int block_rows, int splits,
                        Stream stream, const GemmParams& params) {
  switch (words) {
#define EXL3_CASE(words) \
  case words:            \
    return launch_gemm<words>(codebook, block_rows, splits, stream, params);
    EXL3_FOR_EACH_WORDS(EXL3_CASE)
#undef EXL3_CASE
    default:
      throw std::runtime_error("exl3: no kernel reads tiles of " +
                               std::to_string(words) + " words");
  }
}

}  // namespace exl3
