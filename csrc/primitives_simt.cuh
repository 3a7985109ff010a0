// SPDX-License-Identifier: Apache-2.0
// What every kernel needs: threads, warps, stores. Kernels touch the hardware only through such
// functions, which host_model/primitives.h also implements on a CPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define GNSFAST_DEVICE __device__ __forceinline__
#define GNSFAST_HOST_DEVICE __host__ __device__ __forceinline__
// ``blocks``: of a multiprocessor at a time, at least.
#define GNSFAST_SIMT_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GNSFAST_GRID_CONSTANT __grid_constant__
#define GNSFAST_SHARED(name) extern __shared__ __align__(1024) uint8_t name[]

namespace gnsfast {

GNSFAST_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
GNSFAST_DEVICE uint32_t thread_index() { return threadIdx.x; }
GNSFAST_DEVICE uint32_t block_index() { return blockIdx.x; }
GNSFAST_DEVICE uint32_t block_count() { return gridDim.x; }
GNSFAST_DEVICE void block_sync() { __syncthreads(); }
// Tells the compiler that all threads of a warp hold the same value.
GNSFAST_DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
GNSFAST_DEVICE float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Eight neighbouring values, at a multiple of 16 bytes, in one load.
GNSFAST_DEVICE float2 widened(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
GNSFAST_DEVICE float2 widened(__half2 pair) { return __half22float2(pair); }
template <class Pair, class Element>
GNSFAST_DEVICE void load_pairs(float (&v)[8], const Element* from) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
  const auto* pairs = reinterpret_cast<const Pair*>(&words);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 pair = widened(pairs[k]);
    v[2 * k] = pair.x;
    v[2 * k + 1] = pair.y;
  }
}
GNSFAST_DEVICE void load_8(float (&v)[8], const __nv_bfloat16* from) {
  load_pairs<__nv_bfloat162>(v, from);
}
GNSFAST_DEVICE void load_8(float (&v)[8], const __half* from) { load_pairs<__half2>(v, from); }

// Stores two neighbouring values, or with ``add`` adds them: only float32 buffers are added to. The
// memory itself adds: if a thread loaded them first, it would wait for 48 pairs one by one. Each
// element has one owner, so the result does not depend on any order.
GNSFAST_DEVICE void store_pair(float* to, float a, float b, int add) {
  if (add) {
    atomicAdd(to, a);
    atomicAdd(to + 1, b);
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  }
}
GNSFAST_DEVICE void load_pair(float (&v)[2], const float* from) {
  const float2 pair = *reinterpret_cast<const float2*>(from);
  v[0] = pair.x;
  v[1] = pair.y;
}
GNSFAST_DEVICE void store_pair(__nv_bfloat16* to, float a, float b, int) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}
GNSFAST_DEVICE void store_pair(__half* to, float a, float b, int) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
GNSFAST_DEVICE void store_one(float* to, float v, int add) { *to = add ? *to + v : v; }
GNSFAST_DEVICE void store_one(__nv_bfloat16* to, float v, int) { *to = __float2bfloat16_rn(v); }
GNSFAST_DEVICE void store_one(__half* to, float v, int) { *to = __float2half_rn(v); }

// Between blocks of a kernel: what a block stores for others is visible to a block whose
// ``atomic_add`` comes after its own, with a fence before the one and after the other. Loads go to
// L2, as L1 may hold what was there before.
GNSFAST_DEVICE void fence() { __threadfence(); }
GNSFAST_DEVICE int atomic_add(int* to, int value) { return atomicAdd(to, value); }
template <class Number>
GNSFAST_DEVICE void store_for_others(Number* to, Number value) {
  __stcg(to, value);
}
template <class Number>
GNSFAST_DEVICE Number load_of_others(const Number* from) {
  return __ldcg(from);
}

}  // namespace gnsfast
