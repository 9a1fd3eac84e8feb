// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/product.h"

#include <algorithm>

namespace exl3::cpu {

Product::Product(const Trellis& w, int64_t first_column, int64_t columns, int64_t rows,
                 bool exact, Isa isa)
    : w_(w),
      first_strip_(first_column / kTileSide),
      columns_(columns),
      rows_(rows),
      kernel_(&select_kernel(isa, w.codebook, rows, exact)),
      x_(kernel_->packed_bytes(rows, w.k)),
      y_(rows * columns) {}

void Product::multiply(int64_t unit) {
  const int64_t first = unit * unit_strips();
  kernel_->multiply(w_, first_strip_ + first, std::min(unit_strips(), strips() - first),
                    x_.data(), rows_, y_.data() + first * kTileSide, columns_);
}

void multiply_all(std::vector<Product>& products, const ParallelFor& parallel) {
  std::vector<int64_t> ends;  // of each product's units among all
  int64_t total = 0;
  for (const Product& product : products) ends.push_back(total += product.units());
  parallel(total, [&](int64_t unit) {
    const auto end = std::upper_bound(ends.begin(), ends.end(), unit);
    Product& product = products[end - ends.begin()];
    product.multiply(unit - (*end - product.units()));
  });
}

}  // namespace exl3::cpu
