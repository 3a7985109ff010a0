// SPDX-License-Identifier: Apache-2.0
// The squared norms of short samples' weight gradients, without the gradients.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

struct Gram {
  Side left, right;  // with AMX of any strides; else the numbers of a row are side by side
  bool bfloat16;     // else float32
  int64_t B, T;
  double* sqnorms;   // [B]: Σ over tokens t and s of (left_t . left_s) (right_t . right_s)
  double* terms;     // [B]: the sum of the same terms' absolute values
  Team team;
};

// ``instructions`` as for ``linear_wgrad``.
void gram_sqnorms(const Gram& call, const std::string& instructions);

}  // namespace gnsfast::cpu
