// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Twin of exl3/ptx/matrix.cuh.
#pragma once

#include "emu/collective.h"
#include "emu/half.h"

namespace ptx {

inline void load_matrices(uint32_t (&registers)[4], uint32_t row_address,
                          emu::Here here = emu::Here::at()) {
  // Lane by lane, so that a fault names the lane whose address is wrong.
  uint32_t row[4];
  emu::Thread& self = *emu::current;
  if (emu::device->banks) {
    emu::device->banks->access(self, "ldmatrix", row_address, 16, here);
  }
  self.block->shared.read(self, row_address, row, 16, here);
  struct Operand {
    const uint32_t* row;
    uint32_t* registers;
  } operand{row, registers};
  emu::collective("ldmatrix", operand, here, [](Operand* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        lanes[lane]->registers[matrix] = lanes[8 * matrix + lane / 4]->row[lane % 4];
      }
    }
  });
}

// Products and sums in double, rounded once at the end: no order of summation, so the
// real tensor core's result differs in the last bits.
inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                         uint32_t b1, emu::Here here = emu::Here::at()) {
  struct Operand {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } operand{d, a, {b0, b1}};
  emu::collective("mma", operand, here, [](Operand* const* lanes) {
    float left[16][16];
    float right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int group = lane / 4;
      const int pair = 2 * (lane % 4);
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          const auto bits = static_cast<uint16_t>(lanes[lane]->a[i] >> (16 * half));
          left[group + 8 * (i & 1)][pair + half + 8 * (i >> 1)] =
              emu::half_to_float(bits);
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int half = 0; half < 2; ++half) {
          const auto bits = static_cast<uint16_t>(lanes[lane]->b[i] >> (16 * half));
          right[pair + half + 8 * i][group] = emu::half_to_float(bits);
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      double sums[8] = {};
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column) {
          sums[column] += double{left[row][k]} * double{right[k][column]};
        }
      }
      for (int column = 0; column < 8; ++column) {
        float& target =
            lanes[4 * (row % 8) + column / 2]->d[column % 2 + 2 * (row / 8)];
        target = static_cast<float>(target + sums[column]);
      }
    }
  });
}

// As on the GPU, a sum beyond int32 wraps around.
inline void multiply_add_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                               uint32_t b1, emu::Here here = emu::Here::at()) {
  struct Operand {
    int* d;
    const uint32_t* a;
    uint32_t b[2];
  } operand{d, a, {b0, b1}};
  emu::collective("mma", operand, here, [](Operand* const* lanes) {
    int8_t left[16][32];
    uint8_t right[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int group = lane / 4;
      const int first = 4 * (lane % 4);
      for (int i = 0; i < 4; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          left[group + 8 * (i & 1)][first + byte + 16 * (i >> 1)] =
              static_cast<int8_t>(lanes[lane]->a[i] >> (8 * byte));
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          right[first + byte + 16 * i][group] =
              static_cast<uint8_t>(lanes[lane]->b[i] >> (8 * byte));
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      int sums[8] = {};
      for (int k = 0; k < 32; ++k) {
        for (int column = 0; column < 8; ++column) {
          sums[column] += left[row][k] * right[k][column];
        }
      }
      for (int column = 0; column < 8; ++column) {
        int& target = lanes[4 * (row % 8) + column / 2]->d[column % 2 + 2 * (row / 8)];
        target = static_cast<int>(static_cast<uint32_t>(target) +
                                  static_cast<uint32_t>(sums[column]));
      }
    }
  });
}

}  // namespace ptx
