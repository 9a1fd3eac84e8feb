// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The emulated device: runs a kernel's blocks as fibers, and stops at the first fault.
//
//   emu::Device device;
//   device.memory.add("x", x, bytes, emu::Access::kRead);
//   device.memory.add("out", out, bytes, emu::Access::kUninitialized);
//   device.schedule = emu::Schedule::numbered(7);
//   device.launch({{grid}, {threads}, shared_bytes}, [&] { kernel<4>(x, out); });
//
// launch() throws emu::Fault. One device at a time in a process; it is emu::device.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "emu/banks.h"
#include "emu/block.h"
#include "emu/global_memory.h"
#include "emu/schedule.h"

namespace emu {

struct LaunchShape {
  Index3 grid;
  Index3 block;
  uint32_t shared_bytes = 0;
  bool programmatic = false;  // programmatic dependent launch
};

class Device {
 public:
  Device();
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  GlobalMemory memory;
  Schedule schedule;
  uint32_t resident_blocks = 8;        // at once; an unfair schedule takes fewer
  uint32_t shared_limit = 99 * 1024;   // a block's, as on sm_89 and sm_120
  std::unique_ptr<BankCounter> banks;  // set it to have bank conflicts counted

  void launch(const LaunchShape& shape, const std::function<void()>& kernel);

  // --- For the emulated instructions: called by the running thread. ---

  // Lets other threads run; returns when this one may go on.
  void suspend();
  // A moment where the order of blocks is open: before an atomic, say.
  void yield();
  void barrier(Here here);
  // Leaves the operand in the warp's collective. True for the lane that comes last; it
  // computes for all, and calls release(). Others return when that has happened.
  bool arrive(const char* name, void* operand, Here here);
  void release(Warp& warp);
  [[noreturn]] void stop(const std::string& message);

  Index3 grid;  // of the running launch
  Index3 block;

 private:
  static void thread_entry();
  void start_block(Block& block, uint32_t number);
  void refill();
  void finish_thread();
  Thread* pick();
  Warp* pick_warp();
  void resume(Thread& thread);
  void check_stack(const Thread& thread);
  std::string describe_deadlock() const;
  char* take_stack();

  const std::function<void()>* kernel_ = nullptr;
  uint32_t shared_bytes_ = 0;
  Random random_{1};
  Fiber main_;
  std::list<Block> blocks_;      // resident
  std::vector<Warp*> warps_;     // of the resident blocks
  std::vector<uint32_t> queue_;  // blocks not yet started, last one next
  Warp* last_warp_ = nullptr;    // that ran
  std::string fault_;
};

// The running thread, and the device that it runs on.
extern Thread* current;
extern Device* device;

}  // namespace emu
