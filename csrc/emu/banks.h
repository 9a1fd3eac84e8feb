// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Bank conflicts of shared memory, counted for each place in the source.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "emu/fault.h"

namespace emu {

struct Thread;

// The 32 banks serve one 4-byte word each per wavefront. An instruction of 4 bytes a
// lane needs one wavefront, of 8 bytes two (half a warp each), of 16 bytes four. Lanes
// that read the same word share it. What goes beyond is a conflict.
class BankCounter {
 public:
  struct Count {
    std::string place;  // "gemm.cuh:120 load"
    uint64_t instructions = 0, wavefronts = 0, conflicts = 0;
  };

  // One lane's part of an instruction. Lanes' n-th visits of a place belong together.
  void access(const Thread& thread, const char* kind, uint32_t address, uint32_t bytes,
              Here here);
  // Counts what is left: instructions that some lanes sat out.
  void finish_launch();
  std::vector<Count> counts() const;

 private:
  struct Instruction {
    uint32_t lanes = 0;
    std::array<uint32_t, 32> addresses{};
    uint32_t bytes = 0;
  };
  struct Pending {  // of one warp at one place
    std::array<uint64_t, 32> visits{};
    uint64_t first = 0;  // visit of instructions.front()
    std::deque<Instruction> instructions;
  };
  using Place = std::tuple<std::string, int, std::string>;  // file, line, kind

  void count(const Place& place, const Instruction& instruction);

  std::map<std::tuple<uint32_t, int, Place>, Pending> pending_;
  std::map<Place, Count> counts_;
};

}  // namespace emu
