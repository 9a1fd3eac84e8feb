// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The names of CUDA C++ that kernels use, with the emulator's meaning.
#pragma once

#include <cstdint>

#include "emu/collective.h"
#include "emu/device.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define threadIdx (::emu::current->index)
#define blockIdx (::emu::current->block->index)
#define blockDim (::emu::device->block)
#define gridDim (::emu::device->grid)

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads(emu::Here here = emu::Here::at()) {
  emu::device->barrier(here);
}

inline void __syncwarp(emu::Here here = emu::Here::at()) {
  int nothing = 0;
  emu::collective("__syncwarp", nothing, here,
                  [](int* const*) { ++emu::current->warp->epoch; });
}

inline void __threadfence() { emu::device->memory.fence(*emu::current); }

// Before an atomic any other thread may run; the atomic itself is one step.
template <class Value, class Update>
Value emu_atomic(Value* address, emu::Here here, Update update) {
  emu::device->yield();
  emu::device->memory.atomic(*emu::current, address, sizeof(Value), here);
  const Value before = *address;
  *address = update(before);
  return before;
}

inline unsigned atomicInc(unsigned* address, unsigned last,
                          emu::Here here = emu::Here::at()) {
  return emu_atomic(address, here,
                    [&](unsigned value) { return value >= last ? 0 : value + 1; });
}

inline int atomicAdd(int* address, int added, emu::Here here = emu::Here::at()) {
  return emu_atomic(address, here, [&](int value) { return value + added; });
}

inline unsigned long long atomicAdd(unsigned long long* address,
                                    unsigned long long added,
                                    emu::Here here = emu::Here::at()) {
  return emu_atomic(address, here,
                    [&](unsigned long long value) { return value + added; });
}

namespace emu {

template <class Value>
struct Shuffle {
  Value value;
  int source;
};

// Lane i's result is the value of lane `source`, which it names itself.
template <class Value>
Value shuffle(const char* name, uint32_t mask, Value value, int source, Here here) {
  if (mask != 0xffffffffu) fail("divergence: a shuffle by part of a warp", here);
  Shuffle<Value> operand{value, source};
  collective(name, operand, here, [](Shuffle<Value>* const* lanes) {
    Value values[kWarpLanes];
    for (int lane = 0; lane < kWarpLanes; ++lane) values[lane] = lanes[lane]->value;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      lanes[lane]->value = values[lanes[lane]->source];
    }
  });
  return operand.value;
}

}  // namespace emu

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int other,
                      emu::Here here = emu::Here::at()) {
  return emu::shuffle("__shfl_xor_sync", mask, value, emu::current->lane ^ other, here);
}

template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, int distance,
                     emu::Here here = emu::Here::at()) {
  const int lane = emu::current->lane;
  return emu::shuffle("__shfl_up_sync", mask, value,
                      lane < distance ? lane : lane - distance, here);
}

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source,
                  emu::Here here = emu::Here::at()) {
  return emu::shuffle("__shfl_sync", mask, value, source & 31, here);
}

struct emu_ballot {
  bool mine;
  unsigned lanes;
};

inline unsigned __ballot_sync(unsigned mask, bool mine,
                              emu::Here here = emu::Here::at()) {
  if (mask != 0xffffffffu) emu::fail("divergence: a ballot by part of a warp", here);
  emu_ballot operand{mine, 0};
  emu::collective("__ballot_sync", operand, here, [](emu_ballot* const* lanes) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      votes |= static_cast<unsigned>(lanes[lane]->mine) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) lanes[lane]->lanes = votes;
  });
  return operand.lanes;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// The low word of (high:low) >> (shift mod 32).
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}

// Byte i of the result is the byte of (y:x) that the selector's nibble i names.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> (4 * i) & 7;
    result |= static_cast<uint32_t>(bytes >> (8 * byte) & 0xff) << (8 * i);
  }
  return result;
}

inline uint32_t __dp4a(uint32_t x, uint32_t y, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (x >> i & 0xff) * (y >> i & 0xff);
  return sum;
}

// To the nearest, ties to even; NaN becomes 0.
inline int __float2int_rn(float x) {
  return x != x ? 0 : static_cast<int>(__builtin_nearbyintf(x));
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
