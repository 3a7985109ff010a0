// SPDX-License-Identifier: Apache-2.0
// The gradient of a linear layer's weight and bias on a CPU, with every sample's squared norms.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace gnsfast::cpu {

// [B, T, N]: ``left`` and ``right`` of dW = leftᵀ right.
struct Side {
  const void* data;
  int64_t stride_b, stride_t, stride_n, N;
};

// Adam's: P = 1 / (sqrt(v) s + eps); v has the gradient's shape, and is null without a metric.
struct Metric {
  const float* v;
  float s, eps;
};

// Runs ``work(data)`` on up to ``threads`` threads and waits for them: GOMP_parallel of OpenMP.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct LinearWgrad {
  Side left, right;
  bool bfloat16;           // else float32
  int64_t B, T;            // with ``sqnorms`` stride_b is T stride_t; with ``starts`` T is all rows
  const int64_t* starts;   // sample b owns rows starts[b] to starts[b + 1] of a side; or null
  const double* sqnorms;   // [B] of the weight, where they are known already; or null
  float* dw;               // [left.N, right.N]
  int64_t row_step, column_step;  // of dw: to the next column of left, of right
  float* db;               // or null
  bool bias_of_right;      // whether db is the sum of right's rows, else of left's
  Metric weight, bias;
  float* rows;             // [weight, bias, both again under the metric; B + 2]
  int64_t row_stride;
  int threads;
  Parallel parallel;       // or null: then there is one thread
};

// The kernels that this processor runs, the fastest first; an instruction set each.
std::vector<std::string> kernel_names();

void linear_wgrad(LinearWgrad call, const std::string& kernel);

}  // namespace gnsfast::cpu
