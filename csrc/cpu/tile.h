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
  if (chunk.last) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const float* row = a.dw + m * a.row_step;
      for (int k = 0; k < kColumns; k += kCacheLine) __builtin_prefetch(row + k, 1);
      __builtin_prefetch(row + kColumns - 1, 1);
    }
  }
  const float *left = a.left, *right = a.right;
  for (int t = 0; t < a.rows; ++t, left += kM, right += a.right_step) {
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
  Vector sample[kVectors] = {}, total[kVectors] = {};
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      // Where right has zeros for columns, an infinite left made NaNs.
      if (a.columns < kColumns) s[m][v] = first<Vector, Lanes>(s[m][v], a.columns - v * kLanes);
      float* to = a.dw + m * a.row_step + v * kLanes;
      const Vector sum = chunk.first ? s[m][v] : s[m][v] + load(to);
      store(to, sum);
      sample[v] += s[m][v] * s[m][v];
      if (chunk.final) total[v] += sum * sum;
    }
  }
  add(squares.sample, sample);
  if (chunk.final) add(squares.total, total);
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
  float* panel;                    // whose tokens are added, if the packed ones hold no numbers
  double *left_sums, *right_sums;  // squares, total, carried
  size_t bytes;
};

inline Memory memory_of(const Work& work, char* memory) {
  Cut cut{memory};
  const int64_t tall = int64_t{work.grid.tallest} * kRows;
  const int64_t wide = int64_t{work.grid.widest} * kColumns;
  Memory m{};
  cut.take(m.left_panels, tall * work.tokens);
  cut.take(m.right_panels, std::min<int64_t>(kGroup, wide) * work.tokens);
  cut.take(m.parts, work.parts ? tall * wide : 0);
  cut.take(m.panel, kColumns * (work.tokens + 1));
  cut.take(m.left_sums, 2 * tall + int64_t{work.samples} * kSquares);
  cut.take(m.right_sums, 2 * wide + int64_t{work.samples} * kSquares);
  m.bytes = cut.bytes;
  return m;
}

inline size_t bytes_of(const Work& work) { return memory_of(work, nullptr).bytes; }

// All chunks of a block of tiles. The left panels of a chunk and a group of right panels stay in the
// second-level cache, a right panel in the first-level one.
template <class Packed, class Element>
void walk(Work& work, int index, char* memory) {
  const LinearWgrad& call = work.call;
  const Side &left = call.left, &right = call.right;
  const Block block = block_of(work, index);
  const Memory at = memory_of(work, memory);
  const Sums left_sums = sums_of(work, index, true, at.left_sums);
  const Sums right_sums = sums_of(work, index, false, at.right_sums);

  // A right panel that one tile reads is not worth packing.
  const bool packed = !std::is_same_v<Element, float> || right.stride_n != 1 ||
                      block.bottom - block.top > kRows || right_sums.total;
  // A group fills the first-level cache, which few tiles would not refill with what they take.
  const int64_t group = block.bottom - block.top > 4 * kRows ? kGroup : kColumns;

  for (const Chunk& chunk : work.chunks) {
    const auto* left_data = static_cast<const Element*>(left.data) + chunk.left_at;
    const auto* right_data = static_cast<const Element*>(right.data) + chunk.right_at;
    const int packed_rows = times(chunk.tokens, Packed::kTokens);
    pack_panels<Packed, kRows, false>(left_data + block.top * left.stride_n, left, chunk.tokens,
                                      block.bottom - block.top, at.left_panels);
    for (int64_t o = block.top; left_sums.total && o < block.bottom; o += kRows) {
      with_rows(count(block.bottom, o, kRows), [&](auto rows) {
        const float* panel = at.left_panels + (o - block.top) * packed_rows;
        if constexpr (Packed::kTokens > 1) {
          pack_numbers<rows>(left_data + o * left.stride_n, left, chunk.tokens, rows, at.panel);
          panel = at.panel;
        }
        add_tokens<rows>(panel, chunk, left_sums, o - block.top);
      });
    }
    left_sums.end_chunk(chunk);
    Squares found;
    for (int64_t i = block.left; i < block.right; i += kColumns) {
      const int columns = count(block.right, i, kColumns);
      const Element* from = right_data + i * right.stride_n;
      const bool pack_this = packed || columns < kColumns;
      const int64_t in_group = packed ? (i - block.left) % group : 0;
      if (pack_this && !in_group) {
        pack_panels<Packed, kColumns, true>(from, right, chunk.tokens,
                                            std::min(group, block.right - i), at.right_panels);
      }
      const float* const panel = at.right_panels + in_group * packed_rows;
      if (Packed::kTokens > 1 && right_sums.total) {
        pack_numbers<kColumns>(from, right, chunk.tokens, columns, at.panel);
        add_tokens<kColumns>(at.panel, chunk, right_sums, i - block.left);
      } else if (right_sums.total) {
        add_tokens<kColumns>(panel, chunk, right_sums, i - block.left);
      }
      for (int64_t o = block.top; o < block.bottom; o += kRows) {
        const int rows = count(block.bottom, o, kRows);
        const int64_t down = o - block.top, across = i - block.left;
        const int64_t beside = across * work.grid.tallest * kRows + down * kColumns;
        const int64_t first = o * call.row_step + i * call.column_step;
        Tile tile{at.left_panels + down * packed_rows, panel, packed_rows, kColumns,
                  call.dw + first, call.row_step, call.column_step, columns, at.parts + beside};
        if (!pack_this) {
          tile.right = reinterpret_cast<const float*>(from);
          tile.right_step = right.stride_t;
        }
        const bool whole = columns == kColumns && call.column_step == 1;
        with_rows(rows, [&](auto m) {
          whole ? add_tile<Packed, m>(tile, chunk, found)
                : add_beside<Packed, m>(tile, chunk, found);
        });
      }
    }
    found.note(work, index, chunk);
    right_sums.end_chunk(chunk);
  }
  left_sums.end(call.B);
  right_sums.end(call.B);
}

inline void run(Work& work, int index, char* memory) {
  work.call.bfloat16 ? walk<Numbers, Bfloat16>(work, index, memory)
                     : walk<Numbers, float>(work, index, memory);
}
