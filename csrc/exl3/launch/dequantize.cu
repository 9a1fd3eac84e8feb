// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dequantization of tiles of EXL3_WORDS words.
#include "exl3/kernels/dequantize.cuh"
#include "exl3/launch/dequantize.h"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/words.h"

namespace exl3 {

template <>
void launch_dequantize<EXL3_WORDS>(Codebook codebook, Stream stream,
                                   const DequantizeParams& params) {
  with_codebook<EXL3_WORDS>(codebook, [&](auto constant) {
    LaunchShape shape;
    shape.blocks_x = static_cast<unsigned>(params.n / kBlockColumns);
    shape.blocks_y = static_cast<unsigned>(params.k / kHadamardBlock);
    shape.threads = kBlockThreads;
    shape.shared_bytes = kDequantizeSharedBytes<EXL3_WORDS>;
    launch(&dequantize_kernel<EXL3_WORDS, decltype(constant)::value>, shape, stream,
           params);
  });
}

}  // namespace exl3
