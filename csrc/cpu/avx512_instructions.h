// SPDX-License-Identifier: Apache-2.0
// Includes ``GNSFAST_LOOPS`` for processors with AVX-512's parts and bfloat16, as instruction_sets.h
// does for others. Include it in an unnamed namespace.
#if defined(__clang__)
#pragma clang attribute push(                                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false in GCC 12's unpack intrinsics
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#endif
constexpr int kLanes = 16;
#include "vector.h"
#include GNSFAST_LOOPS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
