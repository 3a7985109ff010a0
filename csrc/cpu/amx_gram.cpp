// SPDX-License-Identifier: Apache-2.0
// gram.cpp for bfloat16 by AMX. Very short samples share a tile register.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "amx.h"
#include "gram_kernels.h"
#include "plan.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "amx_products.h"
#include "avx512_instructions.h"

}  // namespace

void amx_gram(const Gram& call) {
  if (!amx::available() || !call.bfloat16) {
    throw std::invalid_argument("amx needs a processor that has it, and bfloat16");
  }
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
