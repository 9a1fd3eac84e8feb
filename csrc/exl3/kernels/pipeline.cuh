// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The main loop of every product: [rows, k] activations times 128 trellis columns.
//
// A block of eight warps. A warp owns one strip, 16 columns, and all the block's rows,
// so a tile is decoded once a block. A stage of the pipeline holds 64 steps of k:
//
//   activations  [kRows, 64] fp16: rows of 128 bytes, 16-byte chunks swizzled by row
//   strips       8 x 4 tiles, as stored: a warp copies and reads its own strip only
//
// Decoder::kUnrounded leaves a weight as two numbers to be added. Its activations are
// stored twice, side by side, so that the tensor core multiplies both numbers with the
// same one and adds them up with all the rest. Of every 16 (transform.cuh):
//
//   0 0 2 2 4 4 6 6  1 1 3 3 5 5 7 7 | 8 8 10 10 12 12 14 14  9 9 11 11 13 13 15 15
//
// which are two operands for a tile, where there was one: of rows 2t and 2t+1, and of
// those 8 below.
//
// Decoder::kIntegers leaves a weight as four bytes. Its activations are two bytes each,
// a high and a low one, four times side by side in the same order: in bytes
//
//   0 0 0 0 2 2 2 2 4 4 4 4 6 6 6 6  1 1 1 1 3 3 3 3 5 5 5 5 7 7 7 7 | 8 8 8 8 ...
//
// of a stage first all high bytes and then all low ones, which are summed apart.
#pragma once

#include <cstdint>

#include "exl3/kernels/params.h"
#include "exl3/kernels/trellis.cuh"

namespace exl3 {

constexpr int kStageTiles = kStageDepth / kTileSide;
constexpr int kChunkBytes = 16;  // of one asynchronous copy

// What a block multiplies.
struct Operands {
  const uint16_t* activations;  // [rows, k * copies] fp16, the block's first row
  const uint16_t* strip;        // [k/16, words] int16, this warp's
  Hash hash;                    // of the strip's codebook
  int64_t k;                    // in-features
  int rows;                     // that exist; the block's other rows are zeros
  int first_stage, end_stage;   // the part of k to add up, in units of kStageDepth
};

template <int kRows>
struct Accumulators {
  // By 16 rows and 8 columns, as the tensor core leaves them.
  float values[kRows / 16][2][4];
};

// The same of 16 rows, in integers: of the activations' high bytes, and of the low
// ones. kLongestIntegers of k at most, or they would overflow.
struct IntegerSums {
  int values[2][2][4];
};
constexpr int kLongestIntegers = 16384;
static_assert(int64_t{128} * 4 * 255 * kLongestIntegers < int64_t{1} << 31);

template <int kRows>
__device__ __forceinline__ void multiply_add(Accumulators<kRows>& sums, int /*pass*/,
                                             int block, int half,
                                             const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  ptx::multiply_add(sums.values[block][half], a, b0, b1);
}

__device__ __forceinline__ void multiply_add(IntegerSums& sums, int pass, int /*block*/,
                                             int half, const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  ptx::multiply_add_bytes(sums.values[pass][half], a, b0, b1);
}

template <int kRows>
__device__ __forceinline__ void clear(Accumulators<kRows>& sums) {
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums.values[i][j / 4][j % 4] = 0.0f;
  }
}

// kCopies: of each activation (trellis.cuh).
template <int kRows, int kWords, int kCopies = 1>
struct Pipeline {
  // Three stages where a stage is large: it is work enough to hide the copies.
  static constexpr int kStages = kRows > 64 || kWords > 64 ? 3 : 4;
  // So few rows are mostly one block's: then nobody else reads its weights, and L2 has
  // better use for the space.
  static constexpr bool kReadOnce = kRows == 16;
  static constexpr int kStripBytes = kStageTiles * kWords * 2;
  static constexpr int kRowElements = kStageDepth * kCopies;  // activations
  static constexpr int kRowBytes = kRowElements * 2;
  static constexpr int kActivationBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kActivationBytes + kBlockWarps * kStripBytes;
  static constexpr int kBytes = kStages * kStageBytes;

  static __device__ __forceinline__ void copy_activations(uint32_t stage,
                                                          const Operands& from,
                                                          int step) {
    constexpr int kRowChunks = kRowBytes / kChunkBytes;
#pragma unroll
    for (int i = 0; i < kRows * kRowChunks; i += kBlockThreads) {
      const int chunk = i + threadIdx.x;
      if (kRows * kRowChunks % kBlockThreads != 0 && chunk >= kRows * kRowChunks) break;
      const int row = chunk / kRowChunks;
      const int column = chunk % kRowChunks;
      const uint16_t* source = from.activations + row * from.k * kCopies +
                               int64_t{step} * kRowElements + column * 8;
      ptx::copy_async_or_zero(
          stage + row * kRowBytes + (column ^ (row & 7)) * kChunkBytes, source,
          row < from.rows);
    }
  }

