// SPDX-License-Identifier: Apache-2.0
// What the launchers of linear_wgrad share.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "linear_wgrad.h"

namespace gnsfast {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline int tiles_along(int size, int tile) { return (size + tile - 1) / tile; }

// What a last, partly filled wave of tiles costs is saved by splitting those tiles by whole samples:
// ``at_once`` tiles run at a time. Below so many tokens the second kernel costs more than it saves.
constexpr int64_t kWorthSplitting = 4096;

inline Plan plan_tiles(int tiles, int at_once, int B, int T) {
  Plan plan{tiles, 1, 0, 0};
  const int last = tiles % at_once;
  if (last && static_cast<int64_t>(B) * T >= kWorthSplitting) {
    const int parts = at_once / last < B ? at_once / last : B;
    if (parts > 1) {
      plan.whole_tiles = tiles - last;
      plan.parts = parts;
    }
  }
  return plan;
}

inline std::string described(const char* name, const Rows& rows, int B, int T, int features) {
  return std::string(name) + " [" + std::to_string(B) + ", " + std::to_string(T) + ", " +
         std::to_string(features) + "] with strides (" + std::to_string(rows.stride_b) + ", " +
         std::to_string(rows.stride_t) + ", 1)";
}

}  // namespace gnsfast
