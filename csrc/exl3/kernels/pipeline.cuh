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

  template <Decoder kDecoder>
  static __device__ __forceinline__ void multiply_stage(
      uint32_t stage, const typename LaneBits<kWords>::Place& place, Hash hash,
      Accumulators<kRows>& sums) {
    const int lane = threadIdx.x % 32;
    const uint32_t strip = stage + kActivationBytes + threadIdx.x / 32 * kStripBytes;
    // ldmatrix: lanes 0-15 name the rows' first eight columns, lanes 16-31 the rest.
    const uint32_t row = stage + lane % 16 * kRowBytes;
    const uint32_t chunk = (lane / 16 ^ (lane & 7)) * kChunkBytes;
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      const TileOperands<kCopies> weights =
          decode_tile<kWords, kDecoder>(strip + tile * kWords * 2, place, hash);
      const uint32_t (&b)[4 * kCopies] = weights.registers;
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kCopies; ++j) {
          const int operand = (tile * kCopies + j) * 2 * kChunkBytes;
          uint32_t a[4];
          ptx::load_matrices(a, row + (chunk ^ operand) + i * 16 * kRowBytes);
          ptx::multiply_add(sums.values[i][0], a, b[2 * j], b[2 * j + 1]);
          ptx::multiply_add(sums.values[i][1], a, b[2 * (kCopies + j)],
                            b[2 * (kCopies + j) + 1]);
        }
      }
    }
  }

  // sums += activations x weights over the operands' stages. Uses shared memory from
  // `base` on, kBytes; the caller puts a barrier before its next use of that memory.
  template <Decoder kDecoder>
  static __device__ __forceinline__ void run(uint32_t base, const Operands& from,
                                             Accumulators<kRows>& sums) {
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
