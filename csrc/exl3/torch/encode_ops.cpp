// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The encoder's op.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <tuple>

#include "exl3/codec/trellis.h"
#include "exl3/encode/tiers.h"
#include "exl3/encode/viterbi.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// tiles float32 [num, 256], contiguous. Returns packed int16 [num, words] and values
// float32 [num, 256].
std::tuple<Tensor, Tensor> encode_tiles(Tensor tiles, int64_t words, int64_t codebook) {
  STD_TORCH_CHECK(exl3::legal_words(words, codebook), "encode_tiles: codebook ",
                  codebook, " has no tiles of ", words, " words");
  STD_TORCH_CHECK(tiles.scalar_type() == ScalarType::Float && tiles.dim() == 2 &&
                      tiles.size(1) == exl3::kTileWeights && tiles.is_contiguous(),
                  "encode_tiles: tiles must be float32 [num, 256], contiguous");
  const int64_t num = tiles.size(0);
  Tensor packed = torch::stable::new_empty(tiles, {num, words}, ScalarType::Short);
  Tensor values = torch::stable::new_empty(tiles, {num, exl3::kTileWeights});

  const float* in = tiles.const_data_ptr<float>();
  uint16_t* out = reinterpret_cast<uint16_t*>(packed.mutable_data_ptr<int16_t>());
  float* decoded = values.mutable_data_ptr<float>();
  constexpr int64_t kBatch = exl3::encode::kBatch;
  const int64_t batches = (num + kBatch - 1) / kBatch;
  const exl3::encode::Tier tier = exl3::encode::usable_tier();
  // Threads take batches as they get free, since another process may hold a core.
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), batches);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    exl3::encode::TileEncoder encoder(static_cast<int>(words),
                                      static_cast<exl3::Codebook>(codebook), tier);
    for (int64_t batch = next++; batch < batches; batch = next++) {
      const int64_t first = batch * kBatch;
      encoder.encode(in + first * exl3::kTileWeights,
                     static_cast<int>(std::min(kBatch, num - first)),
                     out + first * words, decoded + first * exl3::kTileWeights);
    }
  });
  return {packed, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("encode_tiles(Tensor tiles, int words, int codebook) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("encode_tiles", TORCH_BOX(&encode_tiles));
}
