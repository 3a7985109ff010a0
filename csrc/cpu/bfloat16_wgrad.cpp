// SPDX-License-Identifier: Apache-2.0
// The kernel of linear_wgrad.cpp for bfloat16 by avx512_bf16, whose instruction multiplies and adds
// the numbers of two tokens at once.
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear_wgrad.h"
#include "plan.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "pairs.h"
#include "avx512_instructions.h"

const Kernel kPairs{"avx512_bf16", kRows, kColumns, 0, kWidest / kColumns, 8, bytes_of, run_pairs};

}  // namespace

const Kernel* bfloat16_kernel() {
  return __builtin_cpu_supports("avx512bf16") ? &kPairs : nullptr;
}

}  // namespace gnsfast::cpu
