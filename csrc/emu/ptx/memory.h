// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Twin of exl3/ptx/memory.cuh.
#pragma once

#include "emu/device.h"

namespace ptx {

inline uint32_t shared_base() { return 0; }

template <class T>
T load_shared(uint32_t address, emu::Here here = emu::Here::at()) {
  if (emu::device->banks) {
    emu::device->banks->access(*emu::current, "load", address, sizeof(T), here);
  }
  T value;
  emu::current->block->shared.read(*emu::current, address, &value, sizeof(T), here);
  return value;
}

template <class T>
void store_shared(uint32_t address, T value, emu::Here here = emu::Here::at()) {
  if (emu::device->banks) {
    emu::device->banks->access(*emu::current, "store", address, sizeof(T), here);
  }
  emu::current->block->shared.write(*emu::current, address, &value, sizeof(T), here);
}

template <class T>
T load_global(const T* address, emu::Here here = emu::Here::at()) {
  emu::device->memory.check_read(*emu::current, address, sizeof(T), here);
  return *address;
}

template <class T>
T load_constant(const T* address, emu::Here here = emu::Here::at()) {
  emu::device->memory.check_read(*emu::current, address, sizeof(T), here, true);
  return *address;
}

template <class T>
void store_global(T* address, T value, emu::Here here = emu::Here::at()) {
  emu::device->memory.check_write(*emu::current, address, sizeof(T), here);
  *address = value;
}

}  // namespace ptx
