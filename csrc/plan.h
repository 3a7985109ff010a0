// SPDX-License-Identifier: Apache-2.0
// How the tiles of dW are shared out, and the memory that a call needs beside its results. Pure
// functions without CUDA headers: the host model and Python call them too.
#pragma once
#include <cstdint>
#include <type_traits>

namespace gnsfast {

constexpr int kWarpsOfTile = 8;  // of a block that multiplies: each stores norms of its own

struct Tile {
  int o, i;     // rows and columns of dW that a block owns
  int cluster;  // blocks that own tiles one below the other and share x
};

// Whole waves of tiles come first: each block goes through all samples of a tile, and all blocks
// are at the same sample at a time, so that they find its x and dy in L2. The pairs (tile, sample) of
// the tiles that are left form a line, tile by tile. A block takes a run of it that is shorter than
// a tile, so it meets two tiles at most. The busiest block has no more to do than if the pairs of
// all tiles were dealt out evenly, as whole waves leave nothing over.
struct Plan {
  Tile tile;
  int tiles_i, tiles;  // columns of tiles, and all; a tile is that of a whole cluster
  int at_once;         // clusters that run at a time
  int whole_tiles;     // the first ones
  int runs, run;       // how many runs the others have, and pairs of a run; the last may have fewer

  int cut_tiles() const { return tiles - whole_tiles; }
  int64_t norm_rows() const { return static_cast<int64_t>(tiles) * tile.cluster * kWarpsOfTile; }
  // The cut tile t has a part in every run r that meets it. As a run ends or a tile ends from one
  // part to the next, r + t numbers them.
  int slots() const { return runs ? (runs + cut_tiles() - 1) * tile.cluster : 0; }
  int64_t scratch_elements() const { return static_cast<int64_t>(slots()) * tile.o * tile.i; }
  // Samples of the block that has most to do.
  int busiest(int B) const {
    const int waves = (whole_tiles + at_once - 1) / at_once;
    return waves * B + (runs ? run : 0);
  }
};

inline int times(int64_t size, int64_t part) {
  return static_cast<int>((size + part - 1) / part);
}

// ``processors``: multiprocessors, each of which runs one block at a time.
inline Plan plan_tiles(Tile tile, int B, int I, int O, int processors) {
  Plan plan{tile, times(I, tile.i), 0, processors / tile.cluster, 0, 0, B};
  plan.tiles = times(O, tile.o * tile.cluster) * plan.tiles_i;
  const int64_t pairs = static_cast<int64_t>(plan.tiles % plan.at_once) * B;
  plan.run = pairs ? times(pairs, plan.at_once) : B;
  const bool cut = plan.run < B && pairs <= INT32_MAX / 2;  // the kernels count pairs in an int
  plan.whole_tiles = cut ? plan.tiles - plan.tiles % plan.at_once : plan.tiles;
  plan.runs = cut ? times(pairs, plan.run) : 0;
  return plan;
}

// The finishing kernel: blocks of each of its tasks, and what one of them takes.
constexpr int kFinishThreads = 256;
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kPairsOfThread = 8;  // pairs of neighbouring values of a cut tile
constexpr int kNormRows = 256;     // rows of partial norms, 32 samples wide
constexpr int kBiasColumns = 256;  // columns of dy, of
constexpr int kBiasTokens = 256;   // this many tokens of a sample

struct Tasks {
  int shares;      // blocks for a block's cut tile
  int parts;       // blocks that add parts of cut tiles
  int rows;        // of partial norms
  int norm_rows;   // groups of them
  int norms;       // blocks that add these
  int columns;     // groups of columns of dy; none without a bias
  int tokens;      // chunks of a sample's tokens
  int64_t sums;    // blocks that add tokens
  int tickets() const { return columns + 1; }
  int64_t blocks() const { return parts + norms + sums; }
};

inline Tasks tasks_of(const Plan& plan, int B, int T, int O, bool bias) {
  Tasks tasks{};
  tasks.shares = plan.tile.o * plan.tile.i / (2 * kPairsOfThread * kFinishThreads);
  tasks.parts = plan.runs ? plan.cut_tiles() * plan.tile.cluster * tasks.shares : 0;
  tasks.rows = static_cast<int>(plan.norm_rows());
  tasks.norm_rows = times(tasks.rows, kNormRows);
  tasks.norms = tasks.norm_rows * times(B + 1, 32);
  tasks.columns = bias ? times(O, kBiasColumns) : 0;
  tasks.tokens = times(T, kBiasTokens);
  tasks.sums = static_cast<int64_t>(tasks.columns) * B * tasks.tokens;
  return tasks;
}

// One allocation, cut up. No part of it needs a value before the launch.
struct Workspace {
  double* norm_sums;      // [norm_rows, B + 1]
  double* part_norms;     // [parts]
  float* norms;           // [tiles · cluster · warps, B + 1]
  float* scratch;         // [slots, tile]
  float* bias_sums;       // [columns, B, tokens, kBiasColumns]
  float* bias_norms;      // [columns · warps, B + 1]
  int* tickets;           // of each group of columns, then of the kernel; the product clears them
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
  take(w.norm_sums, tasks.norm_rows * row);
  take(w.part_norms, tasks.parts);
  take(w.norms, plan.norm_rows() * row);
  take(w.scratch, plan.scratch_elements());
  take(w.bias_sums, tasks.sums * kBiasColumns);
  take(w.bias_norms, static_cast<int64_t>(tasks.columns) * kFinishWarps * row);
  take(w.tickets, tasks.tickets());
  return w;
}

}  // namespace gnsfast
