// SPDX-License-Identifier: Apache-2.0
// What the bindings call. No CUDA header here: pointers and strides are those of the caller's tensors.
#pragma once
#include <cstdint>

namespace gnsfast {

enum class Dtype { kBfloat16, kFloat16, kFloat32 };

struct Rows {  // of x or dy: [B, T, features], the features side by side
  const void* data;
  int64_t stride_b, stride_t;  // in elements
};

struct Plan {  // how many tiles are whole, and into how many parts the others are split
  int tiles_i, tiles;
  int whole_tiles, parts;
  int64_t partial_rows;      // of B + 1 float32
  int64_t scratch_elements;  // float32
};

struct LinearWgrad {
  Rows x, dy;
  int B, T, I, O;
  Dtype element, output;
  void* dw;
  bool add;
  float* partial;
  float* scratch;
  void* stream;
  int device;
};

// ``processors``: multiprocessors of the device, at least two.
Plan plan_linear_wgrad_sm80(int B, int T, int I, int O, int processors);
Plan plan_linear_wgrad_sm90(int B, int T, int I, int O, int processors);

// Launch a plan on ``call.device``, which becomes the thread's current one. Throw
// std::invalid_argument for rows that the kernel cannot read, std::runtime_error for what CUDA
// reports.
void linear_wgrad_sm80(const LinearWgrad& call, const Plan& plan, int processors);
void linear_wgrad_sm90(const LinearWgrad& call, const Plan& plan, int processors);

// Empty where a kernel can be launched, else why not.
const char* missing_device();

}  // namespace gnsfast
