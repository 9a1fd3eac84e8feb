// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Loads and stores. Shared memory is addressed by byte offsets from shared_base().
#pragma once

#include <cstdint>

namespace ptx {

// Where the block's dynamic shared memory begins.
__device__ __forceinline__ uint32_t shared_base() {
  extern __shared__ __align__(128) char shared_memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
}

// The compiler sees through the conversion and emits LDS and STS.
template <class T>
__device__ __forceinline__ T load_shared(uint32_t address) {
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

template <class T>
__device__ __forceinline__ void store_shared(uint32_t address, T value) {
  *static_cast<T*>(__cvta_shared_to_generic(address)) = value;
}

template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *address;
}

// For what no thread writes during the launch: may go through the read-only cache.
template <class T>
__device__ __forceinline__ T load_constant(const T* address) {
  return __ldg(address);
}

template <class T>
__device__ __forceinline__ void store_global(T* address, T value) {
  *address = value;
}

}  // namespace ptx
