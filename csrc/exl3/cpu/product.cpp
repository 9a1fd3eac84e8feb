// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/product.h"

#include <algorithm>

namespace exl3::cpu {

Product::Product(const Trellis& w, int64_t first_column, int64_t columns, int64_t rows,
                 bool exact)
    : w_(w),
      first_strip_(first_column / kTileSide),
      columns_(columns),
      rows_(rows),
      kernel_(&select_kernel(w.codebook, rows, exact)),
      x_(kernel_->packed_bytes(rows, w.k)),
      y_(rows * columns) {}

void Product::multiply(int64_t strip) {
  kernel_->multiply(w_, first_strip_ + strip, x_.data(), rows_,
                    y_.data() + strip * kTileSide, columns_);
}

void multiply_all(std::vector<Product>& products, const ParallelFor& parallel) {
  std::vector<int64_t> ends;  // of each product's strips among all
  int64_t total = 0;
  for (const Product& product : products) ends.push_back(total += product.strips());
  parallel(total, [&](int64_t unit) {
    const auto end = std::upper_bound(ends.begin(), ends.end(), unit);
    Product& product = products[end - ends.begin()];
    product.multiply(unit - (*end - product.strips()));
  });
}

}  // namespace exl3::cpu
