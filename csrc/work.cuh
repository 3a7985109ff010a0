// SPDX-License-Identifier: Apache-2.0
// What the kernels of linear_wgrad share: the pieces of work of a block, and sums of squares.
#pragma once
#include <type_traits>

#include "plan.h"

namespace gnsfast {

// The type of dW and db where nobody wants them: the rows alone are written, with the same bits. A
// store of it does not compile. A call then writes O I values of dW and O of db less; parts of cut
// tiles still go to the scratch, since they are added before they are squared.
struct Nothing {};
template <class Output>
constexpr bool kStored = !std::is_same_v<Output, Nothing>;

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

// Units are whole tiles, then owners, then helpers; a cluster takes every num_clusters-th. As the
// whole tiles are whole waves where tiles are cut, each cluster takes one owner or helper, last.
GNSFAST_HOST_DEVICE int units_of(const Plan& plan) { return plan.tiles + plan.helpers; }

// Samples of one tile, which one cluster goes through.
struct Piece {
  int tile;
  int begin, end;  // samples; none beyond the last piece of a unit
  int slot;        // in the scratch, for a part of a tile; -1 for a whole tile
};

// The place of a helper's part of a cut tile, behind those of the owners.
GNSFAST_DEVICE int slot_of(const Plan& plan, int cut, int helper) {
  return plan.tiles - plan.whole_tiles + helper + cut;
}

// The helpers that have a part of a cut tile, in the order of its samples: ``begin`` to ``end``.
struct Helpers {
  int begin, end;
};
GNSFAST_DEVICE Helpers helpers_of(const Problem& p, int cut) {
  const int rest = p.B - p.plan.own, last = cut * rest + rest - 1;
  return {cut * rest / p.plan.own, last / p.plan.own + 1};
}

// The ``which``-th piece of a unit: a helper has one of each tile that its run meets.
GNSFAST_DEVICE Piece piece_of(const Problem& p, int unit, int which) {
  const Plan& plan = p.plan;
  const int helper = unit - plan.tiles;
  if (helper < 0) {
    const int cut = unit - plan.whole_tiles;
    return {unit, 0, which ? 0 : cut < 0 ? p.B : plan.own, cut < 0 ? -1 : cut};
  }
  const int rest = p.B - plan.own, all = (plan.tiles - plan.whole_tiles) * rest;
  const int first = helper * plan.own;
  const int last = first + plan.own < all ? first + plan.own : all;
  const int cut = first / rest + which, begin = first - cut * rest, end = last - cut * rest;
  return {plan.whole_tiles + cut, plan.own + (begin < 0 ? 0 : begin),
          plan.own + (end < rest ? end : rest), slot_of(plan, cut, helper)};
}

// A cluster's pieces, one after the other.
struct Walk {
  int unit, which = 0;
  Piece piece{};

  GNSFAST_DEVICE bool next(const Problem& p, int clusters) {
    for (; unit < units_of(p.plan); unit += clusters, which = 0) {
      piece = piece_of(p, unit, which++);
      if (piece.begin < piece.end) return true;
    }
    return false;
  }
};

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
  for (int k = thread_index(); k < p.tasks.tickets; k += threads) p.work.tickets[k] = 0;
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
