// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What decoding costs: two kernels that differ in nothing else. Both read a lane's
// words of each tile and multiply; one decodes them before, the other takes them as
// they are. The difference of their instructions is the decoder's. Each comes with few
// tiles and with many, so that what happens once, before the loop, can be left out of
// the count. For test_budgets.py.
#include <type_traits>

#include "exl3/kernels/pipeline.cuh"

using namespace exl3;

template <int kWords, Decoder kDecoder, bool kDecode, int kTiles>
__global__ void decode_probe(float* out, const uint4* in, Hash hash) {
  const uint32_t base = ptx::shared_base();
  const uint4 four = in[threadIdx.x];
  const uint32_t a[4] = {four.x, four.y, four.z, four.w};
  const auto place = LaneBits<kWords>::place(threadIdx.x % 32);
  std::conditional_t<kDecoder == Decoder::kIntegers, int, float> sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint32_t tile = base + i * kWords * 2;
    constexpr bool kWide = is_wide(kDecoder);
    constexpr int kRegisters = kWide ? 8 : 4;
    TileOperands<kWide> weights;
    if constexpr (kDecode) {
      weights = decode_tile<kWords, kDecoder>(tile, place, hash);
    } else {
      constexpr int kLoads = sizeof(place.offsets) / sizeof(place.offsets[0]);
      uint32_t words[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        words[j] = ptx::load_shared<uint32_t>(tile + place.offsets[j]);
      }
#pragma unroll
      for (int j = 0; j < kRegisters; ++j) {
        weights.registers[j] = words[(j ^ j / 2) % kLoads];
      }
    }
    const uint32_t (&b)[kRegisters] = weights.registers;
#pragma unroll
    for (int j = 0; j < kRegisters / 2; ++j) {
      const int half = j / (kRegisters / 4);
      if constexpr (kDecoder == Decoder::kIntegers) {
        ptx::multiply_add_bytes(sums[half], a, b[2 * j], b[2 * j + 1]);
      } else {
        ptx::multiply_add(sums[half], a, b[2 * j], b[2 * j + 1]);
      }
    }
  }
  auto* to = reinterpret_cast<float4*>(out) + 2 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i] = make_float4(static_cast<float>(sums[i][0]), static_cast<float>(sums[i][1]),
                        static_cast<float>(sums[i][2]), static_cast<float>(sums[i][3]));
  }
}

// clang-format off
#define EXL3_PROBE(...) \
  template __global__ void decode_probe<__VA_ARGS__>(float*, const uint4*, Hash);
#define EXL3_PROBES(words, decoder)    \
  EXL3_PROBE(words, decoder, true, 8)  \
  EXL3_PROBE(words, decoder, true, 16) \
  EXL3_PROBE(words, decoder, false, 8) \
  EXL3_PROBE(words, decoder, false, 16)
#define EXL3_WHOLE_RATES(decoder)                                             \
  EXL3_PROBES(16, decoder) EXL3_PROBES(32, decoder) EXL3_PROBES(48, decoder)  \
  EXL3_PROBES(64, decoder) EXL3_PROBES(80, decoder) EXL3_PROBES(96, decoder)  \
  EXL3_PROBES(112, decoder) EXL3_PROBES(128, decoder)

EXL3_WHOLE_RATES(Decoder::kHalves)
EXL3_WHOLE_RATES(Decoder::kUnrounded)
EXL3_WHOLE_RATES(Decoder::kBytes)
EXL3_WHOLE_RATES(Decoder::kIntegers)
EXL3_PROBES(24, Decoder::kBytes)
EXL3_PROBES(40, Decoder::kBytes)
EXL3_PROBES(56, Decoder::kBytes)
EXL3_PROBES(24, Decoder::kIntegers)
EXL3_PROBES(40, Decoder::kIntegers)
EXL3_PROBES(56, Decoder::kIntegers)
