// SPDX-License-Identifier: Apache-2.0
// How the tiles and the tokens of linear_wgrad.cpp are shared out, and the memory that they take.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "linear_wgrad.h"

namespace gnsfast::cpu {

constexpr int kTokens = 256;          // of a chunk: more would lose digits, as one sum takes them all
constexpr int kShort = 48;            // tokens: below, a block of dW fits into the cache as well
constexpr int kShortDirect = 200;     // the same where smaller blocks need no more packing
constexpr int kCached = 192 << 10;    // floats of left panels, for a second-level cache of 1 MiB
constexpr int kFewAcross = 16, kFewDown = 40;  // tiles that read left, right, faster than it is packed
constexpr int64_t kCachedDw = 1 << 20;         // numbers of dW that need no prefetching
constexpr int kWidest = 1024;         // columns of a block
constexpr int64_t kEnough = 1 << 20;  // multiply-adds that are worth a thread
constexpr int kSquares = 8;           // sums of float64 for a sample: the lanes of a register
constexpr int kCacheLine = 64 / sizeof(float);

// Rows of both sides: a sample, a part of a long one, or samples that need not be told apart.
struct Chunk {
  int64_t left_at, right_at;  // elements from the start
  int64_t sample;
  int samples, tokens;
  bool first, final;  // whether it is of the first sample, of the last
  bool resume, last;  // whether it continues a sample, whether it ends one
};

struct Tile {
  const float *left, *right;  // columns of a chunk, packed or where they lie
  int rows;                   // of these
  int64_t left_step, right_step;  // from row to row
  float* dw;
  int64_t row_step, column_step;
  int columns;
  float* part;            // of a long sample, from the chunks before
  bool prefetch = false;  // dW
};

// Columns of left, which are rows of dW, and columns of right.
struct Block {
  int64_t top, bottom, left, right;
};

struct Grid {
  int rows, columns;        // panels of left, of right
  int in_rows, in_columns;  // blocks
  int tallest, widest;      // panels of a block at most

  int blocks() const { return in_rows * in_columns; }
};

// What a block finds for each sample, and after these for the sum of all.
enum Found { kWeight, kLeft, kRight, kFound };

// The sums of one side's columns in a block. Without ``total`` nobody wants them.
struct Sums {
  double *total, *carried;  // of all samples; of a long one, from the chunks before
  double* squares;          // [samples of a chunk, kSquares]
  double* found;            // [B + 1]
  float* db;                // or null
  int columns;

  void end_chunk(const Chunk& chunk) const {
    for (int sample = 0; total && sample < chunk.samples; ++sample) {
      for (int lane = 0; lane < kSquares; ++lane) {
        double& square = squares[sample * kSquares + lane];
        found[chunk.sample + sample] += std::exchange(square, 0.0);
      }
    }
  }

  void end(int64_t B) const {
    for (int k = 0; total && k < columns; ++k) {
      found[B] += total[k] * total[k];
      if (db) db[k] = static_cast<float>(total[k]);
    }
  }
};

struct Work;

struct Kernel {
  const char* name;
  int rows, columns;       // of a tile
  int tallest, widest;     // tiles of a block at most; tallest: or 0, as many as the cache takes
  int packing;             // what packing a number costs, in products
  size_t (*bytes)(const Work&);  // of a thread's memory
  void (*run)(Work&, int block, char* memory);
};

// Null where the processor has none.
#ifdef GNSFAST_BFLOAT16
const Kernel* amx_kernel();
const Kernel* bfloat16_kernel();
#else
inline const Kernel* amx_kernel() { return nullptr; }
inline const Kernel* bfloat16_kernel() { return nullptr; }
#endif

struct Work {
  const LinearWgrad& call;
  const Kernel& kernel;
  bool closed;  // samples of one token: their norm is the product of two rows' norms
  std::vector<Chunk> chunks;
  int tokens = 0, samples = 0;  // of a chunk at most
  bool parts = false;           // whether a sample has several
  int threads = 1;
  Grid grid = {};
  bool left_packed = true, right_packed = true;
  int kinds = 1;                       // of Found: the first one, or all
  std::vector<double> all_found = {};  // [blocks, kinds, B + 1]

