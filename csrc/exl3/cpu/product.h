// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Products of packed activations with trellis matrices, several at once, so that a few
// rows for each of many matrices still occupy every thread.
#pragma once

#include <cstdint>
#include <vector>

#include "exl3/cpu/buffer.h"
#include "exl3/cpu/kernel.h"
#include "exl3/cpu/parallel.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {

// y [rows, columns] = x [rows, k] * w [:, first_column : first_column + columns], all
// in the rotated domain; columns are multiples of 16.
class Product {
 public:
  Product(const Trellis& w, int64_t first_column, int64_t columns, int64_t rows,
          bool exact, Isa isa);

  // Row number `row` of x, rotated. Rows may be packed from several threads.
  void pack(const float* x, int64_t row) {
    kernel_->pack(x, w_.k, row, rows_, x_.data());
  }
  float* y(int64_t row) { return y_.data() + row * columns_; }
  int64_t columns() const { return columns_; }
  // Strips are computed in units, which share a pass over the activations.
  int64_t units() const { return (strips() + unit_strips() - 1) / unit_strips(); }
  void multiply(int64_t unit);

 private:
  int64_t strips() const { return columns_ / kTileSide; }
  // Many rows profit from a pass over them for a whole Hadamard block; few rows have
  // units as small as kernels take them, so that there is work for many threads.
  int64_t unit_strips() const { return rows_ < 16 ? 2 : kHadamardBlock / kTileSide; }

  Trellis w_;
  int64_t first_strip_;
  int64_t columns_;
  int64_t rows_;
  const Kernel* kernel_;
  Buffer<std::byte> x_;
  Buffer<float> y_;
};

// Computes every y, in parallel over all units of all products.
void multiply_all(std::vector<Product>& products, const ParallelFor& parallel);

}  // namespace exl3::cpu
