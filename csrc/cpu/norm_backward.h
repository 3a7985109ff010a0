// SPDX-License-Identifier: Apache-2.0
// The backward pass of a layer norm or an RMS norm on a CPU, with every sample's squared norms.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

struct NormBackward {
  Side dy, x;
  bool bfloat16;             // dy, x and dx; else float32
  int64_t B, T;
  const float *mean, *rstd;  // [B, T] of a layer norm; null: an RMS norm
  const float* w;            // [F]; or null
  float eps, offset;         // of an RMS norm, whose gain is offset + w
  void* dx;                  // [B, T, F]
  float *dw, *db;            // [F]; null where nobody wants them
  float* rows;               // [weight, bias; B + 2], those of them that are wanted
  int64_t row_stride;
  Team team;
};

void norm_backward(const NormBackward& call, const std::string& instructions);

}  // namespace gnsfast::cpu
