// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Small kernels, each right or wrong in one way, to test the emulator by itself.
#include <functional>
#include <map>
#include <string>

#include "emu/cuda.h"
#include "emu/half.h"
#include "emu/ptx/async.h"
#include "emu/ptx/grid.h"
#include "emu/ptx/matrix.h"
#include "emu/ptx/memory.h"

namespace {

// The example of docs/design/emulator.md: every block reverses its 64 numbers.
__global__ void reverse(const int* x, int* out) {
  const int first = blockIdx.x * blockDim.x;
  ptx::store_shared(4 * threadIdx.x, ptx::load_global(x + first + threadIdx.x));
  __syncthreads();
  const int other = blockDim.x - 1 - threadIdx.x;
  ptx::store_global(out + first + threadIdx.x, ptx::load_shared<int>(4 * other));
}

std::string reverse_on_the_host(uint32_t schedule) {
  int x[192], out[192];
  for (int i = 0; i < 192; ++i) x[i] = i;
  emu::Device device;
  device.memory.add("x", x, sizeof(x), emu::Access::kRead);
  device.memory.add("out", out, sizeof(out), emu::Access::kUninitialized);
  device.schedule = emu::Schedule::numbered(schedule);
  device.launch({{3}, {64}, 256}, [&] { reverse(x, out); });
  for (int i = 0; i < 192; ++i) {
    if (out[i] != i / 64 * 64 + 63 - i % 64) return "wrong";
  }
  return "";
}

struct Case {
  emu::LaunchShape shape;
  std::function<void()> kernel;
  int launches = 1;
};

// What the cases may touch.
float given[256];
float scratch[256];
float initialized[256];
unsigned counter;

int lane() { return static_cast<int>(threadIdx.x % 32); }

int deep(int levels) {
  volatile char frame[4096];
  frame[0] = static_cast<char>(levels);
  return levels == 0 ? frame[0] : deep(levels - 1) + frame[0];
}

const std::map<std::string, Case>& cases() {
  static const std::map<std::string, Case> all = {
      {"block of 33 threads", {{{1}, {33}}, [] {}}},
      {"too much shared memory", {{{1}, {32}, 200 * 1024}, [] {}}},
      {"a read past a buffer",
       {{{1}, {32}}, [] { ptx::load_global(given + 225 + lane()); }}},
      {"a write past shared memory",
       {{{1}, {32}, 64}, [] { ptx::store_shared(4 * lane(), 1); }}},
      {"an odd address", {{{1}, {32}, 256}, [] { ptx::store_shared(2 * lane(), 1); }}},
      {"a write to what is only read",
       {{{1}, {32}}, [] { ptx::store_global(given + lane(), 0.0f); }}},
      {"a read of what nobody wrote",
       {{{1}, {32}}, [] { ptx::load_global(scratch + lane()); }}},
      {"a read of shared memory that nobody wrote",
       {{{1}, {32}, 128}, [] { ptx::load_shared<int>(4 * lane()); }}},
      {"two warps, no barrier",
       {{{1}, {64}, 256},
        [] {
          ptx::store_shared<int>(4 * threadIdx.x, 1);
          ptx::load_shared<int>(4 * (63 - threadIdx.x));
        }}},
      {"two warps, a barrier of each warp",
       {{{1}, {64}, 256},
        [] {
          ptx::store_shared<int>(4 * threadIdx.x, 1);
          __syncwarp();
          ptx::load_shared<int>(4 * (63 - threadIdx.x));
        }}},
      {"one warp, a shuffle instead of a barrier",
       {{{1}, {32}, 128},
        [] {
          ptx::store_shared<int>(4 * lane(), 1);
          __shfl_xor_sync(0xffffffffu, lane(), 1);
          ptx::load_shared<int>(4 * (31 - lane()));
        }}},
      {"two writers, no barrier",
       {{{1}, {64}, 4}, [] { ptx::store_shared<unsigned>(0, threadIdx.x); }}},
      {"a write after a read, no barrier",
       {{{1}, {64}, 4},
        [] {
          if (threadIdx.x == 0) ptx::store_shared(0, 1);
          __syncthreads();
          ptx::load_shared<int>(0);
          if (threadIdx.x == 0) ptx::store_shared(0, 2);
        }}},
      {"a race through global memory",
       {{{1}, {64}},
        [] {
          ptx::store_global(scratch + threadIdx.x, 1.0f);
          ptx::load_global(scratch + 63 - threadIdx.x);
        }}},
      {"two blocks write the same place",
       {{{2}, {32}}, [] { ptx::store_global(scratch + lane(), 1.0f); }}},
      {"a block reads what another wrote",
       {{{2}, {32}},
        [] {
          ptx::store_global(initialized + 32 * blockIdx.x + lane(), 1.0f);
          ptx::load_global(initialized + 32 * (1 - blockIdx.x) + lane());
        }}},
      {"a copy that nobody waits for",
       {{{1}, {32}, 512},
        [] {
          ptx::copy_async(16 * lane(), given + 4 * lane());
          ptx::commit_copies();
          ptx::load_shared<float>(16 * lane());
        }}},
      {"a wait that leaves the copy's group open",
       {{{1}, {32}, 512},
        [] {
          ptx::copy_async(16 * lane(), given + 4 * lane());
          ptx::wait_copies<0>();
          ptx::load_shared<float>(16 * lane());
        }}},
      {"a write over a copy under way",
       {{{1}, {32}, 512},
        [] {
          ptx::copy_async(16 * lane(), given + 4 * lane());
          ptx::store_shared(16 * lane(), 1);
        }}},
      {"another's copy, waited for but no barrier",
       {{{1}, {64}, 1024},
        [] {
          ptx::copy_async(16 * threadIdx.x, given + 4 * (threadIdx.x % 32));
          ptx::commit_copies();
          ptx::wait_copies<0>();
          ptx::load_shared<float>(16 * (63 - threadIdx.x));
        }}},
      {"a shuffle by half a warp",
       {{{1}, {32}},
        [] {
          if (lane() < 16) __shfl_xor_sync(0xffffffffu, lane(), 1);
        }}},
      {"lanes in different shuffles",
       {{{1}, {32}},
        [] {
          if (lane() < 16) {
            __shfl_xor_sync(0xffffffffu, lane(), 1);
          } else {
            __shfl_xor_sync(0xffffffffu, lane(), 2);
          }
        }}},
      {"a mask of half a warp",
       {{{1}, {32}}, [] { __shfl_xor_sync(0xffffu, lane(), 1); }}},
      {"a barrier after which half the block is gone",
       {{{1}, {64}},
        [] {
          if (threadIdx.x < 32) return;
          __syncthreads();
        }}},
      {"two barriers in two branches",
       {{{1}, {64}},
        [] {
          if (threadIdx.x < 32) {
            __syncthreads();
          } else {
            __syncthreads();
          }
        }}},
      {"a barrier against a shuffle",
       {{{1}, {32}},
        [] {
          if (lane() == 5) {
            __syncthreads();
          } else {
            __shfl_xor_sync(0xffffffffu, lane(), 1);
          }
        }}},
      {"frames deeper than the stack", {{{1}, {32}}, [] { deep(80); }}},
      {"a result used before the launch before has ended",
       {{{1}, {32}, 0, true},
        [] { ptx::store_global(initialized + lane(), 1.0f); },
        2}},
      {"the same, waited for",
       {{{1}, {32}, 0, true},
        [] {
          ptx::wait_for_previous_launch();
          ptx::store_global(initialized + lane(), 1.0f);
        },
        2}},
      {"what a block hands to the last one",
       {{{4}, {32}, 4},
        [] {
          ptx::store_global(scratch + 32 * blockIdx.x + lane(), 1.0f);
          __threadfence();
          __syncthreads();
          if (lane() == 0) {
            ptx::store_shared<int>(0, atomicInc(&counter, 3) == 3);
            __threadfence();
          }
          __syncthreads();
          if (!ptx::load_shared<int>(0)) return;
          for (int i = 0; i < 4; ++i) ptx::load_global(scratch + 32 * i + lane());
        }}},
      {"a wait for a block that needs this one to end",
       {{{2}, {32}},
        [] {
          // A spin can't be waited for; a lane that never comes can.
          if (blockIdx.x == 0 && lane() == 0) return;
          __syncwarp();
        }}},
  };
  return all;
}

std::string answer;

}  // namespace

