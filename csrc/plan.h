// SPDX-License-Identifier: Apache-2.0
// How the tiles of dW are shared out, and the memory that a call needs beside its results. Pure
// functions without CUDA headers: the host model and Python call them too.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace gnsfast {

constexpr int kWarpsOfTile = 8;  // of a block that multiplies: each stores norms of its own

struct Tile {
  int o, i;     // rows and columns of dW that a block owns
  int cluster;  // blocks that own tiles one below the other and share x
};

inline int times(int64_t size, int64_t part) {
  return static_cast<int>((size + part - 1) / part);
}

// Whole waves of tiles come first: each block goes through all samples of a tile, and all blocks
// are at the same sample at a time, so that they find its x and dy in L2. The tiles that are left,
// fewer than there are blocks, are cut where that pays. Each has an owner, a block that takes its
// first ``own`` samples. The other blocks, the helpers, deal out the line of what is left, tile
// after tile, in runs of ``own``. The busiest block has no more to do than if all pairs of a tile
// and a sample were dealt out evenly.
//
// Owners are at the same sample too, and helpers at the few that owners leave out. So GPT-2's qkv
// (B = 16, T = 1024, 66 clusters) reads 113 MB, where x and dy have 101; simulated, with 44 MB of
// L2. Equal runs of one line over all tiles are at as many samples as there are blocks: 457 MB.
struct Plan {
  Tile tile;
  int tiles_i, tiles;  // columns of tiles, and all; a tile is that of a whole cluster
  int at_once;         // clusters that run at a time
  int whole_tiles;     // the first ones
  int own, helpers;    // samples of an owner or a helper, where tiles are cut

  int cut_tiles() const { return tiles - whole_tiles; }
  int64_t norm_rows() const { return static_cast<int64_t>(tiles) * tile.cluster * kWarpsOfTile; }
  // Parts of cut tiles: those of the owners, then of the helpers. As a run ends or a tile ends from
  // one part to the next, the numbers of both together number them.
  int slots() const { return helpers ? (2 * cut_tiles() + helpers - 1) * tile.cluster : 0; }
  int64_t scratch_elements() const { return static_cast<int64_t>(slots()) * tile.o * tile.i; }
  // Samples of the block that has most to do.
  int busiest(int B) const { return times(whole_tiles, at_once) * B + (helpers ? own : 0); }
};

// What cut tiles cost, in steps of 64 tokens (0.4 us): seven for each part of a block, as all of
// them are written at 4.3 TB/s and then read; one more for each part of the busiest helper, which
// stores them one by one, and for each part of a tile, which one block adds. All counted.
constexpr int kStep = 64;
constexpr int kPartSteps = 7;

// ``processors``: multiprocessors, each of which runs one block at a time.
inline Plan plan_tiles(Tile tile, int B, int T, int I, int O, int processors) {
  Plan plan{tile, times(I, tile.i), 0, processors / tile.cluster, 0, B, 0};
  plan.whole_tiles = plan.tiles = times(O, tile.o * tile.cluster) * plan.tiles_i;
  const int left = plan.tiles % plan.at_once;
  const int64_t pairs = static_cast<int64_t>(left) * B;
  const int own = times(pairs, plan.at_once), rest = B - own;
  if (!own || !rest || pairs > INT32_MAX / 2) return plan;  // the kernels count pairs in an int
  const int helpers = times(static_cast<int64_t>(left) * rest, own);
  const int stored = times(own - 1, rest) + 1, added = times(rest - 1, own) + 2;
  const int64_t cost = times(kPartSteps * (2 * left + helpers - 1), plan.at_once) + stored + added;
  if (static_cast<int64_t>(rest) * times(T, kStep) <= cost) return plan;
  plan.whole_tiles -= left;
  plan.own = own;
  plan.helpers = helpers;
  return plan;
}

