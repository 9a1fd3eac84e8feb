// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The head of a workspace. It must be zeros before the first launch, and outlives every
// launch; what is behind it belongs to one op at a time.
#pragma once

#include <cstddef>

namespace exl3 {

// How many values were clamped to fp16's range, 64 bits; the rest is unused.
constexpr size_t kStatisticsBytes = 256;
// Of sums that blocks share. Zeros again after each launch.
constexpr size_t kCounterBytes = 16 * 1024;
constexpr size_t kHeadBytes = kStatisticsBytes + kCounterBytes;

inline unsigned long long* clamped_of(void* workspace) {
  return static_cast<unsigned long long*>(workspace);
}

inline unsigned* counters_of(void* workspace) {
  return reinterpret_cast<unsigned*>(static_cast<char*>(workspace) + kStatisticsBytes);
}

}  // namespace exl3
