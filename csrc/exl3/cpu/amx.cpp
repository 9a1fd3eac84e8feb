// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AMX kernels. AMX multiplies bf16, which has 8 significant bits, so that weights
// and activations are each the sum of two: a weight's 11 bits fit exactly, an
// activation's error is 2^-17, and of the four products only the least one is left out.
//
// A tile register is 16 rows of 64 bytes. Weights are the left operand, whose rows are
// a strip's columns, since that is how they are decoded; rows of activations are
// columns of the right operand. So a product is y transposed, which is undone once, at
// the end.

#include "exl3/cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "exl3/cpu/avx512fp16_decode.h"
#include "exl3/cpu/buffer.h"
#include "exl3/cpu/numbers.h"

#define EXL3_AMX                                                                      \
  __attribute__((target(                                                              \
      "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512fp16,fma,f16c," \
      "amx-tile,amx-bf16")))

namespace exl3::cpu {
namespace {

constexpr int64_t kSide = 16;       // rows of a register, and columns of y in it
constexpr int64_t kDepth = 32;      // k of a product of two registers
constexpr int64_t kRegister = 512;  // bf16 values of one register
constexpr int64_t kParts = 2;       // the leading and the trailing bf16
constexpr int64_t kBlock = 512;     // k that are decoded at once
constexpr int64_t kStripBlock = kBlock * kSide * kParts;
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

// ---- activations: [rows / 16][k / 32][part][16 pairs of k][16 rows][2]
// ---------------

int64_t groups_of(int64_t rows) { return (rows + kSide - 1) / kSide; }

size_t packed_bytes(int64_t rows, int64_t k) {
  return groups_of(rows) * kSide * k * kParts * sizeof(uint16_t);
}

// Pairs of k are p and p + 8 of each 16, as in a vector of states.
void pack(const float* x, int64_t k, int64_t row, int64_t, std::byte* packed) {
  auto* out = reinterpret_cast<uint16_t*>(packed) + row / kSide * kSide * k * kParts +
              row % kSide * 2;
  for (int64_t first = 0; first < k; first += kTileSide) {
    uint16_t* to =
        out + first / kDepth * kParts * kRegister + first % kDepth / 2 * 2 * kSide;
    for (int i = 0; i < kTileSide; ++i) {
      const float value = x[first + i];
      const uint16_t leading = float_to_bfloat(value);
      const int64_t at = i % 8 * 2 * kSide + i / 8;
      to[at] = leading;
      to[at + kRegister] = float_to_bfloat(value - bfloat_to_float(leading));
    }
  }
}

// ---- weights: [block / 32][part][16 columns][32 k]
// -----------------------------------

// The bf16 with the same sign, exponent and leading 7 bits as an fp16. Zero becomes
// 2^-15, which is less than what the last bit of most values is worth.
EXL3_AMX inline __m512i truncate(__m512i half) {
  const __m512i fields = _mm512_and_si512(
      _mm512_srai_epi16(half, 3), _mm512_set1_epi16(static_cast<int16_t>(0x8FFF)));
  return _mm512_add_epi16(fields, _mm512_set1_epi16((127 - 15) << 7));
}

EXL3_AMX inline void store_columns(__m512i columns, uint16_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(columns));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + kDepth),
                     _mm512_extracti64x4_epi64(columns, 1));
}

template <Codebook kCodebook>
EXL3_AMX void decode(const uint16_t* tiles, int words, int64_t count, uint16_t* block) {
  for_states(tiles, words, count, [block](int64_t index, __m512i state) EXL3_AMX {
    const int64_t tile = index / kVectors;
    const int64_t column = index % kVectors / kHalves * 2 + index % kHalves * 8;
    uint16_t* to =
        block + tile / 2 * kParts * kRegister + column * kDepth + tile % 2 * kTileSide;
    const __m512h value = decode_halves<kCodebook>(state);
    const __m512i bits = _mm512_castph_si512(value);
    const __m512i leading = _mm512_and_si512(bits, _mm512_set1_epi16(~7));
    const __m512h rest = _mm512_sub_ph(value, _mm512_castsi512_ph(leading));
    store_columns(truncate(bits), to);
    store_columns(truncate(_mm512_castph_si512(rest)), to + kRegister);
  });
}

// Adds a block's products of two strips with 16 rows to `sums` [2 strips][2][16][16]:
// those of the leading parts, and the mixed ones, which would else wait for the former.
// Two strips, because activations come from the L2 cache and weights from the L1.
EXL3_AMX void multiply_block(const uint16_t* block, int64_t depth, const uint16_t* x,
                             float* sums) {
  constexpr int64_t kRow = 64;  // bytes
  _tile_loadd(0, sums, kRow);
  _tile_loadd(1, sums + kSums, kRow);
  _tile_loadd(2, sums + 2 * kSums, kRow);
  _tile_loadd(3, sums + 3 * kSums, kRow);
  for (int64_t i = 0; i < depth; ++i) {
    const uint16_t* weights = block + i * kParts * kRegister;
    const uint16_t* rows = x + i * kParts * kRegister;
    _tile_loadd(6, rows, kRow);
    _tile_loadd(4, weights, kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, rows + kRegister, kRow);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, weights + kStripBlock, kRow);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(4, weights + kRegister, kRow);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, weights + kStripBlock + kRegister, kRow);
    _tile_dpbf16ps(3, 5, 6);
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
  const auto* x = reinterpret_cast<const uint16_t*>(packed);
  const int64_t groups = groups_of(rows);
  const int64_t group_stride = kSide * w.k * kParts;
  // [strips / 2][groups][2 strips][2][16][16]; rows come in so many that strips are
  // even.
  const int64_t pair_sums = groups * 2 * kParts * kSums;
  Buffer<float> sums(strips / 2 * pair_sums);
  std::fill_n(sums.data(), strips / 2 * pair_sums, 0.0f);
  alignas(kCacheLine) uint16_t block[2 * kStripBlock];
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
                         x + group * group_stride + first * kSide * kParts,
                         sums.data() + pair * pair_sums + group * 2 * kParts * kSums);
        }
      }
    }
  }
  for (int64_t strip = 0; strip < strips; ++strip) {
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = sums.data() + strip / 2 * pair_sums +
                          (row / kSide * 2 + strip % 2) * kParts * kSums + row % kSide;
      float* to = y + row * y_stride + strip * kTileSide;
      for (int i = 0; i < kTileSide; ++i) {
        to[i] = from[i * kSide] + from[i * kSide + kSums];
      }
    }
  }
}

template <Codebook kCodebook>
constexpr Kernel amx_kernel() {
  return {"amx", packed_bytes, pack, multiply<kCodebook>};
}

bool request_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1;
  const bool bf16 = d >> 22 & 1;
  if (!tiles || !bf16) return false;
  // Linux gives a process the registers' 8 KiB of state only when it asks.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

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
