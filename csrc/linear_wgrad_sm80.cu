// SPDX-License-Identifier: Apache-2.0
// Plans and launches the kernel for sm_80 and later.
#include "linear_wgrad_sm80.cuh"

#include "launch.h"

namespace gnsfast {
namespace {

Operand operand_of(const char* name, const Rows& rows, int features, int T, int B) {
  const bool aligned = reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && features % 8 == 0 &&
                       (T == 1 || rows.stride_t % 8 == 0) && (B == 1 || rows.stride_b % 8 == 0);
  if (!aligned) {
    throw std::invalid_argument(described(name, rows, B, T, features) +
                                ": rows must start at multiples of 16 bytes");
  }
  return {rows.data, rows.stride_b, rows.stride_t, features};
}

template <class Element, class Output>
void launch(const LinearWgrad& call, const Plan& plan) {
  check(cudaSetDevice(call.device), "cudaSetDevice");
  const Problem p = problem_of(call, plan);
  const Operand dy = operand_of("dy", call.dy, call.O, call.T, call.B);
  const Operand x = operand_of("x", call.x, call.I, call.T, call.B);

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = linear_wgrad_kernel<Element, Output>;
  allow_shared(reinterpret_cast<const void*>(kernel), kSharedBytes, call.device, allowed);
  kernel<<<grid_of(plan), kThreads, kSharedBytes, static_cast<cudaStream_t>(call.stream)>>>(
      dy, x, static_cast<Output*>(call.dw), p);
  check(cudaGetLastError(), "linear_wgrad_sm80");
  launch_finish(call, p);
}

Plan plan_sm80(int B, int T, int I, int O, int processors) {
  return plan_tiles(kTile, B, T, I, O, processors);
}

void launch_sm80(const LinearWgrad& call, const Plan& plan) {
  with_types(call, [&](auto element, auto output) {
    launch<decltype(element), decltype(output)>(call, plan);
  });
}

const Registered sm80{{"sm80", plan_sm80, launch_sm80}};

}  // namespace

const char* missing_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count ? "" : "no device";
}

}  // namespace gnsfast
