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
void launch(const LinearWgrad& call, const Plan& plan, int processors) {
  check(cudaSetDevice(call.device), "cudaSetDevice");
  const Problem p = problem_of(call, plan);
  const Operand dy = operand_of("dy", call.dy, call.O, call.T, call.B);
  const Operand x = operand_of("x", call.x, call.I, call.T, call.B);
  auto* dw = static_cast<Output*>(call.dw);
  const auto stream = static_cast<cudaStream_t>(call.stream);

  const auto kernel = linear_wgrad_kernel<Element, Output>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute");
  const int split = p.tiles - p.whole_tiles, units = units_of(p);
  kernel<<<std::min(units, processors), kThreads, kSharedBytes, stream>>>(dy, x, dw, p);
  check(cudaGetLastError(), "linear_wgrad_sm80");
  if (split) {
    merge_kernel<Output><<<split, kThreads, 0, stream>>>(dw, p);
    check(cudaGetLastError(), "linear_wgrad_sm80, merge");
  }
}

Plan plan_sm80(int B, int T, int I, int O, int processors) {
  Plan plan = plan_tiles(tiles_along(O, kTileO), tiles_along(I, kTileI), processors, B, T);
  plan.partial_rows = static_cast<int64_t>(plan.tiles) * kWarps;
  plan.scratch_elements =
      static_cast<int64_t>(plan.tiles - plan.whole_tiles) * plan.parts * kTileO * kTileI;
  return plan;
}

void launch_sm80(const LinearWgrad& call, const Plan& plan, int processors) {
  with_types(call, [&](auto element, auto output) {
    launch<decltype(element), decltype(output)>(call, plan, processors);
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
