// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Scratch memory of one call, aligned for every vector width and not initialized.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace exl3::cpu {

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t size, size_t step) {
  return (size + step - 1) / step * step;
}

template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count)
      : data_(static_cast<T*>(std::aligned_alloc(
            kCacheLine, round_up(count * sizeof(T) + 1, kCacheLine)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* data() { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

}  // namespace exl3::cpu
