// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// In which order the emulator runs what may run: the order is never the kernel's to
// know, so a correct kernel gives the same bits under each.
#pragma once

#include <cstdint>

namespace emu {

struct Schedule {
  enum class Kind {
    kFair,      // warps take turns, lanes from 0 up, blocks from the first on
    kReversed,  // the same, from the last warp, lane and block on
    kUnfair,    // a random warp runs ahead as far as barriers let it; then the next
  };

  Kind kind = Kind::kFair;
  uint32_t seed = 0;

  // 0 and 1 are the fair ones; every other number is the seed of an unfair one.
  static Schedule numbered(uint32_t number) {
    if (number == 0) return {Kind::kFair, 0};
    if (number == 1) return {Kind::kReversed, 0};
    return {Kind::kUnfair, number};
  }
};

// xorshift32: small, repeatable, and the same on every machine.
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u | 1u) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }

 private:
  uint32_t state_;
};

}  // namespace emu
