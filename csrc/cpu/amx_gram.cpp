// SPDX-License-Identifier: Apache-2.0
// ||left_bᵀ right_b||² is the sum of the products of two matrices, which hold the products of all
// pairs of left's rows, and of right's. For short samples they cost less than left_bᵀ right_b.
#include "amx_gram.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "amx.h"
#include "plan.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "amx_products.h"
#include "avx512_instructions.h"

}  // namespace

bool has_amx() { return amx::available(); }

void amx_gram(const Gram& call) {
  if (!has_amx()) throw std::invalid_argument("this processor has no AMX");
  const int64_t together = in_group(call.T), groups = times(call.B, int(together));
  const int64_t products = call.B * call.T * call.T * (call.left.N + call.right.N);
  const int items = int(std::min<int64_t>(groups, 8 * call.team.threads));
  const int threads = std::min(items, call.team.for_work(products / kEnough));
  for_each(call.team, threads, items, memory_of(call, nullptr).bytes, [&](int item, char* memory) {
    for (int64_t k = groups * item / items; k < groups * (item + 1) / items; ++k) {
      run(call, k * together, memory);
    }
  });
}

}  // namespace gnsfast::cpu
