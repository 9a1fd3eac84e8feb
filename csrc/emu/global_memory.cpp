// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The checks of global memory.
#include "emu/global_memory.h"

#include "emu/block.h"

namespace emu {
namespace {

constexpr size_t kCellBytes = 2;

std::string place(const std::string& buffer, size_t offset) {
  return " " + buffer + " byte " + std::to_string(offset);
}

}  // namespace

void GlobalMemory::add(std::string name, void* data, size_t bytes, Access access) {
  Buffer buffer{std::move(name), static_cast<char*>(data), bytes, access, {}};
  if (access != Access::kRead) buffer.cells.resize((bytes + 1) / kCellBytes);
  buffers_.push_back(std::move(buffer));
}

void GlobalMemory::begin_launch(bool programmatic) {
  if (!programmatic) settled_ = launch_;
  ++launch_;
  orders_.clear();
}

GlobalMemory::Buffer& GlobalMemory::find(const void* data, size_t bytes,
                                         const char* what, Here here) {
  const auto* address = static_cast<const char*>(data);
  const auto holds = [&](const Buffer& buffer) {
    return address >= buffer.begin && address + bytes <= buffer.begin + buffer.bytes;
  };
  const auto size = std::to_string(bytes);
  if (last_ >= buffers_.size() || !holds(buffers_[last_])) {
    size_t i = 0;
    while (i < buffers_.size() && !holds(buffers_[i])) ++i;
    if (i == buffers_.size()) {
      // Name the buffer that it most likely fell out of.
      const Buffer* nearest = nullptr;
      for (const Buffer& buffer : buffers_) {
        if (buffer.begin <= address && (!nearest || buffer.begin > nearest->begin)) {
          nearest = &buffer;
        }
      }
      fail("out-of-bounds: " + std::string(what) + " of " + size + " bytes" +
               (nearest ? " at" + place(nearest->name, address - nearest->begin) +
                              ", which has " + std::to_string(nearest->bytes)
                        : std::string(" in no buffer")),
           here);
    }
    last_ = i;
  }
  Buffer& buffer = buffers_[last_];
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    fail("misaligned: " + std::string(what) + " of " + size + " bytes at" +
             place(buffer.name, address - buffer.begin),
         here);
  }
  return buffer;
}

bool GlobalMemory::ordered(const Cell& cell, uint32_t reader_block) const {
  const auto writer = orders_.find(cell.block);
  const auto reader = orders_.find(reader_block);
  if (writer == orders_.end() || reader == orders_.end()) return false;
  const auto own = writer->second.fences.find(cell.thread);
  for (const Atomic& released : writer->second.atomics) {
    const auto after_write = [&](uint64_t step, uint32_t epoch) {
      return step > cell.step && (released.thread == cell.thread || epoch > cell.epoch);
    };
    if (!after_write(released.step, released.epoch)) continue;
    const bool writer_fenced = own != writer->second.fences.end() &&
                               own->second.step > cell.step &&
                               own->second.step < released.step;
    const bool releaser_fenced = after_write(released.fence.step, released.fence.epoch);
    if (!writer_fenced && !releaser_fenced) continue;
    for (const Atomic& acquired : reader->second.atomics) {
      if (acquired.address == released.address && acquired.step > released.step &&
          reader->second.last_fence.step > acquired.step) {
        return true;
      }
    }
  }
  return false;
}

// The cell was written in this launch, or in one that may still run.
void GlobalMemory::check_order(const Thread& thread, const Cell& cell,
                               const Buffer& buffer, size_t offset, const char* what,
                               Here here) const {
  const auto access = [&] { return std::string(what) + place(buffer.name, offset); };
  if (cell.launch != launch_) {
    if (cell.launch > settled_ && !thread.waited_for_grid) {
      fail("unordered: " + access() +
               ", written by the launch before, without griddepcontrol.wait",
           here);
    }
    return;
  }
  const auto me = static_cast<uint32_t>(thread.number);
  if (cell.block != thread.block->number) {
    if (!ordered(cell, thread.block->number)) {
      fail("unordered: " + access() + ", written by block " +
               std::to_string(cell.block) +
               ": fence, then atomic, on both sides is missing",
           here);
    }
  } else if (cell.thread != me && cell.epoch == thread.block->epoch &&
             (static_cast<int>(cell.thread) / kWarpLanes != thread.warp->number ||
              cell.warp_epoch == thread.warp->epoch)) {
    fail("race: " + access() + ", written by thread " + std::to_string(cell.thread) +
             " with no barrier between",
         here);
  }
}

