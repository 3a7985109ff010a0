// SPDX-License-Identifier: Apache-2.0
// Copies that put the channels last.
#pragma once
#include "kernel.h"

namespace gnsfast::cpu {

// to[n, h, w, c] = from[n, c, h, w], with w side by side in ``from`` and c in ``to``.
struct Transpose {
  const void* from;
  void* to;
  int bytes;  // of a number: 2 or 4
  int64_t n, C, H, W;
  int64_t from_n, from_c, from_h, to_n, to_h, to_w;  // strides
  Team team;
};

void transpose(const Transpose& call);

}  // namespace gnsfast::cpu
