// SPDX-License-Identifier: Apache-2.0
// The loops of linear_wgrad.cpp, for one instruction set. A tile of dW, kRows x kColumns, stays in
// registers while a sample's tokens go by.
#include "panel.h"

constexpr int kGroup = 128;  // columns of right that are packed at a time

inline void add(Wide& sum, const Vector (&squares)[kVectors]) {
  Vector both = squares[0];
  for (int v = 1; v < kVectors; ++v) both += squares[v];
  sum += __builtin_convertvector(both, Wide);
}

// A tile's product with one chunk; when that completes a sample, its squares, and its sum into dW.
template <class Packed, int kM>
void add_tile(const Tile& a, const Chunk& chunk, Squares& squares) {
  Vector s[kM][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) s[m][v] = Vector{};
  }
  float* const dw = a.dw;  // copies, which the compiler would else read again after each store
  const int64_t step = a.row_step;
  if (chunk.last && a.prefetch) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const float* row = dw + m * step;
      for (int k = 0; k < kColumns; k += kCacheLine) __builtin_prefetch(row + k, 1);
      __builtin_prefetch(row + kColumns - 1, 1);
    }
  }
  const float *left = a.left, *right = a.right;
  for (int t = 0; t < a.rows; ++t, left += a.left_step, right += a.right_step) {
    Vector r[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) r[v] = load(right + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Packed::add_product(s[m][v], left[m], r[v]);
    }
  }
  if (chunk.resume) {  // after the product: one sum over all tokens would lose digits
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) s[m][v] += load(a.part + m * kColumns + v * kLanes);
    }
  }
  if (!chunk.last) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(a.part + m * kColumns + v * kLanes, s[m][v]);
    }
    return;
  }
  const auto each = [&](const auto& of) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) of(m, v, s[m][v]);
    }
  };
  const auto add_squares = [&](Wide& to) {
    constexpr int kSums = kM > 6 ? 2 : 1;  // of each column: a sum waits for the one before
    Vector sums[kSums][kVectors] = {};
    each([&](int m, int v, const Vector& x) { sums[m % kSums][v] += x * x; });
    for (int v = 0; kSums > 1 && v < kVectors; ++v) sums[0][v] += sums[kSums - 1][v];
    add(to, sums[0]);
  };
  // One condition for all registers: one for each costs short samples as much as their product.
  if (a.columns < kColumns) {  // where right has zeros for columns, an infinite left made NaNs
    each([&](int, int v, Vector& x) { x = first(x, a.columns - v * kLanes); });
  }
  add_squares(squares.sample);
  if (!chunk.first) {
    each([=](int m, int v, Vector& x) { x += load(dw + m * step + v * kLanes); });
  }
  each([=](int m, int v, const Vector& x) { store(dw + m * step + v * kLanes, x); });
  if (chunk.final) add_squares(squares.total);
}

// ``add_tile`` where the tile has fewer columns, or these are not side by side in dW: beside it.
template <class Packed, int kM>
void add_beside(const Tile& tile, const Chunk& chunk, Squares& squares) {
  float beside[kM * kColumns] = {};
  const auto each = [&](const auto& of) {
    for (int m = 0; m < kM; ++m) {
      for (int k = 0; k < tile.columns; ++k) {
        of(tile.dw[m * tile.row_step + k * tile.column_step], beside[m * kColumns + k]);
      }
    }
  };
  if (chunk.last && !chunk.first) each([](float in_dw, float& copy) { copy = in_dw; });
  Tile whole = tile;
  whole.dw = beside;
  whole.row_step = kColumns;
  add_tile<Packed, kM>(whole, chunk, squares);
  if (chunk.last) each([](float& in_dw, float copy) { in_dw = copy; });
}

// A thread's memory, cut up.
struct Memory {
  float *left_panels, *right_panels, *parts;
  float* panel;                    // a copy, whose tokens are added
  double *left_sums, *right_sums;  // squares, total, carried
  size_t bytes;
};

