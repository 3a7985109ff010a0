// SPDX-License-Identifier: Apache-2.0
// Plans and launches any variant of the Hopper kernel.
#pragma once
#include "linear_wgrad_sm90.cuh"

#include "launch.h"

namespace gnsfast {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                            const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Looked up in the driver: nothing links against it, so the module loads without one.
inline Encode encoder() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

// Boxes of 64 features and ``tokens`` tokens of one sample; what lies outside reads as zero.
inline CUtensorMap encode(const char* name, const Rows& rows, int features, int T, int B, int tokens,
                   Dtype element) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  // The stride of a dimension of size 1 is never used, but must be valid.
  const int64_t stride_t = T == 1 ? features : rows.stride_t;
  const int64_t stride_b = B == 1 ? stride_t : rows.stride_b;
  if (address % 16 || features % 8 || stride_t % 8 || stride_b % 8 || stride_t <= 0 ||
      stride_b <= 0) {
    throw std::invalid_argument(described(name, rows, B, T, features) +
                                ": the copy engine reads rows that start at multiples of 16 bytes "
                                "and are not expanded");
  }
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(features), static_cast<cuuint64_t>(T),
                               static_cast<cuuint64_t>(B)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(2 * stride_t),
                                 static_cast<cuuint64_t>(2 * stride_b)};
  const cuuint32_t box[3] = {kColumns, static_cast<cuuint32_t>(tokens), 1}, step[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encoder()(
      &map,
      element == Dtype::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(rows.data), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::invalid_argument(std::string(name) + ": cuTensorMapEncodeTiled returns " +
                                std::to_string(static_cast<int>(status)));
  }
  return map;
}

template <class V>
Plan plan_sm90(int B, int T, int I, int O, int processors) {
  return plan_tiles(V::kTile, B, T, I, O, processors);
}

template <class Element, class Output, class V>
void launch_sm90(const LinearWgrad& call, const Plan& plan) {
  // A thread of autograd may have no context yet, which encoding a tensor map needs.
  check(cudaSetDevice(call.device), "cudaSetDevice");
  const Problem p = problem_of(call, plan);
  const CUtensorMap map_dy =
      encode("dy", call.dy, call.O, call.T, call.B, kBlockT, call.element);
  const CUtensorMap map_x =
      encode("x", call.x, call.I, call.T, call.B, kBlockT / V::kCluster, call.element);

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = linear_wgrad_kernel<Element, Output, V>;
  allow_shared(reinterpret_cast<const void*>(kernel), V::kSharedBytes, call.device, allowed);
  kernel<<<grid_of(plan), kThreads, V::kSharedBytes, static_cast<cudaStream_t>(call.stream)>>>(
      map_dy, map_x, static_cast<Output*>(call.dw), p);
  check(cudaGetLastError(), "linear_wgrad_sm90");
  launch_finish(call, p);
}

// The standard variant for every dtype; linear_wgrad_sm90.cu compiles it, once.
void launch_standard(const LinearWgrad& call, const Plan& plan);

}  // namespace gnsfast
