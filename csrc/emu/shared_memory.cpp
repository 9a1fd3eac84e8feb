// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The checks of shared memory.
#include "emu/shared_memory.h"

#include <cstring>

#include "emu/block.h"

namespace emu {
namespace {

constexpr uint32_t kCellBytes = 2;

std::string at(uint32_t address) { return " shared byte " + std::to_string(address); }

std::string by(int thread) { return "thread " + std::to_string(thread); }

}  // namespace

void SharedMemory::reset(uint32_t bytes) {
  bytes_.assign(bytes, static_cast<char>(0xff));
  cells_.assign(bytes / kCellBytes, Cell{});
}

void SharedMemory::check_range(uint32_t address, uint32_t bytes, const char* what,
                               Here here) {
  if (uint64_t{address} + bytes > bytes_.size()) {
    fail("out-of-bounds: " + std::string(what) + " of " + std::to_string(bytes) +
             " bytes at" + at(address) + ", but the block has " +
             std::to_string(bytes_.size()),
         here);
  }
  if (address % bytes != 0) {
    fail("misaligned: " + std::string(what) + " of " + std::to_string(bytes) +
             " bytes at" + at(address),
         here);
  }
}

// Whether a barrier stands between an earlier access, made by another thread of `warp`
// at those epochs, and this thread's next one.
bool SharedMemory::ordered_after(const Thread& thread, int warp, uint32_t epoch,
                                 uint32_t warp_epoch) {
  if (epoch != thread.block->epoch) return true;
  return warp == thread.warp->number && warp_epoch != thread.warp->epoch;
}

void SharedMemory::read(const Thread& thread, uint32_t address, void* to,
                        uint32_t bytes, Here here) {
  check_range(address, bytes, "read", here);
  const auto me = static_cast<int16_t>(thread.number);
  const auto my_warp = static_cast<int16_t>(thread.warp->number);
  const uint32_t end = (address + bytes) / kCellBytes;
  for (uint32_t i = address / kCellBytes; i < end; ++i) {
    Cell& cell = cells_[i];
    if (cell.state != Cell::kWritten) {
      const bool in_flight = cell.state == Cell::kInFlight;
      fail(in_flight
               ? "in-flight: read of" + at(i * kCellBytes) +
                     " before the cp.async of " + by(cell.writer) + " was waited for"
               : "uninitialized: read of" + at(i * kCellBytes),
           here);
    }
    if (cell.writer != me && !ordered_after(thread, cell.writer / kWarpLanes,
                                            cell.write_epoch, cell.write_warp_epoch)) {
      fail("race: read of" + at(i * kCellBytes) + ", written by " + by(cell.writer) +
               " with no barrier between",
           here);
    }
    const bool fresh = cell.read_epoch != thread.block->epoch || cell.reader == -1 ||
                       (cell.reader != kManyWarps && cell.reader_warp == my_warp &&
                        cell.read_warp_epoch != thread.warp->epoch);
    if (fresh) {
      cell.reader = me;
      cell.reader_warp = my_warp;
    } else if (cell.reader != me && cell.reader != kManyWarps) {
      cell.reader = cell.reader_warp == my_warp ? kManyLanes : kManyWarps;
    }
    cell.read_epoch = thread.block->epoch;
    cell.read_warp_epoch = thread.warp->epoch;
  }
  std::memcpy(to, &bytes_[address], bytes);
}

void SharedMemory::check_write(const Thread& thread, uint32_t address, uint32_t bytes,
                               const char* what, Here here) {
  check_range(address, bytes, what, here);
  const auto me = static_cast<int16_t>(thread.number);
  const uint32_t end = (address + bytes) / kCellBytes;
  for (uint32_t i = address / kCellBytes; i < end; ++i) {
    const Cell& cell = cells_[i];
    if (cell.state == Cell::kInFlight) {
      fail("in-flight: " + std::string(what) + " to" + at(i * kCellBytes) +
               " before the cp.async of " + by(cell.writer) + " was waited for",
           here);
    }
    if (cell.writer != -1 && cell.writer != me &&
        !ordered_after(thread, cell.writer / kWarpLanes, cell.write_epoch,
                       cell.write_warp_epoch)) {
      fail("race: " + std::string(what) + " to" + at(i * kCellBytes) + ", written by " +
               by(cell.writer) + " with no barrier between",
           here);
    }
    const bool many_warps = cell.reader == kManyWarps;
    if (cell.reader != -1 && cell.reader != me &&
        !ordered_after(thread, many_warps ? -1 : cell.reader_warp, cell.read_epoch,
                       cell.read_warp_epoch)) {
      const std::string reader = cell.reader >= 0 ? by(cell.reader)
                                 : many_warps
                                     ? "several warps"
                                     : "warp " + std::to_string(cell.reader_warp);
      fail("race: " + std::string(what) + " to" + at(i * kCellBytes) + ", read by " +
               reader + " with no barrier between",
           here);
    }
  }
}

void SharedMemory::mark_written(const Thread& thread, uint32_t address, uint32_t bytes,
                                Cell::State state) {
  const uint32_t end = (address + bytes) / kCellBytes;
  for (uint32_t i = address / kCellBytes; i < end; ++i) {
    Cell& cell = cells_[i];
    cell.state = state;
    cell.writer = static_cast<int16_t>(thread.number);
    cell.write_epoch = thread.block->epoch;
    cell.write_warp_epoch = thread.warp->epoch;
  }
}

void SharedMemory::write(const Thread& thread, uint32_t address, const void* from,
                         uint32_t bytes, Here here) {
  check_write(thread, address, bytes, "write", here);
  mark_written(thread, address, bytes, Cell::kWritten);
  std::memcpy(&bytes_[address], from, bytes);
}

void SharedMemory::begin_copy(const Thread& thread, const AsyncCopy& copy) {
  check_write(thread, copy.shared, copy.bytes, "cp.async", copy.here);
  mark_written(thread, copy.shared, copy.bytes, Cell::kInFlight);
  std::memset(&bytes_[copy.shared], 0xff, copy.bytes);
}

void SharedMemory::land(const Thread& thread, const AsyncCopy& copy) {
  mark_written(thread, copy.shared, copy.bytes, Cell::kWritten);
  std::memset(&bytes_[copy.shared], 0, copy.bytes);
  std::memcpy(&bytes_[copy.shared], copy.global, copy.from_source);
}

}  // namespace emu
