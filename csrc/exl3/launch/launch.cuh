// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// How a kernel is started, on a device or in the emulator.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "exl3/launch/stream.h"
#include "exl3/ptx/ptx.cuh"

namespace exl3 {

struct LaunchShape {
  unsigned blocks_x = 1, blocks_y = 1;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
};

#if defined(EXL3_EMU)

template <class Params>
void launch(void (*kernel)(Params), const LaunchShape& shape, Stream,
            const Params& params) {
  emu::device->launch({{shape.blocks_x, shape.blocks_y},
                       {shape.threads},
                       shape.shared_bytes,
                       /*programmatic=*/true},
                      [&] { kernel(params); });
}

#else

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Before 9.0 there is nothing to overlap, and a driver may refuse to be asked.
inline bool launches_overlap() {
  int device = 0;
  int major = 0;
  check(cudaGetDevice(&device), "exl3: no GPU");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "exl3: the GPU does not say what it can");
  return major >= 9;
}

// The kernel may begin while the launch before it ends: each waits by itself before it
// touches what that one wrote (ptx/grid.cuh).
template <class Params>
void launch(void (*kernel)(Params), const LaunchShape& shape, Stream stream,
            const Params& params) {
  constexpr unsigned kWithoutOptIn = 48 * 1024;
  if (shape.shared_bytes > kWithoutOptIn) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "exl3: this GPU's blocks have too little shared memory");
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks_x, shape.blocks_y);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = launches_overlap() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params), "exl3: a kernel did not start");
}

#endif

}  // namespace exl3
