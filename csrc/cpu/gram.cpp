// SPDX-License-Identifier: Apache-2.0
// ||left_bᵀ right_b||² is the sum of the products of two matrices, which hold the products of all
// pairs of left's rows, and of right's. For short samples they cost less than left_bᵀ right_b.
#include "gram.h"

#include <algorithm>
#include <cmath>

#include "gram_kernels.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "rows.h"
#include "instruction_sets.h"

constexpr OfSample kKernels[] = {avx512::run, avx2::run};

}  // namespace

void gram_sqnorms(const Gram& call, const std::string& name) {
  if (name == "amx") return amx_gram(call);
  if (call.left.stride_n != 1 || call.right.stride_n != 1) {
    throw std::invalid_argument("the numbers of a row must be side by side");
  }
  const OfSample halves = name == "avx512_bf16" && call.bfloat16 ? bfloat16_gram() : nullptr;
  const OfSample run = halves ? halves : kKernels[index_of(name)];
  const int64_t products = call.B * call.T * call.T * (call.left.N + call.right.N);
  const int items = int(std::min<int64_t>(call.B, 8 * call.team.threads));
  const int threads = std::min(items, call.team.for_work(products >> 20));
  for_each(call.team, threads, items, 0, [&](int item, char*) {
    for (int64_t b = call.B * item / items; b < call.B * (item + 1) / items; ++b) run(call, b);
  });
}

}  // namespace gnsfast::cpu
