// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The run loop: which thread runs next, and what happens when none can.
#include "emu/device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace emu {

Thread* current = nullptr;
Device* device = nullptr;

namespace {

// A thread's stack, and below it a page that nobody may touch. What lies below that is
// there so that an overflow is found when the thread ends, and not as a crash.
// Untouched pages cost nothing.
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kMappedBytes = 1024 * 1024;
constexpr char kGuard = 0x5a;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Kept for the next launch: touched pages are expensive.
std::vector<char*> free_stacks;

// A thread's frames are left, not returned from; AddressSanitizer still guards them.
void forget_frames([[maybe_unused]] char* stack) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
}

Index3 unflatten(uint32_t number, Index3 size) {
  return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

std::string to_string(Index3 index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
         std::to_string(index.z) + ")";
}

}  // namespace

bool operator==(Here a, Here b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string to_string(Here here) {
  const char* name = std::strrchr(here.file, '/');
  return std::string(name ? name + 1 : here.file) + ":" + std::to_string(here.line);
}

void fail(const std::string& message, Here here) {
  device->stop(message + " [" + to_string(here) + ", block " +
               to_string(current->block->index) + " thread " +
               std::to_string(current->number) + "]");
}

Device::Device() { device = this; }
Device::~Device() { device = nullptr; }

char* Device::take_stack() {
  char* stack = nullptr;
  if (free_stacks.empty()) {
    void* mapping = mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw Fault("launch: no memory for a thread's stack");
    stack = static_cast<char*>(mapping) + kMappedBytes - kStackBytes;
    std::memset(stack - kGuardBytes, kGuard, kGuardBytes);
  } else {
    stack = free_stacks.back();
    free_stacks.pop_back();
    forget_frames(stack);
  }
  return stack;
}

void Device::launch(const LaunchShape& shape, const std::function<void()>& kernel) {
  if (shape.block.count() % kWarpLanes != 0 || shape.block.count() == 0 ||
      shape.block.count() > 1024) {
    throw Fault("launch: a block of " + std::to_string(shape.block.count()) +
                " threads is not 32 to 1024 in whole warps");
  }
  if (shape.grid.count() == 0) throw Fault("launch: the grid is empty");
  if (shape.shared_bytes > shared_limit) {
    throw Fault("launch: " + std::to_string(shape.shared_bytes) +
                " bytes of shared memory, but a block may have " +
                std::to_string(shared_limit));
  }
  grid = shape.grid;
  block = shape.block;
  kernel_ = &kernel;
  shared_bytes_ = shape.shared_bytes;
  random_ = Random(schedule.seed);
  memory.begin_launch(shape.programmatic);
  fault_.clear();
  last_warp_ = nullptr;

  queue_.resize(grid.count());
  for (uint32_t i = 0; i < queue_.size(); ++i) {
    queue_[queue_.size() - 1 - i] =
        schedule.kind == Schedule::Kind::kReversed ? queue_.size() - 1 - i : i;
  }
  if (schedule.kind == Schedule::Kind::kUnfair) {
    for (size_t i = queue_.size(); i > 1; --i) {
      std::swap(queue_[i - 1], queue_[random_.next() % i]);
    }
  }
  while (true) {
    refill();
    Thread* next = pick();
    if (next == nullptr) {
      if (!blocks_.empty()) fault_ = describe_deadlock();
      break;
    }
    current = next;
    Fiber::switch_to(main_, next->fiber);
    if (!fault_.empty()) break;
  }
  for (Block& left : blocks_) {
    for (Thread& thread : left.threads) free_stacks.push_back(thread.stack);
  }
  blocks_.clear();
  warps_.clear();
  current = nullptr;
  if (banks) banks->finish_launch();
  if (!fault_.empty()) throw Fault(fault_);
}

// Retires the blocks that have ended and starts as many as may be resident.
void Device::refill() {
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->alive != 0) {
      ++it;
      continue;
    }
    for (Thread& thread : it->threads) free_stacks.push_back(thread.stack);
    it = blocks_.erase(it);
  }
  uint32_t limit = resident_blocks;
  if (schedule.kind == Schedule::Kind::kUnfair) limit = 1 + schedule.seed % limit;
  while (!queue_.empty() && blocks_.size() < limit) {
    blocks_.emplace_back();
    start_block(blocks_.back(), queue_.back());
    queue_.pop_back();
  }
  warps_.clear();
  for (Block& resident : blocks_) {
    for (Warp& warp : resident.warps) warps_.push_back(&warp);
  }
  if (schedule.kind == Schedule::Kind::kReversed) {
    std::reverse(warps_.begin(), warps_.end());
  }
  last_warp_ = nullptr;
}