  static __device__ __forceinline__ void copy_strip(uint32_t stage,
                                                    const Operands& from, int step,
                                                    ptx::CachePolicy policy) {
    constexpr int kChunks = kStripBytes / kChunkBytes;
    const uint16_t* source = from.strip + int64_t{step} * (kStageTiles * kWords);
    const uint32_t target = stage + kActivationBytes + threadIdx.x / 32 * kStripBytes;
#pragma unroll
    for (int i = 0; i < kChunks; i += 32) {
      const int chunk = i + threadIdx.x % 32;
      if (kChunks % 32 != 0 && chunk >= kChunks) break;
      if constexpr (kReadOnce) {
        ptx::copy_async(target + chunk * kChunkBytes, source + chunk * 8, policy);
      } else {
        ptx::copy_async(target + chunk * kChunkBytes, source + chunk * 8);
      }
    }
  }

  template <Decoder kDecoder, class Sums>
  static __device__ __forceinline__ void multiply_stage(
      uint32_t stage, const typename LaneBits<kWords>::Place& place, Hash hash,
      Sums& sums) {
    constexpr int kPasses = kDecoder == Decoder::kIntegers ? 2 : 1;
    constexpr int kOperands = is_wide(kDecoder) ? 2 : 1;  // of a tile and pass
    const int lane = threadIdx.x % 32;
    const uint32_t strip = stage + kActivationBytes + threadIdx.x / 32 * kStripBytes;
    // ldmatrix: lanes 0-15 name the rows' first eight columns, lanes 16-31 the rest.
    const uint32_t row = stage + lane % 16 * kRowBytes;
    const uint32_t chunk = (lane / 16 ^ (lane & 7)) * kChunkBytes;
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      const TileOperands<is_wide(kDecoder)> weights =
          decode_tile<kWords, kDecoder>(strip + tile * kWords * 2, place, hash);
      const uint32_t (&b)[4 * kOperands] = weights.registers;
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kPasses * kOperands; ++j) {
          const int pass = j / kOperands;
          const int first = j % kOperands * 2;  // of b's registers
          const int operand = (pass * kStageTiles + tile) * kOperands + j % kOperands;
          uint32_t a[4];
          ptx::load_matrices(
              a, row + (chunk ^ operand * 2 * kChunkBytes) + i * 16 * kRowBytes);
          multiply_add(sums, pass, i, 0, a, b[first], b[first + 1]);
          multiply_add(sums, pass, i, 1, a, b[2 * kOperands + first],
                       b[2 * kOperands + first + 1]);
        }
      }
    }
  }

  // sums += activations x weights over the operands' stages. Uses shared memory from
  // `base` on, kBytes; the caller puts a barrier before its next use of that memory.
  template <Decoder kDecoder, class Sums>
  static __device__ __forceinline__ void run(uint32_t base, const Operands& from,
                                             Sums& sums) {
    static_assert(copies_of(kDecoder) == kCopies);
    const auto place = LaneBits<kWords>::place(threadIdx.x % 32);
    const int stages = from.end_stage - from.first_stage;
    const ptx::CachePolicy policy = kReadOnce ? ptx::evict_first_policy() : 0;
    // Weights don't depend on the launch before; activations do.
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < stages) {
        copy_strip(base + i * kStageBytes, from, from.first_stage + i, policy);
      }
    }
    ptx::wait_for_previous_launch();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < stages) {
        copy_activations(base + i * kStageBytes, from, from.first_stage + i);
      }
      ptx::commit_copies();
    }
    int reading = 0;  // which of the stages
    int writing = kStages - 1;
    for (int i = 0; i < stages; ++i) {
      // This thread's copies of stage i have landed; after the barrier all threads'
      // have, and nobody reads stage i - 1 any more, which is filled next.
      ptx::wait_copies<kStages - 2>();
      __syncthreads();
      const int next = i + kStages - 1;
      if (next < stages) {
        copy_strip(base + writing * kStageBytes, from, from.first_stage + next, policy);
        copy_activations(base + writing * kStageBytes, from, from.first_stage + next);
      }
      ptx::commit_copies();  // an empty group keeps the count right at the end
      multiply_stage<kDecoder>(base + reading * kStageBytes, place, from.hash, sums);
      reading = reading + 1 == kStages ? 0 : reading + 1;
      writing = writing + 1 == kStages ? 0 : writing + 1;
    }
  }
};

}  // namespace exl3
