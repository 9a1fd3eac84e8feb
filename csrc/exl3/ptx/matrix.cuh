// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The tensor core, and the load that feeds it.
#pragma once

#include <cstdint>

namespace ptx {

// Four 8x8 matrices of 16-bit values. Lanes 8i to 8i+7 give the addresses of matrix i's
// rows, 16 bytes each; register i gets row lane/4, columns 2(lane%4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&registers)[4],
                                              uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]),
                 "=r"(registers[3])
               : "r"(row_address)
               : "memory");
}

// d += a b for a [16, 16] and b [16, 8] of fp16, d [16, 8] of float. Two values a
// register; with g = lane/4 and t = lane%4:
//   a: (row g, columns 2t, 2t+1), (row g+8, same), (row g, columns 2t+8, ...), (g+8,
//   ...) b: (rows 2t, 2t+1, column g), (rows 2t+8, 2t+9, column g) d: (row g, columns
//   2t, 2t+1), (row g+8, columns 2t, 2t+1)
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b for a [16, 32] of signed and b [32, 8] of unsigned bytes, d [16, 8] of
// int32. Four values a register, of four neighbouring k:
//   a: (row g, columns 4t to 4t+3), (row g+8, same), (row g, columns 4t+16, ...), (g+8,
//   ...) b: (rows 4t to 4t+3, column g), (rows 4t+16, ..., column g) d: as above
__device__ __forceinline__ void multiply_add_bytes(int (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
