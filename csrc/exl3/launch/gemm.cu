// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dense product of tiles of EXL3_WORDS words.
#include "exl3/kernels/gemm.cuh"
#include "exl3/launch/gemm.h"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/words.h"

namespace exl3 {

template <>
void launch_gemm<EXL3_WORDS>(Codebook codebook, int block_rows, int splits,
                             Stream stream, const GemmParams& params) {
  GemmParams with_hash = params;
  with_hash.hash = hash_of(codebook);
  with_decoder<EXL3_WORDS>(codebook, [&](auto constant) {
    constexpr Decoder kDecoder = decltype(constant)::value;
    LaunchShape shape;
    shape.blocks_x = static_cast<unsigned>(params.row_blocks * params.column_blocks);
    shape.blocks_y = static_cast<unsigned>(splits);
    shape.threads = kBlockThreads;
    switch (block_rows) {
#define EXL3_CASE(rows)                                      \
  case rows:                                                 \
    shape.shared_bytes = kGemmSharedBytes<rows, EXL3_WORDS>; \
    return launch(&gemm_kernel<rows, EXL3_WORDS, kDecoder>, shape, stream, with_hash);
      EXL3_FOR_EACH_BLOCK_ROWS(EXL3_CASE)
#undef EXL3_CASE
      default:
        throw std::runtime_error("exl3: no kernel has blocks of " +
                                 std::to_string(block_rows) + " rows");
    }
  });
}

}  // namespace exl3
