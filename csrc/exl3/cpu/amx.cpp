// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AMX kernels. Weights and activations are integers of 16 bits, each the sum of two
// signed bytes, 256 * high + low; of the four products only low * low is left out,
// which is 1.3e-4 of the result.
//
// A tile register is 16 rows of 64 bytes. Weights are the left operand, whose rows are
// a strip's columns, since that is how they are decoded; rows of activations are
// columns of the right operand. So a product is y transposed, which is undone once, at
// the end.

#include "exl3/cpu/amx.h"

#if defined(__x86_64__)

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>

#include "exl3/cpu/avx512_quantize.h"
#include "exl3/cpu/avx512fp16_decode.h"
#include "exl3/cpu/buffer.h"
#include "exl3/cpu/integer_rows.h"
#include "exl3/cpu/mul1.h"

#define EXL3_AMX                                                                      \
  __attribute__((target(                                                              \
      "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512fp16,fma,f16c," \
      "amx-tile,amx-int8")))

namespace exl3::cpu {
namespace {

constexpr int64_t kSide = 16;   // rows of a register, and rows of y in it
constexpr int64_t kDepth = 64;  // k of a product of two registers
constexpr int64_t kRegister = kSide * kDepth;  // bytes
constexpr int64_t kPlanes = 2;                 // high bytes, then low ones
constexpr int64_t kBlock = 512;                // k that are decoded at once
constexpr int64_t kStripBlock = kBlock * kSide * kPlanes;
constexpr int64_t kSums = kSide * kSide;  // of one product

struct alignas(kCacheLine) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Holds this thread's registers in our configuration. Another library may believe that
// its own is still loaded, so that is put back.
class Registers {
 public:
  EXL3_AMX Registers() {
    _tile_storeconfig(&before_);
    const Configuration ours;
    _tile_loadconfig(&ours);
  }
  EXL3_AMX ~Registers() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(&before_);
    }
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

 private:
  Configuration before_;
};

// The order of k in 64 bytes is that of decoded weights: 32 bytes of two tiles, which
// take turns, each in the order of a vector of states; then 32 of the next two tiles.
struct Planes {
  __m512i high;
  __m512i low;
};

// Splits two vectors of 16-bit integers, whose elements take turns in the bytes.
EXL3_AMX inline Planes split(__m512i first, __m512i second) {
  // 256 * high + low with a signed low byte: what 128 more has in its upper byte.
  const __m512i half = _mm512_set1_epi16(0x80);
  const __m512i upper = _mm512_set1_epi16(static_cast<int16_t>(0xFF00));
  const __m512i first_up = _mm512_add_epi16(first, half);
  const __m512i second_up = _mm512_add_epi16(second, half);
  constexpr int kSelect = (0xF0 & 0xCC) | (0xAA & ~0xF0 & 0xFF);  // a ? b : c
  return {
      _mm512_ternarylogic_epi32(upper, second_up, _mm512_srli_epi16(first_up, 8),
                                kSelect),
      _mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(second, 8), first, kSelect)};
}

// ---- activations: [rows / 16][k / 64][plane][16][16 rows][4 k], after the affine maps
// --

constexpr int kLargest = 127 * 256 + 127;

int64_t groups_of(int64_t rows) { return (rows + kSide - 1) / kSide; }

size_t packed_bytes(int64_t rows, int64_t k) {
  return affine_bytes(rows) + groups_of(rows) * kSide * k * kPlanes;
}

