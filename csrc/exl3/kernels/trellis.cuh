// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// From a tile in shared memory to the tensor core's operands, in registers.
//
// A lane's eight weights are its share of two 16 x 8 operands, and their states are
// windows of one run of ring bits. So a lane reads the run (two or three words), aligns
// it, cuts eight windows out of it at places known to the compiler, and decodes them:
// no lane needs another's bits, and no value passes through shared memory.
#pragma once

#include <cstdint>

#include "exl3/codec/codebook.h"
#include "exl3/codec/trellis.h"
#include "exl3/kernels/params.h"
#include "exl3/ptx/ptx.cuh"

namespace exl3 {

constexpr int kLaneWeights = 8;

// The run of ring bits that a lane's windows lie in:
//
//   ring words   |  last - 1  |    last    |
//   run             [w0][w1] ...  [w7]          each window 16 bits, overlapping
//                                     ^end      `shift` bits before the word's end
template <int kWords>
class LaneBits {
  static constexpr int kRingWords = kWords / 2;  // of 32 bits
  static constexpr int kLaneBits = kWords / 2;   // fresh bits of eight weights
  static constexpr int kRunBits = kLaneBits - end_bit(kWords, 0) + kStateBits;
  static constexpr bool kAligned = kLaneBits % 32 == 0;
  // Runs end at multiples of the lowest bit of kLaneBits.
  static constexpr int kMaxShift = kAligned ? 0 : 32 - (kLaneBits & -kLaneBits);
  static constexpr int kLoads = (kMaxShift + kRunBits + 31) / 32;
  static constexpr int kRunWords = (kRunBits + 31) / 32;

 public:
  // Where a lane's words are; the same in every tile.
  struct Place {
    uint32_t offsets[kLoads];  // bytes from the tile's start; the run's last word first
    uint32_t shift;
  };

  static __device__ __forceinline__ Place place(int lane) {
    const int end = (lane + 1) * kLaneBits;
    const int last = (end - 1) / 32;
    Place place;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int word = last - i;
      place.offsets[i] = 4 * (word < 0 ? word + kRingWords : word);
    }
    place.shift = (32 - end % 32) % 32;
    return place;
  }

  // Reads the run from the tile at this shared address.
  __device__ __forceinline__ LaneBits(uint32_t tile, const Place& place) {
    uint32_t words[kLoads + 1];
    words[kLoads] = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      words[i] = ptx::load_shared<uint32_t>(tile + place.offsets[i]);
    }
#pragma unroll
    for (int i = 0; i < kRunWords; ++i) {
      run_[i] =
          kAligned ? words[i] : __funnelshift_r(words[i], words[i + 1], place.shift);
    }
    run_[kRunWords] = 0;
  }

  // The state of the lane's weight j.
  template <int j>
  __device__ __forceinline__ uint32_t state() const {
    constexpr int kFromEnd = kLaneBits - end_bit(kWords, j);
    constexpr int kWord = kFromEnd / 32;
    constexpr int kShift = kFromEnd % 32;
    const uint32_t low = run_[kWord];
    const uint32_t high = run_[kWord + 1];
    if constexpr (kShift < 24) {
      // Whole bytes of a word that is shifted by less than a byte. Windows a byte apart
      // share the shifted word: one instruction each, where shift and mask are two.
      constexpr int kByte = kShift / 8;
      const uint32_t shifted = __funnelshift_r(low, high, kShift % 8);
      return __byte_perm(shifted, 0, 0x4400 | (kByte + 1) << 4 | kByte);
    } else {
      return __funnelshift_r(low, high, kShift) & 0xFFFF;
    }
  }

 private:
  // The run's last bit is the lowest of run_[0]; a zero stands behind its first word.
  uint32_t run_[kRunWords + 1];
};

// What a codebook does with a state's hash. 3inst and mcg differ only in the hash,
// which is known at run time: one kernel serves both.
enum class Decoder {
  kHalves,     // 3inst, mcg: the sum of the hash's two halves, as fp16 numbers
  kBytes,      // mul1: the sum of the hash's four bytes, scaled
  kUnrounded,  // 3inst, mcg: the halves as they are; the tensor core adds them
  kIntegers,   // mul1: the bytes as they are; the tensor core adds them
};

// The decoder of a codebook whose weights nobody rounds.
EXL3_HD constexpr Decoder unrounded(Decoder decoder) {
  return decoder == Decoder::kHalves ? Decoder::kUnrounded : Decoder::kIntegers;
}

