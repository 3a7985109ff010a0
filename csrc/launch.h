// SPDX-License-Identifier: Apache-2.0
// What the launchers of linear_wgrad share; included after a kernel and its primitives.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "linear_wgrad.h"
#include "work.cuh"

namespace gnsfast {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears it: or the next launch would be blamed
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Lets a kernel have its shared memory. A device remembers that, so each of the first 64 is asked
// once; two threads may both ask.
inline void allow_shared(const void* kernel, int bytes, int device,
                         std::atomic<uint64_t>& allowed) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed & bit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
  allowed |= bit;
}

inline int grid_of(const Plan& plan) {
  return std::min(units_of(plan), plan.at_once) * plan.tile.cluster;
}

// Calls ``launch`` with a value of the inputs' type and one of dW's.
template <class Launch>
void with_types(const LinearWgrad& call, Launch launch) {
  auto with_output = [&](auto element) {
    if (call.output == Dtype::kNone) {
      launch(element, Nothing{});
    } else if (call.output == Dtype::kFloat32) {
      launch(element, float{});
    } else {
      launch(element, element);
    }
  };
  call.element == Dtype::kBfloat16 ? with_output(__nv_bfloat16{}) : with_output(__half{});
}

inline std::string described(const char* name, const Rows& rows, int B, int T, int features) {
  return std::string(name) + " [" + std::to_string(B) + ", " + std::to_string(T) + ", " +
         std::to_string(features) + "] with strides (" + std::to_string(rows.stride_b) + ", " +
         std::to_string(rows.stride_t) + ", 1)";
}

inline Problem problem_of(const LinearWgrad& call, const Plan& plan) {
  const Problem p =
      problem_of(call.B, call.T, call.I, call.O, call.add, plan, call.bias, call.workspace);
  if (p.tasks.blocks() > INT32_MAX) {
    throw std::invalid_argument(described("dy", call.dy, call.B, call.T, call.O) +
                                " has too many samples for one launch");
  }
  return p;
}

// The second kernel of a call, whichever the first was.
void launch_finish(const LinearWgrad& call, const Problem& p);

}  // namespace gnsfast
