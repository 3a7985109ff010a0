// SPDX-License-Identifier: Apache-2.0
// The loops of bfloat16_wgrad.cpp.
#include "tile.h"

typedef uint16_t FewHalves __attribute__((vector_size(kFew * 2), aligned(2), may_alias));
typedef uint32_t FewWords __attribute__((vector_size(kFew * 4), aligned(4), may_alias));

// What a panel holds for each column: two tokens' numbers of bfloat16, in 32 bits.
struct Pairs {
  static constexpr int kTokens = 2;

  static void pack_few(const Bfloat16* one, const Bfloat16* other, float* to) {
    const auto words = [](const Bfloat16* from) {
      return __builtin_convertvector(*reinterpret_cast<const FewHalves*>(from), FewWords);
    };
    *reinterpret_cast<FewWords*>(to) = words(one) | words(other) << 16;
  }

  // Zeros fill up columns to kWidth, and the tokens to a pair.
  template <int kWidth>
  static void pack(const Bfloat16* from, const Side& side, int tokens, int columns, float* to) {
    const bool whole = side.stride_n == 1 && columns == kWidth && kWidth >= kFew;
    for (int t = 0; t < tokens; t += 2, from += 2 * side.stride_t, to += kWidth) {
      const bool two = t + 1 < tokens;
      if (whole && two) {
        const Bfloat16* const other = from + side.stride_t;
        for (int k = 0; k + kFew <= kWidth; k += kFew) pack_few(from + k, other + k, to + k);
        constexpr int kLast = std::max(0, kWidth - kFew);  // some numbers twice
        if (kWidth % kFew) pack_few(from + kLast, other + kLast, to + kLast);
        continue;
      }
      for (int k = 0; k < kWidth; ++k) {
        const Bfloat16* const at = from + k * side.stride_n;
        const uint32_t low = k < columns ? at->bits : 0;
        const uint32_t high = k < columns && two ? at[side.stride_t].bits : 0;
        const uint32_t word = low | high << 16;
        std::memcpy(to + k, &word, sizeof word);
      }
    }
  }

  static void add_product(Vector& sum, float left, Vector right) {
    int32_t word;
    std::memcpy(&word, &left, sizeof word);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(word), (__m512bh)right);
  }
};

inline void run_pairs(Work& work, int index, char* memory) {
  walk<Pairs, Bfloat16>(work, index, memory);
}