void Device::start_block(Block& started, uint32_t number) {
  const auto threads = block.count();
  started.number = number;
  started.index = unflatten(number, grid);
  started.alive = static_cast<int>(threads);
  started.shared.reset(shared_bytes_);
  started.threads = std::vector<Thread>(threads);
  started.warps = std::vector<Warp>(threads / kWarpLanes);
  for (size_t w = 0; w < started.warps.size(); ++w) {
    Warp& warp = started.warps[w];
    warp.block = &started;
    warp.number = static_cast<int>(w);
    warp.alive = warp.runnable = kAllLanes;
    warp.priority = random_.next();
  }
  for (uint32_t i = 0; i < threads; ++i) {
    Thread& thread = started.threads[i];
    thread.block = &started;
    thread.warp = &started.warps[i / kWarpLanes];
    thread.number = static_cast<int>(i);
    thread.lane = static_cast<int>(i) % kWarpLanes;
    thread.index = unflatten(i, block);
    thread.stack = take_stack();
    // Stacks that end at like addresses would fight for the same cache lines.
    const size_t colour = i % 61 * 192;
    thread.fiber.prepare(thread.stack, kStackBytes - colour, &Device::thread_entry);
  }
}

void Device::thread_entry() {
  (*device->kernel_)();
  device->finish_thread();
}

void Device::finish_thread() {
  Thread& self = *current;
  const uint32_t bit = 1u << self.lane;
  self.warp->alive &= ~bit;
  self.warp->runnable &= ~bit;
  check_stack(self);
  Block& mine = *self.block;
  if (--mine.alive == 0) {
    Fiber::switch_to(self.fiber, main_);  // which frees this stack
  }
  if (mine.arrived == mine.alive) {  // the others waited for this one's end only
    self.here = mine.barrier;
    stop("divergence: thread " + std::to_string(self.number) + " of block " +
         to_string(mine.index) + " returned while others wait in __syncthreads at " +
         to_string(mine.barrier));
  }
  suspend();
  __builtin_unreachable();
}

void Device::stop(const std::string& message) {
  fault_ = message;
  Fiber::switch_to(current->fiber, main_);
  __builtin_unreachable();
}

void Device::check_stack(const Thread& thread) {
  char* guard = thread.stack - kGuardBytes;
  // Every byte is equal to the one before it, and the first is right.
  if (*guard == kGuard && std::memcmp(guard, guard + 1, kGuardBytes - 1) == 0) return;
  std::memset(guard, kGuard, kGuardBytes);  // the stack will be used again
  stop("stack-overflow: a thread needs more than " + std::to_string(kStackBytes) +
       " bytes of stack");
}

Warp* Device::pick_warp() {
  const bool unfair = schedule.kind == Schedule::Kind::kUnfair;
  if (unfair) {
    Warp* best = nullptr;
    for (Warp* warp : warps_) {
      if (warp->runnable && (!best || warp->priority > best->priority)) best = warp;
    }
    return best;
  }
  size_t start = 0;
  if (last_warp_ != nullptr) {
    const auto it = std::find(warps_.begin(), warps_.end(), last_warp_);
    start = static_cast<size_t>(it - warps_.begin()) + 1;
  }
  for (size_t i = 0; i < warps_.size(); ++i) {
    Warp* warp = warps_[(start + i) % warps_.size()];
    if (warp->runnable) return warp;
  }
  return nullptr;
}

