// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the C functions for ctypes have in common: a device for one call, and the way
// faults and counts get out.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu/device.h"
#include "exl3/kernels/params.h"
#include "exl3/launch/workspace.h"

namespace exl3 {

// What a test says about a run beside the op's own arguments.
struct Run {
  uint32_t schedule;
  int32_t launches;  // times the op runs, on one workspace
  int32_t resident_blocks;
  int32_t count_banks;
  uint64_t clamped;  // what the op counted
};

// Of the last call of this library.
inline std::string last_fault;
inline std::string last_banks;

// Null, or why the body was stopped.
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

inline size_t bytes_of(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// A device for one call, and the buffers that the call's kernels may touch.
class Session {
 public:
  explicit Session(const Run& run) : device_(std::make_unique<emu::Device>()) {
    device_->schedule = emu::Schedule::numbered(run.schedule);
    device_->resident_blocks = static_cast<uint32_t>(run.resident_blocks);
    if (run.count_banks) device_->banks = std::make_unique<emu::BankCounter>();
  }

  ~Session() {
    if (!device_->banks) return;
    last_banks.clear();
    for (const auto& count : device_->banks->counts()) {
      last_banks += count.place + " " + std::to_string(count.instructions) + " " +
                    std::to_string(count.wavefronts) + " " +
                    std::to_string(count.conflicts) + "\n";
    }
  }

  void read(const char* name, const void* data, size_t bytes) const {
    if (data) add(name, const_cast<void*>(data), bytes, emu::Access::kRead);
  }
  void write(const char* name, void* data, size_t bytes) const {
    add(name, data, bytes, emu::Access::kUninitialized);
  }
  void update(const char* name, void* data, size_t bytes) const {
    add(name, data, bytes, emu::Access::kReadWrite);
  }

 private:
  void add(const char* name, void* data, size_t bytes, emu::Access access) const {
    device_->memory.add(name, data, bytes, access);
  }

  std::unique_ptr<emu::Device> device_;
};

// The workspace's head as it must be before the first launch.
inline void clear_head(char* workspace) { std::memset(workspace, 0, kHeadBytes); }

inline void add_head(const Session& session, char* workspace) {
  session.update("statistics", workspace, kStatisticsBytes);
  session.update("counters", counters_of(workspace), kCounterBytes);
}

// What the head holds after the op.
inline void read_head(char* workspace, Run& run) {
  run.clamped = *clamped_of(workspace);
  for (size_t i = kStatisticsBytes; i < kHeadBytes; ++i) {
    if (workspace[i] != 0) throw std::runtime_error("counters: not zero after the op");
  }
}

}  // namespace exl3
