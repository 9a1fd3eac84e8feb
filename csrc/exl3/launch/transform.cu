// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// One launch, a warp for each piece of a row.
#include "exl3/kernels/quantize.cuh"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/transform.h"

namespace exl3 {

void launch_transform(Stream stream, const TransformParams& params) {
  const int64_t pieces =
      int64_t{params.num_slabs} * params.rows * (params.k / kHadamardBlock);
  LaunchShape shape;
  shape.blocks_x = static_cast<unsigned>((pieces + kBlockWarps - 1) / kBlockWarps);
  shape.threads = kBlockThreads;
  launch(&transform_kernel, shape, stream, params);
}

void launch_quantize(Stream stream, const QuantizeParams& params) {
  LaunchShape shape;
  shape.blocks_x =
      static_cast<unsigned>(params.transform.num_slabs * params.transform.rows);
  shape.threads = kBlockThreads;
  shape.shared_bytes = kQuantizeSharedBytes;
  launch(&quantize_kernel, shape, stream, params);
}

}  // namespace exl3
