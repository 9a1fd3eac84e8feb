// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dense product for tiles of EXL3_WORDS words: the build compiles this file once
// for each number of words that the format has.
#include "exl3/launch/gemm.h"

namespace exl3 {
namespace {

constexpr int kWords = EXL3_WORDS;

template <int kRows, Codebook kCodebook>
void launch_one(int splits, Stream stream, const GemmParams& params) {
  LaunchShape shape;
  shape.blocks_x = static_cast<unsigned>(params.row_blocks * params.column_blocks);
  shape.blocks_y = static_cast<unsigned>(splits);
  shape.threads = kBlockThreads;
  shape.shared_bytes = kGemmSharedBytes<kRows, kWords>;
  launch(&gemm_kernel<kRows, kWords, kCodebook>, shape, stream, params);
}

template <Codebook kCodebook>
void launch_rows(int block_rows, int splits, Stream stream, const GemmParams& params) {
  switch (block_rows) {
    case 16:
      return launch_one<16, kCodebook>(splits, stream, params);
    case 32:
      return launch_one<32, kCodebook>(splits, stream, params);
    case 48:
      return launch_one<48, kCodebook>(splits, stream, params);
    case 64:
      return launch_one<64, kCodebook>(splits, stream, params);
    case 128:
      return launch_one<128, kCodebook>(splits, stream, params);
    default:
      throw std::runtime_error("exl3: no kernel has blocks of " +
                               std::to_string(block_rows) + " rows");
  }
}

}  // namespace

template <>
void launch_gemm<kWords>(Codebook codebook, int block_rows, int splits, Stream stream,
                         const GemmParams& params) {
  if constexpr (kWords % 16 != 0) {  // half rates are mul1's only
    return launch_rows<Codebook::kMul1>(block_rows, splits, stream, params);
  } else {
    switch (codebook) {
      case Codebook::k3Inst:
        return launch_rows<Codebook::k3Inst>(block_rows, splits, stream, params);
      case Codebook::kMcg:
        return launch_rows<Codebook::kMcg>(block_rows, splits, stream, params);
      case Codebook::kMul1:
        return launch_rows<Codebook::kMul1>(block_rows, splits, stream, params);
    }
  }
}

}  // namespace exl3
