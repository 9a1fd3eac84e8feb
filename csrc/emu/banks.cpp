// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Counts wavefronts.
#include "emu/banks.h"

#include <algorithm>
#include <set>

#include "emu/block.h"

namespace emu {

void BankCounter::access(const Thread& thread, const char* kind, uint32_t address,
                         uint32_t bytes, Here here) {
  const Place place{here.file, here.line, kind};
  Pending& pending = pending_[{thread.block->number, thread.warp->number, place}];
  const uint64_t index = pending.visits[thread.lane]++ - pending.first;
  if (index >= pending.instructions.size()) pending.instructions.resize(index + 1);
  Instruction& instruction = pending.instructions[index];
  instruction.lanes |= 1u << thread.lane;
  instruction.addresses[thread.lane] = address;
  instruction.bytes = bytes;
  while (!pending.instructions.empty() &&
         pending.instructions.front().lanes == 0xffffffffu) {
    count(place, pending.instructions.front());
    pending.instructions.pop_front();
    ++pending.first;
  }
}

void BankCounter::finish_launch() {
  for (auto& [key, pending] : pending_) {
    for (const Instruction& instruction : pending.instructions) {
      count(std::get<2>(key), instruction);
    }
  }
  pending_.clear();
}

void BankCounter::count(const Place& place, const Instruction& instruction) {
  Count& total = counts_[place];
  const int lanes_together = static_cast<int>(std::min(32u, 128 / instruction.bytes));
  ++total.instructions;
  for (int start = 0; start < 32; start += lanes_together) {
    std::array<std::set<uint32_t>, 32> words;
    for (int lane = start; lane < start + lanes_together; ++lane) {
      if (!(instruction.lanes >> lane & 1)) continue;
      const uint32_t first = instruction.addresses[lane] / 4;
      const uint32_t last = (instruction.addresses[lane] + instruction.bytes - 1) / 4;
      for (uint32_t word = first; word <= last; ++word) words[word % 32].insert(word);
    }
    size_t wavefronts = 0;
    for (const auto& bank : words) wavefronts = std::max(wavefronts, bank.size());
    total.wavefronts += wavefronts;
    if (wavefronts > 1) total.conflicts += wavefronts - 1;
  }
}

std::vector<BankCounter::Count> BankCounter::counts() const {
  std::vector<Count> result;
  for (const auto& [place, count] : counts_) {
    const Here here{std::get<0>(place).c_str(), std::get<1>(place)};
    result.push_back(count);
    result.back().place = to_string(here) + " " + std::get<2>(place);
  }
  return result;
}

}  // namespace emu
