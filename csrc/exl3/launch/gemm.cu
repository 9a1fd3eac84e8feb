// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dense product of tiles of EXL3_WORDS words.
#include "exl3/kernels/gemm.cuh"
#include "exl3/launch/gemm.h"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/words.h"

namespace exl3 {
namespace {

template <int kRows, Decoder kDecoder>
void launch_rows(LaunchShape shape, Stream stream, const GemmParams& params) {
  shape.shared_bytes = kGemmSharedBytes<kRows, EXL3_WORDS, copies_of(kDecoder)>;
  launch(&gemm_kernel<kRows, EXL3_WORDS, kDecoder>, shape, stream, params);
}

[[noreturn]] void refuse(const LinearPlan& plan) {
  throw std::runtime_error("exl3: no kernel has blocks of " +
                           std::to_string(plan.block_rows) + " rows" +
                           (plan.unrounded ? " with unrounded weights" : ""));
}

}  // namespace

template <>
void launch_gemm<EXL3_WORDS>(Codebook codebook, const LinearPlan& plan, Stream stream,
                             const GemmParams& params) {
  GemmParams with_hash = params;
  with_hash.hash = hash_of(codebook);
  LaunchShape shape;
  shape.blocks_x = static_cast<unsigned>(params.row_blocks * params.column_blocks);
  shape.blocks_y = static_cast<unsigned>(plan.splits);
  shape.threads = kBlockThreads;
  with_decoder<EXL3_WORDS>(codebook, [&](auto constant) {
    constexpr Decoder kDecoder = decltype(constant)::value;
    if (plan.unrounded) {
      // For few rows only: the tensor core does twice the work.
      if (plan.block_rows != kUnroundedRows) refuse(plan);
      return launch_rows<kUnroundedRows, unrounded(kDecoder)>(shape, stream, with_hash);
    }
    switch (plan.block_rows) {
#define EXL3_CASE(rows) \
  case rows:            \
    return launch_rows<rows, kDecoder>(shape, stream, with_hash);
      EXL3_FOR_EACH_BLOCK_ROWS(EXL3_CASE)
#undef EXL3_CASE
      default:
        refuse(plan);
    }
  });
}

}  // namespace exl3
