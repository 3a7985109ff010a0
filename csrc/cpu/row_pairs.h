// SPDX-License-Identifier: Apache-2.0
// The loops of bfloat16_gram.cpp.
#include "rows.h"

struct RowPairs {
  using Element = Bfloat16;
  static constexpr int kStep = 2 * kLanes;
  static Vector get(const Bfloat16* from) {
    return _mm512_loadu_ps(reinterpret_cast<const float*>(from));
  }
  static void add_product(Vector& sum, Vector a, Vector b) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

inline void run_pairs(const Gram& call, int64_t b) { run_rows<RowPairs>(call, b); }