inline Memory memory_of(const Work& work, char* memory) {
  Cut cut{memory};
  const int64_t tall = int64_t{work.grid.tallest} * kRows;
  const int64_t wide = int64_t{work.grid.widest} * kColumns;
  Memory m{};
  const int64_t group = work.right_packed ? std::min<int64_t>(kGroup, wide) : kColumns;
  cut.take(m.left_panels, work.left_packed ? tall * work.tokens : 0);
  cut.take(m.right_panels, group * work.tokens);
  cut.take(m.parts, work.parts ? tall * wide : 0);
  cut.take(m.panel, kColumns * (work.tokens + 1));
  cut.take(m.left_sums, 2 * (tall + kColumns) + int64_t{work.samples} * kSquares);
  cut.take(m.right_sums, 2 * wide + int64_t{work.samples} * kSquares);
  m.bytes = cut.bytes;
  return m;
}

inline size_t bytes_of(const Work& work) { return memory_of(work, nullptr).bytes; }

// All chunks of a block of tiles. What a chunk takes of left, and a group of right panels, stay in the
// second-level cache, a right panel in the first-level one.
template <class Packed, class Element>
void walk(Work& work, int index, char* memory) {
  const LinearWgrad& call = work.call;
  const Side &left = call.left, &right = call.right;
  const Block block = block_of(work, index);
  const Memory at = memory_of(work, memory);
  const Sums left_sums = sums_of(work, index, true, at.left_sums);
  const Sums right_sums = sums_of(work, index, false, at.right_sums);

  const int64_t tall = block.bottom - block.top, wide = block.right - block.left;
  // A group fills the first-level cache, which few tiles would not refill with what they take.
  const int64_t group = tall > 4 * kRows ? kGroup : kColumns;

  for (const Chunk& chunk : work.chunks) {
    const auto* left_data = static_cast<const Element*>(left.data) + chunk.left_at +
                            block.top * left.stride_n;
    const auto* right_data = static_cast<const Element*>(right.data) + chunk.right_at +
                             block.left * right.stride_n;
    const int packed_rows = times(chunk.tokens, Packed::kTokens);
    add_side(left_data, left, chunk, left_sums, at.panel);
    add_side(right_data, right, chunk, right_sums, at.panel);
    if (work.left_packed) {
      pack_panels<Packed, kRows, false>(left_data, left, chunk.tokens, tall, at.left_panels);
    }
    Squares found;
    for (int64_t across = 0; across < wide; across += kColumns) {
      const int columns = count(wide, across, kColumns);
      const Element* const from = right_data + across * right.stride_n;
      const bool pack_this = work.right_packed || columns < kColumns;
      const int64_t in_group = work.right_packed ? across % group : 0;
      if (pack_this && !in_group) {
        pack_panels<Packed, kColumns, true>(from, right, chunk.tokens,
                                            std::min(group, wide - across), at.right_panels);
      }
      const bool whole = columns == kColumns && call.column_step == 1;
      for (int64_t down = 0, next; down < tall; down = next) {
        int rows = count(tall, down, kRows);
        if (!work.left_packed && rows < tall - down && 2 * (tall - down) < 3 * kRows) {
          rows = times(tall - down, 2);  // a tile of few rows takes as long as one of more
        }
        next = down + rows;
        const int64_t beside = across * work.grid.tallest * kRows + down * kColumns;
        const int64_t first = (block.top + down) * call.row_step +
                              (block.left + across) * call.column_step;
        Tile tile{at.left_panels + down * packed_rows, at.right_panels + in_group * packed_rows,
                  packed_rows, rows, kColumns, call.dw + first, call.row_step, call.column_step,
                  columns, at.parts + beside};
        tile.prefetch = call.left.N * call.right.N > kCachedDw;
        if (!work.left_packed) {
          tile.left = reinterpret_cast<const float*>(left_data + down);
          tile.left_step = left.stride_t;
        }
        if (!pack_this) {
          tile.right = reinterpret_cast<const float*>(from);
          tile.right_step = right.stride_t;
        }
        with_rows(rows, [&](auto m) {
          whole ? add_tile<Packed, m>(tile, chunk, found)
                : add_beside<Packed, m>(tile, chunk, found);
        });
      }
    }
    found.note(work, index, chunk);
  }
  left_sums.end(call.B);
  right_sums.end(call.B);
}

inline void run(Work& work, int index, char* memory) {
  work.call.bfloat16 ? walk<Numbers, Bfloat16>(work, index, memory)
                     : walk<Numbers, float>(work, index, memory);
}