// How much room an activation takes, in units of fp16: kUnrounded has it twice, and
// kIntegers four times in each of two bytes.
EXL3_HD constexpr int copies_of(Decoder decoder) {
  if (decoder == Decoder::kIntegers) return 4;
  return decoder == Decoder::kUnrounded ? 2 : 1;
}

// Whether a weight is a register of its own, and not half of one.
EXL3_HD constexpr bool is_wide(Decoder decoder) {
  return decoder == Decoder::kUnrounded || decoder == Decoder::kIntegers;
}

EXL3_HD constexpr Decoder decoder_of(Codebook codebook) {
  return codebook == Codebook::kMul1 ? Decoder::kBytes : Decoder::kHalves;
}

// What a state's value is the sum of: two fp16 numbers, or four bytes of an integer.
template <Decoder kDecoder>
__device__ __forceinline__ uint32_t decode_one(Hash hash, uint32_t state) {
  const uint32_t product = state * hash.multiplier + hash.addend;
  if constexpr (kDecoder == Decoder::kHalves || kDecoder == Decoder::kUnrounded) {
    return ptx::and_xor(product, 0x8FFF8FFFu, 0x3B603B60u);
  }
  return product;
}

// Two states to two fp16 values, the first one low: the format's values, bit for bit.
template <Decoder kDecoder>
__device__ __forceinline__ uint32_t decode_pair(Hash hash, uint32_t state0,
                                                uint32_t state1) {
  const uint32_t first = decode_one<kDecoder>(hash, state0);
  const uint32_t second = decode_one<kDecoder>(hash, state1);
  if constexpr (kDecoder == Decoder::kBytes) {
    // 0x6400 + s is the fp16 number 1024 + s, for s = the sum of the bytes.
    const uint32_t sum0 = __dp4a(first, 0x01010101u, 0x6400u);
    const uint32_t sum1 = __dp4a(second, 0x01010101u, 0x6400u);
    return ptx::fma_half2(__byte_perm(sum0, sum1, 0x5410), 0x1EEE1EEEu, 0xC931C931u);
  } else {
    return ptx::add_half2(__byte_perm(first, second, 0x5410),
                          __byte_perm(first, second, 0x7632));
  }
}

// A lane's share of a tile: operands of columns 0-7 (the first half of the registers)
// and 8-15 (the rest). Of each eight columns the rows are 2(lane%4), +1 and those 8
// below: a register for two rows, or for each its two halves or four bytes.
template <bool kWide>
struct TileOperands {
  uint32_t registers[kWide ? 8 : 4];
};

template <int kWords, Decoder kDecoder>
__device__ __forceinline__ TileOperands<is_wide(kDecoder)> decode_tile(
    uint32_t tile, const typename LaneBits<kWords>::Place& place, Hash hash) {
  const LaneBits<kWords> bits(tile, place);
  if constexpr (is_wide(kDecoder)) {
    return {{decode_one<kDecoder>(hash, bits.template state<0>()),
             decode_one<kDecoder>(hash, bits.template state<1>()),
             decode_one<kDecoder>(hash, bits.template state<2>()),
             decode_one<kDecoder>(hash, bits.template state<3>()),
             decode_one<kDecoder>(hash, bits.template state<4>()),
             decode_one<kDecoder>(hash, bits.template state<5>()),
             decode_one<kDecoder>(hash, bits.template state<6>()),
             decode_one<kDecoder>(hash, bits.template state<7>())}};
  } else {
    return {{decode_pair<kDecoder>(hash, bits.template state<0>(),
                                   bits.template state<1>()),
             decode_pair<kDecoder>(hash, bits.template state<2>(),
                                   bits.template state<3>()),
             decode_pair<kDecoder>(hash, bits.template state<4>(),
                                   bits.template state<5>()),
             decode_pair<kDecoder>(hash, bits.template state<6>(),
                                   bits.template state<7>())}};
  }
}

// The same for a codebook known to the compiler.
template <int kWords, Codebook kCodebook>
__device__ __forceinline__ TileOperands<false> decode_tile(
    uint32_t tile, const typename LaneBits<kWords>::Place& place) {
  return decode_tile<kWords, decoder_of(kCodebook)>(tile, place, hash_of(kCodebook));
}

}  // namespace exl3
