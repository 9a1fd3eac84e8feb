// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// mul1 as an affine map of the sum of its hash's four bytes.
#pragma once

namespace exl3::cpu {

constexpr int kMaxByteSum = 4 * 255;
constexpr float kMul1Scale = 1774.0f / (1 << 18);                      // fp16 0x1EEE
constexpr float kMul1Offset = 1024 * kMul1Scale - 1329.0f / (1 << 7);  // fp16 0xC931

}  // namespace exl3::cpu
