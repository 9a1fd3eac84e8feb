// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the kernels are told: plain structs that host code fills in, and the sizes that
// host and kernels share. No CUDA names, so that any compiler can read it.
//
// m tokens are `rows`; k are in-features and n out-features, as stored: multiples of
// 128.
#pragma once

#include <cstdint>

#include "exl3/codec/trellis.h"

namespace exl3 {

enum class ElementType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kHadamardBlock = 128;
constexpr int kBlockThreads = 256;
constexpr int kStageDepth = 64;  // of k, the unit in which it is split
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kBlockColumns = kBlockWarps * kTileSide;  // 128: a Hadamard block too
constexpr int kMaxShards = 8;                           // of one launch

// The codebook's hash of a state: state * multiplier + addend.
struct Hash {
  uint32_t multiplier, addend;
};

EXL3_HD constexpr Hash hash_of(Codebook codebook) {
  const uint32_t addend = hash_state(codebook, 0);
  return {hash_state(codebook, 1) - addend, addend};
}

// out = ((x * pre) H / sqrt(128)) * post. A linear's input transform is this with a
// slab for each of its matrices, all of the same x.
struct TransformParams {
  const void* x;         // [rows, width] of x_type
  const uint16_t* pre;   // [num_slabs, k] fp16, or null: ones
  const uint16_t* post;  // [num_slabs, k] fp16, or null: ones
  void* out;             // [num_slabs, rows, k * copies] of out_type
  ElementType x_type, out_type;
  int rows;
  int width;  // of x; where it is less than k, the rest is zeros
  int k;
  int num_slabs;
  int copies;  // of each result: 1, or 2 of fp16 in pipeline.cuh's order
  unsigned long long* clamped;  // how many results were beyond fp16; null: not counted
};

// The same to integers (quantize.cuh): out is [num_slabs, rows, k] of eight bytes each.
struct QuantizeParams {
  TransformParams transform;  // without post
  float* scales;              // [num_slabs, rows]
  int* stage_sums;            // [num_slabs, rows, k / kStageDepth]
};

// One matrix of a fused group.
struct GemmShard {
  int64_t trellis;    // its first word in the slab
  int64_t out_first;  // the out column that stored column 0 would have; may be negative
  int svh;            // its first scale
  int slab;           // whose transformed activations it takes
  int first_block;    // of the launch's blocks of 128 columns
  int keep_first, keep_end;  // stored columns that are kept
};

struct GemmParams {
  const uint16_t* activations;  // [slabs, rows, k * copies] fp16 (trellis.cuh)
  const float* scales;          // [slabs, rows]; if activations are integers
  const int* stage_sums;        // [slabs, rows, k / kStageDepth]; likewise
  const uint16_t* trellis;      // matrices [n/16, k/16, words], one after another
  const uint16_t* svh;          // fp16
  const void* bias;             // [out_columns] of `type`, or null
  void* out;                    // [rows, out_columns] of `type`
  float* parts;                 // [splits, tiles, block rows * 128]; if splits > 1
  unsigned* counters;           // [tiles], zeros; if splits > 1
  ElementType type;
  int rows;
  int k;
  int out_columns;
  int row_blocks, column_blocks;  // tiles = row_blocks * column_blocks
  int num_shards;
  GemmShard shards[kMaxShards];
  Hash hash;  // of the launch's codebook; the launcher fills it in
};

struct DequantizeParams {
  const uint16_t* trellis;  // [n/16, k/16, words] int16
  const uint16_t* suh;      // [k] fp16, or null: the inner matrix
  const uint16_t* svh;      // [n] fp16, or null together with suh
  float* out;               // [k, n]
  int k, n;
};

}  // namespace exl3
