// SPDX-License-Identifier: Apache-2.0
// The gradient of an embedding's weight on a CPU, with every sample's squared norm.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

struct EmbeddingWgrad {
  Side dy;                 // [B, T, D]
  bool bfloat16;           // else float32
  int64_t B, T;
  const int64_t* ids;      // [B, T]
  int64_t ids_stride_b, ids_stride_t;
  int64_t V, padding_idx;  // an id that takes no gradient, or -1
  float* dw;               // [V, D], zeros
  float* rows;             // [B + 2]
  Team team;
};

// Throws std::out_of_range for an id that is not one of V.
void embedding_wgrad(const EmbeddingWgrad& call, const std::string& instructions);

}  // namespace gnsfast::cpu
