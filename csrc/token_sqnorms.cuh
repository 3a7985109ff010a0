// SPDX-License-Identifier: Apache-2.0
// The squared norms of samples of one token, for sm_80 and later: a linear layer's weight gradient
// dy_bᵀ x_b has ‖x_b‖² ‖dy_b‖², its bias gradient ‖dy_b‖².
//
// A warp reads both rows of a sample once, 16 bytes per lane.
#pragma once
#ifdef GNSFAST_HOST_MODEL
#include "host_model/primitives.h"
#else
#include "primitives_simt.cuh"
#endif
#include "work.cuh"

namespace gnsfast {

constexpr int kRowWarps = 8;    // of a block, a sample each
constexpr int kRowElements = 8;  // of a lane's load

struct TokenRows {  // x or dy of [B, features]
  const void* data;
  int64_t stride;  // in elements, a multiple of kRowElements
  int features;    // a multiple too
};

// A lane's share of the squared norm of a row.
template <class Element>
GNSFAST_DEVICE float row_share(const TokenRows& rows, int b, uint32_t lane) {
  const auto* row = static_cast<const Element*>(rows.data) + b * rows.stride;
  float s[kRowElements];
  clear(s);
#pragma unroll 4  // loads in flight
  for (int k = lane * kRowElements; k < rows.features; k += 32 * kRowElements) {
    float v[kRowElements];
    load_8(v, row + k);
#pragma unroll
    for (int e = 0; e < kRowElements; ++e) s[e] = fmaf(v[e], v[e], s[e]);
  }
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

template <class Element>
GNSFAST_SIMT_KERNEL(32 * kRowWarps, 1)
token_sqnorms_kernel(const GNSFAST_GRID_CONSTANT TokenRows x, const GNSFAST_GRID_CONSTANT TokenRows dy,
                     int B, float* product, float* dy_sqnorm) {
  const uint32_t lane = thread_index() % 32;
  const int64_t b = static_cast<int64_t>(block_index()) * kRowWarps + uniform(thread_index() / 32);
  if (b >= B) return;
  const float of_x = warp_sum(row_share<Element>(x, b, lane));
  const float of_dy = warp_sum(row_share<Element>(dy, b, lane));
  if (lane == 0) {
    product[b] = of_x * of_dy;
    dy_sqnorm[b] = of_dy;
  }
}

}  // namespace gnsfast
