// SPDX-License-Identifier: Apache-2.0
// What the kernels of linear_wgrad share: the pieces of work of a block, and sums of squares.
#pragma once
#include "plan.h"

namespace gnsfast {

constexpr int kBand = 8;  // rows of tiles that run together, so that x stays in L2

struct Problem {
  int B, T, I, O;
  int add;  // to what dw and db hold
  Plan plan;
  Tasks tasks;
  Workspace work;
};

inline Problem problem_of(int B, int T, int I, int O, bool add, const Plan& plan, bool bias,
                          void* memory) {
  const Tasks tasks = tasks_of(plan, B, T, O, bias);
  return {B, T, I, O, add, plan, tasks, workspace_of(plan, tasks, B, memory)};
}

// Whole tiles and runs are numbered; a cluster takes every num_clusters-th. As the whole tiles are
// whole waves where there are runs, each cluster takes one run, last.
GNSFAST_HOST_DEVICE int units_of(const Plan& plan) { return plan.whole_tiles + plan.runs; }

// Samples of one tile, which one cluster goes through.
struct Piece {
  int tile;
  int begin, end;  // samples; a unit may have no second piece: then there are none
  int slot;        // in the scratch, for a part of a tile; -1 for a whole tile
};

GNSFAST_DEVICE Piece piece_of(const Problem& p, int unit, int second) {
  const Plan& plan = p.plan;
  const int run = unit - plan.whole_tiles;
  if (run < 0) return {unit, 0, second ? 0 : p.B, -1};
  const int pairs = (plan.tiles - plan.whole_tiles) * p.B, first = run * plan.run;
  const int last = first + plan.run < pairs ? first + plan.run : pairs;
  const int cut = first / p.B + second;  // which of the cut tiles
  const int begin = first - cut * p.B, end = last - cut * p.B;
  return {plan.whole_tiles + cut, begin < 0 ? 0 : begin, end < p.B ? end : p.B, run + cut};
}

struct Corner {
  int o, i;
};

// The first row and column of the tile that a CTA of a cluster owns.
GNSFAST_DEVICE Corner corner_of(const Plan& plan, Tile size, int tile, int rank) {
  const int rows_of_band = kBand / size.cluster;
  const int band = tile / (rows_of_band * plan.tiles_i);
  const int within = tile % (rows_of_band * plan.tiles_i);
  const int left = plan.tiles / plan.tiles_i - band * rows_of_band;
  const int rows = left < rows_of_band ? left : rows_of_band;
  return {((band * rows_of_band + within % rows) * size.cluster + rank) * size.o,
          within / rows * size.i};
}

// Where values of a tile go: dW, or a part's place in the scratch, which has no edge.
template <class Output>
struct Matrix {
  Output* data;
  int rows, columns, add;
};

GNSFAST_DEVICE float* part_at(const Problem& p, Tile size, int slot, int rank) {
  return p.work.scratch + (static_cast<int64_t>(slot) * size.cluster + rank) * (size.o * size.i);
}

// The tickets of the finishing kernel, which runs after this one.
GNSFAST_DEVICE void clear_tickets(const Problem& p, int threads) {
  if (block_index() != 0) return;
  for (int k = thread_index(); k < p.tasks.columns + 1; k += threads) p.work.tickets[k] = 0;
}

template <bool kFirst, class A, class B>
GNSFAST_DEVICE auto& one_of(A& a, B& b) {
  if constexpr (kFirst) {
    return a;
  } else {
    return b;
  }
}

template <int kCount>
GNSFAST_DEVICE void clear(float (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) v[k] = 0.f;
}

GNSFAST_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

// Sums a squared norm over a warp's lanes; one of them stores it.
GNSFAST_DEVICE void store_sqnorm(float* to, float sqnorm, uint32_t lane) {
  sqnorm = warp_sum(sqnorm);
  if (lane == 0) *to = sqnorm;
}

template <int kCount>
GNSFAST_DEVICE float sqnorm_of(const float (&v)[kCount]) {
  float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i % 4] = fmaf(v[i], v[i], s[i % 4]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

}  // namespace gnsfast