  double* found(int block, Found what) {
    if (what >= kinds) return nullptr;
    return all_found.data() + (int64_t{block} * kinds + what) * (call.B + 1);
  }
};

inline int count(int64_t size, int64_t from, int most) {
  return static_cast<int>(std::min<int64_t>(most, size - from));
}

inline int times(int64_t size, int64_t part) { return static_cast<int>((size + part - 1) / part); }

// Whether few tiles read a side faster where it lies than packed. Rows that are pages apart would
// evict each other from the first-level cache.
inline bool direct(const LinearWgrad& call, const Side& side) {
  return !call.bfloat16 && side.stride_n == 1 && side.stride_t % 1024 != 0;
}

// Whole panels, but for the last ones of each side.
inline Block block_of(const Work& work, int index) {
  const Grid& grid = work.grid;
  const auto row = [&](int64_t at) {
    return std::min(work.call.left.N, grid.rows * at / grid.in_rows * work.kernel.rows);
  };
  const auto column = [&](int64_t at) {
    return std::min(work.call.right.N, grid.columns * at / grid.in_columns * work.kernel.columns);
  };
  const int i = index / grid.in_columns, k = index % grid.in_columns;
  return {row(i), row(i + 1), column(k), column(k + 1)};
}

inline std::vector<Chunk> chunks_of(const LinearWgrad& call, bool told_apart) {
  std::vector<Chunk> chunks;
  const Side &left = call.left, &right = call.right;
  if (!told_apart) {
    const int64_t most = std::max<int64_t>(1, kTokens / call.T);
    for (int64_t b = 0; b < call.B; b += most) {
      const int samples = count(call.B, b, static_cast<int>(most));
      const int64_t row = b * call.T;
      chunks.push_back({row * left.stride_t, row * right.stride_t, b, samples,
                        static_cast<int>(samples * call.T), b == 0, b + samples == call.B, false,
                        true});
    }
    return chunks;
  }
  for (int64_t b = 0; b < call.B; ++b) {
    const int64_t T = call.starts ? call.starts[b + 1] - call.starts[b] : call.T;
    if (!T && !(chunks.empty() && b == call.B - 1)) continue;  // one to write zeros, if all are empty
    const int64_t left_at = call.starts ? call.starts[b] * left.stride_t : b * left.stride_b;
    const int64_t right_at = call.starts ? call.starts[b] * right.stride_t : b * right.stride_b;
    const int parts = std::max(1, times(T, kTokens)), most = times(T, parts);
    for (int part = 0; part < parts; ++part) {
      const int64_t t = int64_t{part} * most;
      chunks.push_back({left_at + t * left.stride_t, right_at + t * right.stride_t, b, 1,
                        count(T, t, most), false, false, part > 0, part == parts - 1});
    }
  }
  for (Chunk& chunk : chunks) {
    chunk.first = chunk.sample == chunks.front().sample;
    chunk.final = chunk.sample == chunks.back().sample;
  }
  return chunks;
}

// The blocks that take the busiest thread the least: each element of dW is a product for a token, and
// each row and column of a block is a number to be packed.
inline Grid grid_of(const Kernel& kernel, int64_t M, int64_t N, int tokens, bool dw_cached,
                    int threads) {
  Grid grid{times(M, kernel.rows), times(N, kernel.columns), 0, 0, 0, 0};
  const int each = dw_cached ? kWidest : std::max(kTokens, tokens);  // floats of a left row
  const int cached = std::max(1, kCached / (each * kernel.rows));
  const int rows = times(grid.rows, kernel.tallest ? kernel.tallest : cached);
  const int columns = times(grid.columns, kernel.widest);
  double least = std::numeric_limits<double>::infinity();
  for (int k = columns; k <= std::min(grid.columns, columns + threads - 1); ++k) {
    for (int round = 1; round <= 4; ++round) {
      const int i = std::min(grid.rows, std::max(rows, times(int64_t{round} * threads, k)));
      const double tall = times(grid.rows, i) * kernel.rows;
      const double wide = times(grid.columns, k) * kernel.columns;
      const double block = tall * wide + kernel.packing * (tall + wide);
      const double cost = times(int64_t{i} * k, threads) * block;
      if (cost < least) {
        least = cost;
        grid.in_rows = i;
        grid.in_columns = k;
      }
    }
  }
  grid.tallest = times(grid.rows, grid.in_rows);
  grid.widest = times(grid.columns, grid.in_columns);
  return grid;
}

// Cuts a thread's memory up.
struct Cut {
  char* memory;
  size_t bytes = 0;

  template <class T>
  void take(T*& pointer, int64_t size) {
    pointer = reinterpret_cast<T*>(memory + bytes);
    bytes += (size * sizeof(T) + 63) / 64 * 64;
  }
};

// Those of one side, where a block is the one to add them.
inline Sums sums_of(Work& work, int index, bool left, double* memory) {
  const LinearWgrad& call = work.call;
  const Block block = block_of(work, index);
  const bool bias = call.db && call.bias_of_right != left;
  if ((left ? block.left : block.top) > 0 || !(bias || work.closed)) return {};
  const int width = work.kernel.columns;
  const int64_t first = left ? block.top : block.left;
  Sums sums{};
  sums.squares = memory;
  sums.total = sums.squares + kSquares * work.samples;
  sums.columns = static_cast<int>((left ? block.bottom : block.right) - first);
  sums.carried = sums.total + times(sums.columns, width) * width;
  std::fill(sums.squares, sums.carried, 0.0);
  sums.found = work.found(index, left ? kLeft : kRight);
  if (bias) sums.db = call.db + first;
  return sums;
}

inline Work plan(const LinearWgrad& call, const Kernel& kernel) {
  const bool closed = call.T == 1 && !call.starts && !call.sqnorms;
  Work work{call, kernel, closed, chunks_of(call, !closed && !call.sqnorms)};
  int64_t products = 0;
  for (const Chunk& chunk : work.chunks) {
    work.tokens = std::max(work.tokens, chunk.tokens);
    work.samples = std::max(work.samples, chunk.samples);
    work.parts |= chunk.resume;
    products += chunk.tokens * call.left.N * call.right.N;
  }
  work.threads = call.team.for_work(products / kEnough);
  // Short samples come back to a block's part of dW after few products.
  const bool both = direct(call, call.left) && direct(call, call.right);
  const int few = both ? kShortDirect : kShort;
  const bool dw_cached = work.samples == 1 && work.tokens < few;
  work.grid = grid_of(kernel, call.left.N, call.right.N, work.tokens, dw_cached, work.threads);
  work.threads = std::min(work.threads, work.grid.blocks());
  work.left_packed = !direct(call, call.left) || work.grid.widest > kFewAcross;
  work.right_packed = !direct(call, call.right) || work.grid.tallest > kFewDown;
  if (call.db || closed) work.kinds = kFound;
  work.all_found.assign(int64_t{work.grid.blocks()} * work.kinds * (call.B + 1), 0.0);
  return work;
}

}  // namespace gnsfast::cpu