void GlobalMemory::check_read(const Thread& thread, const void* from, size_t bytes,
                              Here here, bool non_coherent) {
  Buffer& buffer = find(from, bytes, "read", here);
  if (buffer.access == Access::kRead) return;
  const size_t offset = static_cast<const char*>(from) - buffer.begin;
  for (size_t i = offset / kCellBytes; i * kCellBytes < offset + bytes; ++i) {
    const Cell& cell = buffer.cells[i];
    if (cell.launch == 0) {
      if (buffer.access == Access::kUninitialized) {
        fail("uninitialized: read of" + place(buffer.name, i * kCellBytes), here);
      }
      continue;
    }
    if (non_coherent && cell.launch == launch_) {
      fail("unordered: non-coherent read of" + place(buffer.name, i * kCellBytes) +
               ", which this launch writes",
           here);
    }
    check_order(thread, cell, buffer, i * kCellBytes, "read of", here);
  }
}

void GlobalMemory::check_write(const Thread& thread, void* to, size_t bytes,
                               Here here) {
  Buffer& buffer = find(to, bytes, "write", here);
  const size_t offset = static_cast<char*>(to) - buffer.begin;
  if (buffer.access == Access::kRead) {
    fail("read-only: write to" + place(buffer.name, offset), here);
  }
  if (launch_ > settled_ + 1 && !thread.waited_for_grid) {
    fail("unordered: write to" + place(buffer.name, offset) +
             " while the launch before may still run: griddepcontrol.wait comes first",
         here);
  }
  ++step_;
  for (size_t i = offset / kCellBytes; i * kCellBytes < offset + bytes; ++i) {
    Cell& cell = buffer.cells[i];
    if (cell.launch != 0) {
      check_order(thread, cell, buffer, i * kCellBytes, "write to", here);
    }
    cell = {launch_,
            thread.block->number,
            static_cast<uint32_t>(thread.number),
            thread.block->epoch,
            thread.warp->epoch,
            step_};
  }
}

void GlobalMemory::fence(const Thread& thread) {
  Order& order = orders_[thread.block->number];
  order.last_fence = {++step_, thread.block->epoch};
  order.fences[static_cast<uint32_t>(thread.number)] = order.last_fence;
}

// The atomic's own bytes need no order: atomics on one address have one.
void GlobalMemory::atomic(const Thread& thread, void* address, size_t bytes,
                          Here here) {
  Buffer& buffer = find(address, bytes, "atomic", here);
  const size_t offset = static_cast<char*>(address) - buffer.begin;
  if (buffer.access == Access::kRead) {
    fail("read-only: atomic on" + place(buffer.name, offset), here);
  }
  if (buffer.access == Access::kUninitialized &&
      buffer.cells[offset / kCellBytes].launch == 0) {
    fail("uninitialized: atomic on" + place(buffer.name, offset), here);
  }
  if (launch_ > settled_ + 1 && !thread.waited_for_grid) {
    fail("unordered: atomic on" + place(buffer.name, offset) +
             " while the launch before may still run: griddepcontrol.wait comes first",
         here);
  }
  Order& order = orders_[thread.block->number];
  const auto me = static_cast<uint32_t>(thread.number);
  const auto fence = order.fences.find(me);
  order.atomics.push_back({address, ++step_, me, thread.block->epoch,
                           fence == order.fences.end() ? Fence{} : fence->second});
}

}  // namespace emu
