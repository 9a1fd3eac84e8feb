// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Tables of what depends on the words of a tile: 16, 24, ... 128, half a bit apart.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace exl3::cpu {

constexpr int kLeastWords = 16;
constexpr int kWordsStep = 8;
constexpr int kNumWords = 15;

constexpr int words_index(int words) { return (words - kLeastWords) / kWordsStep; }

template <auto kMake, size_t... kIndex>
constexpr auto by_words(std::index_sequence<kIndex...>) {
  return std::array{kMake(kLeastWords + kWordsStep * static_cast<int>(kIndex))...};
}

// {kMake(16), kMake(24), ... kMake(128)}
template <auto kMake>
constexpr auto by_words() {
  return by_words<kMake>(std::make_index_sequence<kNumWords>());
}

}  // namespace exl3::cpu
