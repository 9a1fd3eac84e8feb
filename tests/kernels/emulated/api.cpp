// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The ops, run by the emulator, for ctypes: each function returns null, or the fault.
#include <cstring>
#include <string>

#include "exl3/launch/linear.h"

using namespace exl3;

namespace {

std::string last_fault;

template <class Body>
const char* faults_of(Body body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& fault) {
    last_fault = fault.what();
    return last_fault.c_str();
  }
}

std::string last_banks;

}  // namespace

extern "C" {

// What a test says about a run beside the op's own arguments.
struct Run {
  uint32_t schedule;
  int32_t launches;  // times the op runs, on one workspace
  int32_t resident_blocks;
  int32_t count_banks;
};

struct LinearCall {
  const void* x;
  const void* trellis;
  const void* suh;
  const void* svh;
  const void* bias;
  void* out;
  int64_t trellis_bytes;
  int32_t type, rows, width, k;
  int32_t num_shards;
  const int32_t* shards;  // [num_shards, 5]: stored n, skip, keep, words, codebook
  int32_t block_rows, splits;
};

const char* emulated_linear(const LinearCall* call, const Run* run) {
  return faults_of([&] {
    LinearArguments a{};
    a.x = call->x;
    a.trellis = static_cast<const uint16_t*>(call->trellis);
    a.suh = static_cast<const uint16_t*>(call->suh);
    a.svh = static_cast<const uint16_t*>(call->svh);
    a.bias = call->bias;
    a.out = call->out;
    a.type = static_cast<ElementType>(call->type);
    a.rows = call->rows;
    a.width = call->width;
    a.k = call->k;
    size_t stored = 0;
    size_t kept = 0;
    for (int i = 0; i < call->num_shards; ++i) {
      const int32_t* s = call->shards + 5 * i;
      a.shards.push_back({s[0], s[1], s[2], s[3], static_cast<Codebook>(s[4])});
      stored += s[0];
      kept += s[2];
    }
    const LinearPlan plan{call->block_rows, call->splits};
    // The workspace's three parts, so that running over an end is a fault.
    const size_t bytes = workspace_bytes(a, plan);
    std::vector<char> workspace(bytes, static_cast<char>(0xff));
    std::memset(workspace.data(), 0, kCounterBytes);
    const size_t element = a.type == ElementType::kFloat32 ? 4 : 2;
    const size_t activations = a.shards.size() * a.rows * size_t(a.k) * 2;

    emu::Device device;
    device.schedule = emu::Schedule::numbered(run->schedule);
    device.resident_blocks = static_cast<uint32_t>(run->resident_blocks);
    if (run->count_banks) device.banks = std::make_unique<emu::BankCounter>();
    const auto read = [&](const char* name, const void* data, size_t size) {
      if (data) {
        device.memory.add(name, const_cast<void*>(data), size, emu::Access::kRead);
      }
    };
    read("x", a.x, element * a.rows * a.width);
    read("trellis", a.trellis, static_cast<size_t>(call->trellis_bytes));
    read("suh", a.suh, a.shards.size() * a.k * 2);
    read("svh", a.svh, stored * 2);
    read("bias", a.bias, kept * element);
    device.memory.add("out", a.out, element * a.rows * kept,
                      emu::Access::kUninitialized);
    char* at = workspace.data();
    device.memory.add("counters", at, kCounterBytes, emu::Access::kReadWrite);
    device.memory.add("activations", at + kCounterBytes, activations,
                      emu::Access::kUninitialized);
    device.memory.add("parts", at + kCounterBytes + activations,
                      bytes - kCounterBytes - activations, emu::Access::kUninitialized);
    for (int i = 0; i < run->launches; ++i) linear(a, plan, at, nullptr);
    if (device.banks) {
      last_banks.clear();
      for (const auto& count : device.banks->counts()) {
        last_banks += count.place + " " + std::to_string(count.instructions) + " " +
                      std::to_string(count.wavefronts) + " " +
                      std::to_string(count.conflicts) + "\n";
      }
    }
  });
}

// Lines of "file:line kind instructions wavefronts conflicts", of the last run.
const char* emulated_banks() { return last_banks.c_str(); }

}  // extern "C"