Thread* Device::pick() {
  Warp* warp = last_warp_;
  if (warp == nullptr || warp->runnable == 0) warp = pick_warp();
  if (warp == nullptr) return nullptr;
  last_warp_ = warp;
  int lane = 0;
  switch (schedule.kind) {
    case Schedule::Kind::kFair:
      lane = __builtin_ctz(warp->runnable);
      break;
    case Schedule::Kind::kReversed:
      lane = 31 - __builtin_clz(warp->runnable);
      break;
    case Schedule::Kind::kUnfair: {
      const uint32_t turn = random_.next() & 31;
      const uint32_t turned = turn ? warp->runnable >> turn | warp->runnable
                                                                  << (32 - turn)
                                   : warp->runnable;
      lane = static_cast<int>((__builtin_ctz(turned) + turn) & 31);
      break;
    }
  }
  return &warp->block->threads[warp->number * kWarpLanes + lane];
}

void Device::suspend() {
  Thread& self = *current;
  Thread* next = pick();
  if (next == &self) return;
  if (next == nullptr) {
    Fiber::switch_to(self.fiber, main_);  // more blocks, the end, or a deadlock
  } else {
    current = next;
    Fiber::switch_to(self.fiber, next->fiber);
  }
}

void Device::yield() {
  if (schedule.kind == Schedule::Kind::kUnfair) {
    current->warp->priority = random_.next();
  }
  last_warp_ = pick_warp();
  suspend();
}

void Device::barrier(Here here) {
  Thread& self = *current;
  Block& mine = *self.block;
  if (mine.arrived != 0 && !(mine.barrier == here)) {
    fail("divergence: __syncthreads, while others of the block wait in the one at " +
             to_string(mine.barrier),
         here);
  }
  mine.barrier = here;
  self.waits_for = "__syncthreads";
  self.here = here;
  self.warp->runnable &= ~(1u << self.lane);
  if (++mine.arrived == mine.alive) {
    if (static_cast<size_t>(mine.alive) != mine.threads.size()) {
      fail("divergence: __syncthreads, after some threads of the block returned", here);
    }
    mine.arrived = 0;
    ++mine.epoch;
    for (Warp& warp : mine.warps) {
      warp.runnable = warp.alive;
      if (schedule.kind == Schedule::Kind::kUnfair) warp.priority = random_.next();
    }
    last_warp_ = nullptr;
  }
  suspend();
}

bool Device::arrive(const char* name, void* operand, Here here) {
  Thread& self = *current;
  Warp& warp = *self.warp;
  if (warp.arrived != 0 && !(warp.here == here)) {
    fail("divergence: " + std::string(name) +
             ", while other lanes of the warp wait in " + warp.collective + " at " +
             to_string(warp.here),
         here);
  }
  warp.collective = name;
  warp.here = here;
  warp.operands[self.lane] = operand;
  warp.arrived |= 1u << self.lane;
  if (warp.arrived == kAllLanes) return true;
  self.waits_for = name;
  self.here = here;
  warp.runnable &= ~(1u << self.lane);
  suspend();
  return false;
}

void Device::release(Warp& warp) {
  warp.arrived = 0;
  warp.runnable = warp.alive;
  // A fair schedule gives every warp its turn; an unfair one lets this one run ahead.
  if (schedule.kind != Schedule::Kind::kUnfair) last_warp_ = pick_warp();
}

std::string Device::describe_deadlock() const {
  std::string text = "deadlock:";
  for (const Block& stuck : blocks_) {
    if (stuck.alive == 0) continue;
    text += " block " + to_string(stuck.index);
    for (const Warp& warp : stuck.warps) {
      // Lanes that wait for the same thing at the same place are named together.
      for (uint32_t left = warp.alive; left != 0;) {
        const Thread& first =
            stuck.threads[warp.number * kWarpLanes + __builtin_ctz(left)];
        int lanes = 0;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          const Thread& other = stuck.threads[warp.number * kWarpLanes + lane];
          if (!(left >> lane & 1) || other.here.line != first.here.line) continue;
          left &= ~(1u << lane);
          ++lanes;
        }
        text += "; warp " + std::to_string(warp.number) + ": " + std::to_string(lanes) +
                " lanes in " + first.waits_for + " at " + to_string(first.here);
      }
      const int ended = kWarpLanes - __builtin_popcount(warp.alive);
      if (ended != 0) text += ", " + std::to_string(ended) + " returned";
    }
    break;  // one stuck block tells enough
  }
  return text;
}

}  // namespace emu
