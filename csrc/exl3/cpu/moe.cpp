// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/moe.h"

#include <algorithm>
#include <cmath>

#include "exl3/cpu/buffer.h"
#include "exl3/cpu/product.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {
namespace {

// Rows of one expert that share one decoding of its weights.
constexpr int64_t kRowsAtOnce = 256;
// Scratch of one batch of experts; more would leave the caches.
constexpr int64_t kBatchBytes = 32 << 20;

// Some of a virtual expert's routes.
struct Part {
  const VirtualExpert* expert;
  const Route* routes;
  int64_t rows;
};

// Parts that are computed together, so that few tokens still occupy every thread.
class Batch {
 public:
  Batch(const Moe& layer, std::vector<Part> parts, float* sums)
      : layer_(layer), parts_(std::move(parts)), sums_(sums) {
    for (const Part& part : parts_) {
      for (const Trellis* w : {&part.expert->gate, &part.expert->up}) {
        gate_up_.emplace_back(*w, 0, layer.intermediate, part.rows, layer.exact,
                              layer.isa);
      }
      down_.emplace_back(part.expert->down, 0, layer.hidden, part.rows, layer.exact,
                         layer.isa);
      for (int64_t row = 0; row < part.rows; ++row) {
        rows_.push_back({static_cast<int64_t>(down_.size()) - 1, row});
      }
    }
  }

  void run(const ParallelFor& parallel) {
    const int64_t rows = rows_.size();
    parallel(2 * rows, [&](int64_t unit) { rotate_in(rows_[unit / 2], unit % 2); });
    multiply_all(gate_up_, parallel);
    parallel(rows, [&](int64_t unit) { activate(rows_[unit]); });
    multiply_all(down_, parallel);
    parallel(layer_.hidden / kHadamardBlock, [&](int64_t block) { sum_up(block); });
  }

 private:
  struct Row {
    int64_t part;
    int64_t row;
  };

  // Of gate (0) or up (1).
  void rotate_in(const Row& row, int64_t projection) {
    const Part& part = parts_[row.part];
    const int64_t token = part.routes[row.row].token;
    const int64_t bytes = layer_.dtype == DType::kFloat32 ? 4 : 2;
    Buffer<float> rotated(layer_.hidden);
    rotation_.input(static_cast<const char*>(layer_.x) + token * layer_.width * bytes,
                    layer_.dtype, layer_.width,
                    part.expert->suh13 + projection * layer_.hidden, layer_.hidden,
                    rotated.data());
    gate_up_[2 * row.part + projection].pack(rotated.data(), row.row);
  }

  void activate(const Row& row) {
    const VirtualExpert& expert = *parts_[row.part].expert;
    const int64_t width = layer_.intermediate;
    float* gate = gate_up_[2 * row.part].y(row.row);
    float* up = gate_up_[2 * row.part + 1].y(row.row);
    rotation_.output(gate, expert.svh13, width);
    rotation_.output(up, expert.svh13 + width, width);
    for (int64_t i = 0; i < width; ++i) {
      const float g = std::min(gate[i], layer_.limit);
      const float u = std::clamp(up[i], -layer_.limit, layer_.limit);
      gate[i] = g / (1.0f + std::exp(-g)) * u;
    }
    rotation_.input(gate, DType::kFloat32, width, expert.suh2, width, up);
    down_[row.part].pack(up, row.row);
  }

  // One block of columns of all rows: threads share no sum.
  void sum_up(int64_t block) {
    const int64_t first = block * kHadamardBlock;
    for (const Row& row : rows_) {
      const Part& part = parts_[row.part];
      const Route& route = part.routes[row.row];
      float* y = down_[row.part].y(row.row) + first;
      float* sum = sums_ + route.token * layer_.hidden + first;
      rotation_.output(y, part.expert->svh2 + first, kHadamardBlock);
      for (int i = 0; i < kHadamardBlock; ++i) sum[i] += route.weight * y[i];
    }
  }

  const Moe& layer_;
  const Rotation& rotation_ = select_rotation(layer_.isa);
  std::vector<Part> parts_;
  float* sums_;  // [tokens, hidden]
  std::vector<Row> rows_;
  std::vector<Product> gate_up_;  // gate and up of each part
  std::vector<Product> down_;     // of each part
};

// Every virtual expert's routes, cut to at most kRowsAtOnce.
std::vector<Part> cut_parts(const Moe& layer) {
  std::vector<Part> parts;
  for (size_t index = 0; index < layer.experts.size(); ++index) {
    const std::vector<Route>& routes = layer.routes[index / layer.slices];
    const int64_t count = routes.size();
    for (int64_t first = 0; first < count; first += kRowsAtOnce) {
      parts.push_back({&layer.experts[index], routes.data() + first,
                       std::min(kRowsAtOnce, count - first)});
    }
  }
  return parts;
}

}  // namespace

void moe(const Moe& layer, const ParallelFor& parallel) {
  Buffer<float> sums(layer.tokens * layer.hidden);
  std::fill_n(sums.data(), layer.tokens * layer.hidden, 0.0f);
  // A row's activations and results: three of hidden and three of intermediate.
  const int64_t row_bytes = 12 * (layer.hidden + layer.intermediate);
  const int64_t batch_rows = std::max(kRowsAtOnce, kBatchBytes / row_bytes);

  std::vector<Part> parts;
  int64_t rows = 0;
  for (const Part& part : cut_parts(layer)) {
    if (rows + part.rows > batch_rows) {
      Batch(layer, std::move(parts), sums.data()).run(parallel);
      parts.clear();
      rows = 0;
    }
    parts.push_back(part);
    rows += part.rows;
  }
  if (rows > 0) Batch(layer, std::move(parts), sums.data()).run(parallel);

  const Rotation& rotation = select_rotation(layer.isa);
  parallel(layer.tokens, [&](int64_t token) {
    rotation.store(sums.data() + token * layer.hidden, layer.width, layer.out,
                   token * layer.width, layer.dtype);
  });
}

}  // namespace exl3::cpu
