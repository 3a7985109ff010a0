// SPDX-License-Identifier: Apache-2.0
// What the launchers of linear_wgrad share; included after a kernel and its primitives.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
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

constexpr int kMostParts = 16;

inline int tiles_along(int size, int tile) { return (size + tile - 1) / tile; }

// In units of the time that a tile takes for one token: the launch of the second kernel; writing and
// reading one part of a tile, while all tiles that run at a time do so.
constexpr double kMergeLaunch = 500, kMergePart = 100;

// Splits the tiles of a last, partly filled wave by whole samples where that saves time; ``at_once``
// tiles run at a time.
inline Plan plan_tiles(int tiles_o, int tiles_i, int at_once, int B, int T) {
  const int tiles = tiles_o * tiles_i, last = tiles % at_once;
  Plan plan{tiles_i, tiles, tiles, 1, 0, 0};
  double best = static_cast<double>(B) * T;
  for (int parts = 2; last && parts <= B && parts <= kMostParts; ++parts) {
    const int waves = (last * parts + at_once - 1) / at_once, samples = (B + parts - 1) / parts;
    const double tokens = static_cast<double>(waves) * samples * T;
    const double cost = tokens + kMergeLaunch + kMergePart * parts * last / at_once;
    if (cost < best) {
      best = cost;
      plan.whole_tiles = tiles - last;
      plan.parts = parts;
    }
  }
  return plan;
}

inline Problem problem_of(const LinearWgrad& call, const Plan& plan) {
  return {call.B,    call.T,   call.I,       call.O,      plan.tiles_i, plan.tiles, plan.whole_tiles,
          plan.parts, call.add, call.partial, call.scratch};
}

// Calls ``launch`` with a value of the inputs' type and one of dW's.
template <class Launch>
void with_types(const LinearWgrad& call, Launch launch) {
  const bool wide = call.output == Dtype::kFloat32;
  if (call.element == Dtype::kBfloat16) {
    wide ? launch(__nv_bfloat16{}, float{}) : launch(__nv_bfloat16{}, __nv_bfloat16{});
  } else {
    wide ? launch(__half{}, float{}) : launch(__half{}, __half{});
  }
}

inline std::string described(const char* name, const Rows& rows, int B, int T, int features) {
  return std::string(name) + " [" + std::to_string(B) + ", " + std::to_string(T) + ", " +
         std::to_string(features) + "] with strides (" + std::to_string(rows.stride_b) + ", " +
         std::to_string(rows.stride_t) + ", 1)";
}

}  // namespace gnsfast
