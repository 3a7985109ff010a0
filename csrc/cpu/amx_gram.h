// SPDX-License-Identifier: Apache-2.0
// The squared norms of short samples' weight gradients, for bfloat16 by AMX.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

struct Gram {
  Side left, right;
  int64_t B, T;
  double* sqnorms;  // [B]: Σ over tokens t and s of (left_t . left_s) (right_t . right_s)
  double* terms;    // [B]: the sum of the same terms' absolute values
  Team team;
};

#ifdef GNSFAST_BFLOAT16
void amx_gram(const Gram& call);
bool has_amx();
#else
inline void amx_gram(const Gram&) { throw std::invalid_argument("this build has no AMX"); }
inline bool has_amx() { return false; }
#endif

}  // namespace gnsfast::cpu
