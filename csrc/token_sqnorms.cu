// SPDX-License-Identifier: Apache-2.0
// Launches token_sqnorms_kernel.
#include "token_sqnorms.cuh"

#include "launch.h"

namespace gnsfast {
namespace {

TokenRows rows_of(const char* name, const void* data, int64_t stride, int B, int features) {
  if (reinterpret_cast<uintptr_t>(data) % 16 || features % kRowElements ||
      (B > 1 && stride % kRowElements)) {
    throw std::invalid_argument(std::string(name) + " [" + std::to_string(B) + ", " +
                                std::to_string(features) + "] with stride " +
                                std::to_string(stride) +
                                ": rows must start at multiples of 16 bytes");
  }
  return {data, stride, features};
}

}  // namespace

void token_sqnorms(const TokenSqnorms& call) {
  check(cudaSetDevice(call.device), "cudaSetDevice");
  const TokenRows x = rows_of("x", call.x, call.x_stride, call.B, call.I);
  const TokenRows dy = rows_of("dy", call.dy, call.dy_stride, call.B, call.O);
  const bool bfloat16 = call.element == Dtype::kBfloat16;
  const auto kernel = bfloat16 ? token_sqnorms_kernel<__nv_bfloat16> : token_sqnorms_kernel<__half>;
  kernel<<<(call.B + kRowWarps - 1) / kRowWarps, 32 * kRowWarps, 0,
           static_cast<cudaStream_t>(call.stream)>>>(x, dy, call.B, call.product, call.dy_sqnorm);
  check(cudaGetLastError(), "token_sqnorms");
}

}  // namespace gnsfast