template <typename Values>
EXL3_AMX void pack(const float* x, int64_t k, int64_t row, int64_t rows,
                   std::byte* packed) {
  Buffer<int16_t> integers(k);
  affine_of(packed, row) =
      quantize_row(x, k, kLargest, Values::kScale, Values::kOffset, integers.data());
  std::byte* out =
      packed + affine_bytes(rows) + row / kSide * kSide * k * kPlanes + row % kSide * 4;
  const __m512i places = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(4 * kSide));
  for (int64_t first = 0; first < k; first += kDepth) {
    const __m512i a = _mm512_loadu_si512(integers.data() + first);  // tiles 0 and 1
    const __m512i b = _mm512_loadu_si512(integers.data() + first + 32);  // 2 and 3
    const Planes planes = split(_mm512_shuffle_i64x2(a, b, _MM_SHUFFLE(1, 0, 1, 0)),
                                _mm512_shuffle_i64x2(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
    std::byte* to = out + first / kDepth * kPlanes * kRegister;
    _mm512_i32scatter_epi32(to, places, planes.high, 1);
    _mm512_i32scatter_epi32(to + kRegister, places, planes.low, 1);
  }
}

// ---- weights: [block / 64][plane][16 columns][64 k]
// ----------------------------------

// Integers of 2^-12: only values below 1/4 lose a bit.
template <Codebook kCodebook>
struct Values {
  static constexpr float kScale = 1.0f / 4096;
  static constexpr float kOffset = 0.0f;
  EXL3_AVX512FP16 static __m512i decode(__m512i state) {
    // The format's constant, with exponents 24 to 27 instead of 12 to 15.
    return _mm512_cvtph_epi16(add_halves<0x3B60 ^ 0x5000>(hash<kCodebook>(state)));
  }
};

// 32 * (sum of bytes - 510), which has no value in its low byte but its last bits.
template <>
struct Values<Codebook::kMul1> {
  static constexpr int kFactor = 32;
  static constexpr int kMiddle = kMaxByteSum / 2;
  static constexpr float kScale = kMul1Scale / kFactor;
  static constexpr float kOffset = kMul1Offset + kMiddle * kMul1Scale;
  EXL3_AVX512FP16 static __m512i decode(__m512i state) {
    const Hash z = hash<Codebook::kMul1>(state);
    const __m512i factor = _mm512_set1_epi8(kFactor);
    const __m512i sums = _mm512_add_epi16(_mm512_maddubs_epi16(z.low, factor),
                                          _mm512_maddubs_epi16(z.high, factor));
    return _mm512_sub_epi16(sums, _mm512_set1_epi16(kFactor * kMiddle));
  }
};

EXL3_AMX inline void store_columns(__m512i columns, std::byte* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(columns));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + kDepth),
                     _mm512_extracti64x4_epi64(columns, 1));
}

template <Codebook kCodebook>
EXL3_AMX void decode(const uint16_t* tiles, int words, int64_t count,
                     std::byte* block) {
  for (int64_t tile = 0; tile < count; tile += 2) {
    __m512i first[kVectors];
    for_states(tiles + tile * words, words, 1,
               [&first](int64_t vector, __m512i state)
                   EXL3_AMX { first[vector] = Values<kCodebook>::decode(state); });
    std::byte* to =
        block + tile / 4 * kPlanes * kRegister + tile % 4 / 2 * (kDepth / 2);
    for_states(tiles + (tile + 1) * words, words, 1,
               [&first, to](int64_t vector, __m512i state) EXL3_AMX {
                 const Planes planes =
                     split(first[vector], Values<kCodebook>::decode(state));
                 const int64_t column = vector / kHalves * 2 + vector % kHalves * 8;
                 store_columns(planes.high, to + column * kDepth);
                 store_columns(planes.low, to + kRegister + column * kDepth);
               });
  }
}

