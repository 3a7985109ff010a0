// SPDX-License-Identifier: Apache-2.0
// What the kernels of linear_wgrad share: a block's tile and samples, and sums of squares.
#pragma once

namespace gnsfast {

constexpr int kBand = 8;  // rows of tiles that run together, so that x stays in L2

struct Problem {
  int B, T, I, O;
  int tiles_i = 0;
  int tiles = 0;        // of a whole cluster
  int whole_tiles = 0;  // the first ones; each of the others is split into parts
  int parts = 1;
  int add = 0;               // to what dw holds
  float* partial = nullptr;  // [tiles · cluster · warps, B + 1]
  float* scratch = nullptr;  // [(tiles - whole_tiles) · parts · cluster, tile]
};

// Tiles, or parts of tiles, are numbered; a cluster takes every num_clusters-th.
struct Unit {
  int tile, part;
  int o, i;        // the CTA's own first row, the cluster's first column
  int begin, end;  // samples
  bool whole;
};

GNSFAST_HOST_DEVICE int units_of(const Problem& p) {
  return p.whole_tiles + (p.tiles - p.whole_tiles) * p.parts;
}

template <int kTileO, int kTileI, int kCluster>
GNSFAST_DEVICE Unit locate(const Problem& p, int unit, int rank) {
  Unit u;
  const int beyond = unit - p.whole_tiles;
  u.whole = beyond < 0;
  u.tile = u.whole ? unit : p.whole_tiles + beyond / p.parts;
  u.part = u.whole ? 0 : beyond % p.parts;
  const int parts = u.whole ? 1 : p.parts;
  const int each = p.B / parts, more = p.B % parts;  // the first parts have one sample more
  u.begin = u.part * each + (u.part < more ? u.part : more);
  u.end = u.begin + each + (u.part < more);

  constexpr int kRows = kBand / kCluster;
  const int band = u.tile / (kRows * p.tiles_i);
  const int within = u.tile % (kRows * p.tiles_i);
  const int left = p.tiles / p.tiles_i - band * kRows;
  const int rows = left < kRows ? left : kRows;
  u.o = ((band * kRows + within % rows) * kCluster + rank) * kTileO;
  u.i = within / rows * kTileI;
  return u;
}

// Where a CTA's part of a split tile lies in the scratch, in tiles.
template <int kCluster>
GNSFAST_DEVICE int64_t scratch_slot(const Problem& p, int tile, int part, int rank) {
  return (static_cast<int64_t>(tile - p.whole_tiles) * p.parts + part) * kCluster + rank;
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

// A CTA's part of a split tile goes to the scratch in its threads' layout, and is added up from there.
template <int kThreads, int kCluster, int kCount>
GNSFAST_DEVICE void store_part(const Problem& p, const Unit& u, int rank, uint32_t thread,
                               const float (&v)[kCount]) {
  const int64_t slot = scratch_slot<kCluster>(p, u.tile, u.part, rank);
  float* to = p.scratch + slot * kCount * kThreads + thread;
#pragma unroll
  for (int k = 0; k < kCount; ++k) to[k * kThreads] = v[k];
}
template <int kThreads, int kCluster, int kCount>
GNSFAST_DEVICE void add_parts(const Problem& p, int tile, int rank, uint32_t thread,
                              float (&total)[kCount]) {
  clear(total);
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    const int64_t slot = scratch_slot<kCluster>(p, tile, part, rank);
    const float* from = p.scratch + slot * kCount * kThreads + thread;
#pragma unroll
    for (int k = 0; k < kCount; ++k) total[k] += from[k * kThreads];
  }
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
