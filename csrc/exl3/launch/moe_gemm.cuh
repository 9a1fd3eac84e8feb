// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Starts the experts' products with blocks of kRows rows; each .cu instantiates one.
#pragma once

#include "exl3/kernels/moe_gemm.cuh"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/moe.h"

namespace exl3 {

inline LaunchShape moe_shape(const MoeParams& params, int columns, int splits,
                             int shared_bytes) {
  LaunchShape shape;
  shape.blocks_x = static_cast<unsigned>(params.slices * params.max_tiles *
                                         (columns / kBlockColumns));
  shape.blocks_y = static_cast<unsigned>(splits);
  shape.threads = kBlockThreads;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes);
  return shape;
}

template <int kRows>
void launch_moe_gate_up(int splits, Stream stream, const MoeParams& params) {
  launch(&moe_gate_up_kernel<kRows>,
         moe_shape(params, params.intermediate, splits, kGateUpBytes<kRows>), stream,
         params);
}

template <int kRows>
void launch_moe_down(int splits, Stream stream, const MoeParams& params) {
  launch(&moe_down_kernel<kRows>,
         moe_shape(params, params.hidden, splits, kDownBytes<kRows>), stream, params);
}

}  // namespace exl3