extern "C" {

// Null, or how the named case ends under this schedule.
const char* run_small_case(const char* name, uint32_t schedule) {
  try {
    const Case& chosen = cases().at(name);
    emu::Device device;
    device.schedule = emu::Schedule::numbered(schedule);
    counter = 0;
    device.memory.add("given", given, sizeof(given), emu::Access::kRead);
    device.memory.add("scratch", scratch, sizeof(scratch), emu::Access::kUninitialized);
    device.memory.add("initialized", initialized, sizeof(initialized),
                      emu::Access::kReadWrite);
    device.memory.add("counter", &counter, sizeof(counter), emu::Access::kReadWrite);
    for (int i = 0; i < chosen.launches; ++i) {
      device.launch(chosen.shape, chosen.kernel);
    }
    return nullptr;
  } catch (const std::exception& fault) {
    answer = fault.what();
    return answer.c_str();
  }
}

const char* run_reverse(uint32_t schedule) {
  answer = reverse_on_the_host(schedule);
  return answer.empty() ? nullptr : answer.c_str();
}

// Wavefronts of 32 lanes that read words at this distance.
int count_wavefronts(int distance) {
  emu::Device device;
  device.banks = std::make_unique<emu::BankCounter>();
  device.launch({{1}, {32}, 32 * 4 * 33}, [&] {
    ptx::store_shared<int>(4 * distance * lane(), 1);
    ptx::load_shared<int>(4 * distance * lane());
  });
  for (const auto& count : device.banks->counts()) {
    if (count.place.find("load") != std::string::npos) {
      return static_cast<int>(count.wavefronts);
    }
  }
  return -1;
}

uint16_t small_half_from_double(double value) { return emu::half_from_double(value); }

void small_half_fma(const uint16_t* a, const uint16_t* b, const uint16_t* c,
                    uint16_t* out, int count) {
  for (int i = 0; i < count; ++i) out[i] = emu::half_fma(a[i], b[i], c[i]);
}

void small_halves_to_float(float* out) {
  for (uint32_t i = 0; i < 65536; ++i) {
    out[i] = emu::half_to_float(static_cast<uint16_t>(i));
  }
}

}  // extern "C"
