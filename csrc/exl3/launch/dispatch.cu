// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// From a number of words, known at run time, to the kernels compiled for it.
#include "exl3/launch/dequantize.h"
#include "exl3/launch/gemm.h"
#include "exl3/launch/words.h"

namespace exl3 {

#define EXL3_DECLARE(words)                                                         \
  template <>                                                                       \
  void launch_gemm<words>(Codebook codebook, const LinearPlan& plan, Stream stream, \
                          const GemmParams& params);                                \
  template <>                                                                       \
  void launch_dequantize<words>(Codebook codebook, Stream stream,                   \
                                const DequantizeParams& params);
EXL3_FOR_EACH_WORDS(EXL3_DECLARE)

namespace {

[[noreturn]] void refuse(int words) {
  throw std::runtime_error("exl3: no kernel reads tiles of " + std::to_string(words) +
                           " words");
}

}  // namespace

void launch_gemm(int words, Codebook codebook, const LinearPlan& plan, Stream stream,
                 const GemmParams& params) {
  switch (words) {
#define EXL3_CASE(words) \
  case words:            \
    return launch_gemm<words>(codebook, plan, stream, params);
    EXL3_FOR_EACH_WORDS(EXL3_CASE)
#undef EXL3_CASE
    default:
      refuse(words);
  }
}

void launch_dequantize(int words, Codebook codebook, Stream stream,
                       const DequantizeParams& params) {
  switch (words) {
#define EXL3_CASE(words) \
  case words:            \
    return launch_dequantize<words>(codebook, stream, params);
    EXL3_FOR_EACH_WORDS(EXL3_CASE)
#undef EXL3_CASE
    default:
      refuse(words);
  }
}

}  // namespace exl3
