// SPDX-License-Identifier: Apache-2.0
// Includes ``GNSFAST_LOOPS`` once for each instruction set, in a namespace of its name; inside they
// have kLanes, the numbers of a register, and vector.h. Include it in an unnamed namespace.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,fma")
#endif
namespace avx512 {
constexpr int kLanes = 16;
#include "vector.h"
#include GNSFAST_LOOPS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
constexpr int kLanes = 8;
#include "vector.h"
#include GNSFAST_LOOPS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
#error "the CPU kernels are for x86-64"
#endif