// Adds a block's products of two strips with 16 rows to `sums` [2 strips][2][16][16]:
// those of the high bytes, and the mixed ones. Two strips, because activations come
// from the L2 cache and weights from the L1.
EXL3_AMX void multiply_block(const std::byte* block, int64_t depth, const std::byte* x,
                             int32_t* sums) {
  constexpr int64_t kRow = 64;  // bytes
  _tile_loadd(0, sums, kRow);
  _tile_loadd(1, sums + kSums, kRow);
  _tile_loadd(2, sums + 2 * kSums, kRow);
  _tile_loadd(3, sums + 3 * kSums, kRow);
  for (int64_t i = 0; i < depth; ++i) {
    const std::byte* weights = block + i * kPlanes * kRegister;
    const std::byte* rows = x + i * kPlanes * kRegister;
    _tile_loadd(6, rows, kRow);
    _tile_loadd(4, weights, kRow);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, rows + kRegister, kRow);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, weights + kStripBlock, kRow);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_loadd(4, weights + kRegister, kRow);
    _tile_dpbssd(1, 4, 6);
    _tile_loadd(5, weights + kStripBlock + kRegister, kRow);
    _tile_dpbssd(3, 5, 6);
  }
  _tile_stored(0, sums, kRow);
  _tile_stored(1, sums + kSums, kRow);
  _tile_stored(2, sums + 2 * kSums, kRow);
  _tile_stored(3, sums + 3 * kSums, kRow);
}

template <Codebook kCodebook>
EXL3_AMX void multiply(const Trellis& w, int64_t first_strip, int64_t strips,
                       const std::byte* packed, int64_t rows, float* y,
                       int64_t y_stride) {
  const std::byte* x = packed + affine_bytes(rows);
  const auto* affine = reinterpret_cast<const Affine*>(packed);
  const int64_t groups = groups_of(rows);
  const int64_t group_bytes = kSide * w.k * kPlanes;
  // [strips / 2][groups][2 strips][2][16][16]; rows come in so many that strips are
  // even.
  const int64_t pair_sums = groups * 2 * kPlanes * kSums;
  Buffer<int32_t> sums(strips / 2 * pair_sums);
  std::fill_n(sums.data(), strips / 2 * pair_sums, 0);
  alignas(kCacheLine) std::byte block[2 * kStripBlock];
  {
    const Registers registers;
    for (int64_t first = 0; first < w.k; first += kBlock) {
      const int64_t tiles = std::min(kBlock, w.k - first) / kTileSide;
      const int64_t offset = first / kTileSide * w.words;
      for (int64_t pair = 0; pair < strips / 2; ++pair) {
        const int64_t strip = first_strip + 2 * pair;
        decode<kCodebook>(w.strip(strip) + offset, w.words, tiles, block);
        decode<kCodebook>(w.strip(strip + 1) + offset, w.words, tiles,
                          block + kStripBlock);
        for (int64_t group = 0; group < groups; ++group) {
          multiply_block(block, tiles * kTileSide / kDepth,
                         x + group * group_bytes + first * kSide * kPlanes,
                         sums.data() + pair * pair_sums + group * 2 * kPlanes * kSums);
        }
      }
    }
  }
  for (int64_t strip = 0; strip < strips; ++strip) {
    for (int64_t row = 0; row < rows; ++row) {
      const auto [factor, offset] = affine[row];
      const int32_t* from = sums.data() + strip / 2 * pair_sums +
                            (row / kSide * 2 + strip % 2) * kPlanes * kSums +
                            row % kSide;
      float* to = y + row * y_stride + strip * kTileSide;
      for (int i = 0; i < kTileSide; ++i) {
        const float high = 65536.0f * static_cast<float>(from[i * kSide]);
        const float mixed = 256.0f * static_cast<float>(from[i * kSide + kSums]);
        to[i] = (high + mixed) * factor + offset;
      }
    }
  }
}

template <Codebook kCodebook>
constexpr Kernel amx_kernel() {
  return {"amx", packed_bytes, pack<Values<kCodebook>>, multiply<kCodebook>};
}

#if defined(__linux__)
bool request_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1;
  const bool integers = d >> 25 & 1;
  if (!tiles || !integers) return false;
  // A process gets the registers' 8 KiB of state only when it asks.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool request_amx() { return false; }
#endif

}  // namespace

bool has_amx() {
  static const bool has = request_amx();
  return has;
}

const Kernel kAmx[kCodebooks] = {
    amx_kernel<Codebook::k3Inst>(),
    amx_kernel<Codebook::kMcg>(),
    amx_kernel<Codebook::kMul1>(),
};

}  // namespace exl3::cpu

#endif
