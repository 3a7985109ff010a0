// SPDX-License-Identifier: Apache-2.0
// What the bindings call, without CUDA headers. Pointers and strides are of the caller's tensors.
#pragma once
#include <cstdint>
#include <vector>

#include "plan.h"

namespace gnsfast {

enum class Dtype { kBfloat16, kFloat16, kFloat32, kNone };

struct Rows {  // of x or dy: [B, T, features], the features side by side
  const void* data;
  int64_t stride_b, stride_t;  // in elements
};

struct LinearWgrad {
  Rows x, dy;
  int B, T, I, O;
  Dtype element, output;  // output: kNone for the rows alone
  void *dw, *db;          // null where there is no output; db without a bias too
  bool bias, add;
  float* rows;  // [1, or 2 with a bias; B + 2]
  int64_t row_stride;
  void* workspace;
  void* stream;
  int device;
};

struct Kernel {
  const char* name;
  // ``processors``: multiprocessors of the device, at least two.
  Plan (*plan)(int B, int T, int I, int O, int processors);
  // Launches a plan on ``call.device``, which becomes the thread's current one. Throws
  // std::invalid_argument for rows that the kernel cannot read, std::runtime_error for what CUDA
  // reports.
  void (*launch)(const LinearWgrad& call, const Plan& plan);
};

// Every kernel of this build. The file of a kernel registers it when the module is loaded.
inline std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}
struct Registered {
  explicit Registered(const Kernel& kernel) { kernels().push_back(kernel); }
};

// ‖x_b‖² ‖dy_b‖² and ‖dy_b‖² of samples of one token: x [B, I], dy [B, O], both of ``element``.
struct TokenSqnorms {
  const void *x, *dy;
  int64_t x_stride, dy_stride;  // in elements
  int B, I, O;
  Dtype element;
  float *product, *dy_sqnorm;  // [B]
  void* stream;
  int device;
};
void token_sqnorms(const TokenSqnorms& call);

// Empty where a kernel can be launched, else why not.
const char* missing_device();

}  // namespace gnsfast
