// SPDX-License-Identifier: Apache-2.0
// gram.cpp for bfloat16 by avx512_bf16, whose instruction multiplies and adds two numbers of a row.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gram_kernels.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "row_pairs.h"
#include "avx512_instructions.h"

}  // namespace

OfSample bfloat16_gram() { return __builtin_cpu_supports("avx512bf16") ? run_pairs : nullptr; }

}  // namespace gnsfast::cpu
