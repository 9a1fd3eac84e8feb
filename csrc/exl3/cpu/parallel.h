// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// How kernels use threads without knowing whose they are.
#pragma once

#include <cstdint>
#include <functional>

namespace exl3::cpu {

// Calls body(i) once for every i in [0, count), from several threads, and returns when
// all are done. Units go to whichever thread is free, since another process may hold a
// core; no result depends on which thread that is.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

}  // namespace exl3::cpu