// The finishing kernel: blocks of each of its tasks, and what one of them takes.
constexpr int kFinishThreads = 256;
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kPairsOfThread = 8;  // pairs of neighbouring values of a cut tile
constexpr int kNormRows = 256;     // rows of partial norms, 32 samples wide
constexpr int kBiasColumns = 256;  // columns of dy, of
constexpr int kBiasTokens = 256;   // this many tokens of a sample, or more
constexpr int kPieces = 128;       // blocks of a group of columns; one adds what all leave

struct Tasks {
  int shares;    // blocks for a block's cut tile
  int parts;     // blocks that add parts of cut tiles
  int rows;      // of partial norms
  int heights;   // groups of them
  int widths;    // groups of 32 columns of them: samples, and the sum at last
  int columns;   // groups of columns of dy; none without a bias
  int chunks;    // of a sample's tokens
  int tokens;    // of a chunk
  int warps;     // of a sample, a power of two: fewer where samples are short
  int together;  // samples that the warps of a block have at a time
  int samples;   // of a block; one where there are chunks
  int pieces;    // blocks of a group of columns
  int tickets;
  int64_t norms, sums;  // blocks that add rows of norms, and tokens
  int64_t blocks() const { return parts + norms + sums; }
};

inline Tasks tasks_of(const Plan& plan, int B, int T, int O, bool bias) {
  Tasks tasks{};
  tasks.shares = plan.tile.o * plan.tile.i / (2 * kPairsOfThread * kFinishThreads);
  tasks.parts = plan.cut_tiles() * plan.tile.cluster * tasks.shares;
  tasks.rows = static_cast<int>(plan.norm_rows());
  tasks.heights = times(tasks.rows, kNormRows);
  tasks.widths = times(B + 1, 32);
  tasks.columns = bias ? times(O, kBiasColumns) : 0;
  tasks.chunks = std::max(1, std::min(times(T, kBiasTokens), kPieces / B));
  tasks.tokens = times(T, tasks.chunks);
  for (tasks.warps = 1; tasks.warps < kFinishWarps && tasks.warps * 32 < T;) tasks.warps *= 2;
  tasks.together = kFinishWarps / tasks.warps;
  tasks.samples = tasks.together * times(B, tasks.together * kPieces);
  tasks.pieces = times(B, tasks.samples) * tasks.chunks;
  tasks.tickets = 1 + tasks.widths + tasks.columns + tasks.pieces;
  tasks.norms = static_cast<int64_t>(tasks.heights) * tasks.widths;
  tasks.sums = static_cast<int64_t>(tasks.columns) * tasks.pieces;
  return tasks;
}

// One allocation, cut up. No part of it needs a value before the launch.
struct Workspace {
  double* norm_sums;      // [heights, B + 1]
  double* part_norms;     // [parts]
  float* norms;           // [tiles · cluster · warps, B + 1]
  float* scratch;         // [slots, tile]
  float* bias_sums;       // [columns, pieces, kBiasColumns]
  float* bias_norms;      // [columns · warps, B + 1]; of chunks and of the sum [columns, B + 1]
  int* tickets;           // the kernel's, then of widths, columns, pieces; the product clears them
  int64_t bytes;
};

inline Workspace workspace_of(const Plan& plan, const Tasks& tasks, int B, void* memory) {
  Workspace w{};
  const int64_t row = B + 1;
  auto take = [&](auto*& pointer, int64_t count) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory) + w.bytes;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    w.bytes += (count * sizeof(*pointer) + 15) / 16 * 16;
  };
  take(w.norm_sums, tasks.heights * row);
  take(w.part_norms, tasks.parts);
  take(w.norms, plan.norm_rows() * row);
  take(w.scratch, plan.scratch_elements());
  take(w.bias_sums, tasks.sums * kBiasColumns);
  take(w.bias_norms, static_cast<int64_t>(tasks.columns) * kFinishWarps * row);
  take(w.tickets, tasks.tickets);
  return w;
}

}  // namespace gnsfast
