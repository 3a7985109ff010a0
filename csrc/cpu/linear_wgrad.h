// SPDX-License-Identifier: Apache-2.0
// The gradient of a linear layer's weight and bias on a CPU, with every sample's squared norms.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

struct LinearWgrad {
  Side left, right;        // of dW = leftᵀ right
  bool bfloat16;           // else float32
  int64_t B, T;            // with ``sqnorms`` stride_b is T stride_t; with ``starts`` T is all rows
  const int64_t* starts;   // sample b owns rows starts[b] to starts[b + 1] of a side; or null
  const double* sqnorms;   // [B] of the weight, where they are known already; or null
  float* dw;               // [left.N, right.N]
  bool dw_bfloat16;        // whether ``dw`` points at bfloat16
  int64_t row_step, column_step;  // of dw: to the next column of left, of right
  float* db;               // or null
  bool bias_of_right;      // whether db is the sum of right's rows, else of left's
  float* rows;             // [weight, bias; B + 2]
  int64_t row_stride;
  Team team;
};

// What this processor has for bfloat16 alone, the fastest first.
std::vector<std::string> bfloat16_kernels();

// ``instructions`` may be one of these as well.
void linear_wgrad(LinearWgrad call, const std::string& instructions);

}  // namespace gnsfast::cpu
