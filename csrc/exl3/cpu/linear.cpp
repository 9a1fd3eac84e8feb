// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/linear.h"

#include <algorithm>

#include "exl3/cpu/buffer.h"
#include "exl3/cpu/product.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {
namespace {

// Rows that share one decoding of the weights. More would cost scratch, and the rows'
// part of a block would leave the L2 cache.
constexpr int64_t kRowsAtOnce = 256;

int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

class Rows {
 public:
  Rows(const Linear& layer, int64_t first, int64_t count)
      : layer_(layer), first_(first), count_(count) {
    for (const Shard& shard : layer.shards) {
      const int64_t begin = first_column(shard);
      const int64_t end = shard.skip + shard.keep;
      const int64_t columns = (end - begin + kHadamardBlock - 1) / kHadamardBlock;
      products_.emplace_back(shard.w, begin, columns * kHadamardBlock, count,
                             layer.exact, layer.isa);
      starts_.push_back(width_);
      width_ += shard.keep;
    }
  }

  void run(const ParallelFor& parallel) {
    const int64_t units = count_ * products_.size();
    parallel(units, [&](int64_t unit) { rotate_in(unit / count_, unit % count_); });
    multiply_all(products_, parallel);
    parallel(units, [&](int64_t unit) { rotate_out(unit / count_, unit % count_); });
  }

 private:
  // Hadamard blocks are computed whole, so skip is rounded down to one.
  static int64_t first_column(const Shard& shard) {
    return shard.skip / kHadamardBlock * kHadamardBlock;
  }

  const void* element(const void* tensor, int64_t index) const {
    return static_cast<const char*>(tensor) + index * element_bytes(layer_.dtype);
  }

  void rotate_in(int64_t index, int64_t row) {
    const Shard& shard = layer_.shards[index];
    Buffer<float> rotated(shard.w.k);
    rotation_.input(element(layer_.x, (first_ + row) * layer_.width), layer_.dtype,
                    layer_.width, shard.suh, shard.w.k, rotated.data());
    products_[index].pack(rotated.data(), row);
  }

  void rotate_out(int64_t index, int64_t row) {
    const Shard& shard = layer_.shards[index];
    Product& product = products_[index];
    const int64_t begin = first_column(shard);
    rotation_.output(product.y(row), shard.svh + begin, product.columns());
    float* kept = product.y(row) + (shard.skip - begin);
    if (layer_.bias != nullptr) {
      rotation_.add(layer_.bias, starts_[index], shard.keep, layer_.dtype, kept);
    }
    rotation_.store(kept, shard.keep, layer_.out,
                    (first_ + row) * width_ + starts_[index], layer_.dtype);
  }

  const Linear& layer_;
  const Rotation& rotation_ = select_rotation(layer_.isa);
  int64_t first_;
  int64_t count_;
  int64_t width_ = 0;
  std::vector<int64_t> starts_;  // of each shard's columns in out
  std::vector<Product> products_;
};

}  // namespace

void linear(const Linear& layer, const ParallelFor& parallel) {
  for (int64_t first = 0; first < layer.rows; first += kRowsAtOnce) {
    Rows(layer, first, std::min(kRowsAtOnce, layer.rows - first)).run(parallel);
  }
}

}  // namespace exl3::cpu
