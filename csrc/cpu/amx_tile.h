// SPDX-License-Identifier: Apache-2.0
// The loops of amx_wgrad.cpp.
#include "amx_pack.h"
#include "panel.h"

constexpr int kGroup = 128;  // columns of right that are packed at a time
constexpr int kHalf = kTile / 2;

// Where a number of a tile is: it consists of four registers of [16, 16], and the columns are in the
// order that pack_right makes.
constexpr int place(int m, int n) {
  return (m / kHalf * 2 + (n >> 2 & 1)) * kHalf * kHalf + m % kHalf * kHalf + (n >> 3) * 4 + (n & 3);
}

// A thread's memory, cut up. dW's part stays in the second-level cache in float32 until the last
// sample, tile by tile.
struct Memory {
  float *dw, *parts;       // of the block
  float *tile, *panel;     // of one tile, of one panel's tokens
  Bfloat16 *left, *right;  // packed
  double *left_sums, *right_sums;
  size_t bytes;
};

inline Memory memory_of(const Work& work, char* memory) {
  Cut cut{memory};
  const int64_t tall = int64_t{work.grid.tallest} * kTile, wide = int64_t{work.grid.widest} * kTile;
  const int64_t tokens = int64_t{times(work.tokens, kTile)} * kTile;
  Memory m{};
  cut.take(m.dw, tall * wide);
  cut.take(m.parts, work.parts ? tall * wide : 0);
  cut.take(m.tile, kSquare);
  cut.take(m.panel, kColumns * (work.tokens + 1));
  cut.take(m.left, tall * tokens);
  cut.take(m.right, std::min<int64_t>(kGroup, wide) * tokens);
  cut.take(m.left_sums, 2 * tall + int64_t{work.samples} * kSquares);
  cut.take(m.right_sums, 2 * wide + int64_t{work.samples} * kSquares);
  m.bytes = cut.bytes;
  return m;
}

// All tokens of 32 columns each, in squares of 32 tokens; zeros fill up both. A row of squares at a
// time, so that reads run along rows.
template <bool kLeft>
void pack_panels(const Bfloat16* from, const Side& side, int tokens, int64_t columns,
                 Bfloat16* to) {
  const int steps = times(tokens, kTile);
  for (int step = 0; step < steps; ++step, from += kTile * side.stride_t) {
    for (int64_t k = 0; k < columns; k += kTile) {
      const Source source(from + k * side.stride_n, side, count(tokens, step * kTile, kTile),
                          count(columns, k, kTile));
      Bfloat16* const square = to + k * steps * kTile + step * kSquare;
      kLeft ? pack_left(source, square) : pack_right(source, square);
    }
  }
}

// A tile's product with one chunk.
inline void multiply(const Bfloat16* left, const Bfloat16* right, int steps, float* to) {
  constexpr int kBytes = 64, kRegister = kHalf * kHalf;
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  for (int step = 0; step < steps; ++step, left += kSquare, right += kSquare) {
    amx::load<6>(right, kBytes);
    amx::load<4>(left, kBytes);
    amx::multiply<0, 4, 6>();
    amx::load<7>(right + kSquare / 2, kBytes);
    amx::multiply<1, 4, 7>();
    amx::load<5>(left + kSquare / 2, kBytes);
    amx::multiply<2, 5, 6>();
    amx::multiply<3, 5, 7>();
  }
  amx::store<0>(to, kBytes), amx::store<1>(to + kRegister, kBytes);
  amx::store<2>(to + 2 * kRegister, kBytes), amx::store<3>(to + 3 * kRegister, kBytes);
}

// Adds squares in float32 over a tile's vectors, two by two, then in float64.
struct TileSquares {
  Vector even = {}, odd = {};
  void add(int k, Vector v) { (k & 1 ? odd : even) += v * v; }
  void end(Wide& to) const { to += __builtin_convertvector(even + odd, Wide); }
};

// Squares a sample's tile and adds it to dW's, which goes back to ``tile`` after the last sample.
inline void add_tile(float* tile, float* dw, const Chunk& chunk, Squares& squares) {
  TileSquares sample, total;
  float* const to = chunk.final ? tile : dw;
#pragma GCC unroll 4
  for (int k = 0; k < kSquare / kLanes; ++k) {
    const Vector v = load(tile + k * kLanes);
    const Vector sum = chunk.first ? v : v + load(dw + k * kLanes);
    store(to + k * kLanes, sum);
    sample.add(k, v);
    if (chunk.final) total.add(k, sum);
  }
  sample.end(squares.sample);
  total.end(squares.total);
}

// ``of(number)`` for each of a tile that is beyond dW, or for each that is within.
template <class Of>
void each(int rows, int columns, bool within, const Of& of) {
  for (int m = 0; m < kTile; ++m) {
    for (int n = 0; n < kTile; ++n) {
      if ((m < rows && n < columns) == within) of(m, n, place(m, n));
    }
  }
}

// Writes a tile of dW, whose first element is ``first``.
inline void write(const LinearWgrad& call, int64_t first, int rows, int columns,
                  const float* tile) {
  auto* const halves = reinterpret_cast<Bfloat16*>(call.dw) + first;
  float* const floats = call.dw + first;
  if (call.column_step != 1) {
    each(rows, columns, true, [&](int m, int n, int k) {
      const int64_t at = m * call.row_step + n * call.column_step;
      if (call.dw_bfloat16) {
        _mm_mask_storeu_epi16(halves + at, 1, _mm512_castsi512_si128(amx::narrowed(
                                                  broadcast(tile[k]), Vector{})));
      } else {
        floats[at] = tile[k];
      }
    });
    return;
  }
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const uint32_t mask = ~0u >> (kTile - columns);
  for (int m = 0; m < rows; ++m) {
    const Vector one = load(tile + place(m, 0)), other = load(tile + place(m, 4));
    const __m512 a = _mm512_permutex2var_ps(one, low, other);
    const __m512 b = _mm512_permutex2var_ps(one, high, other);
    if (call.dw_bfloat16) {
      _mm512_mask_storeu_epi16(halves + m * call.row_step, mask, amx::narrowed(a, b));
    } else {
      _mm512_mask_storeu_ps(floats + m * call.row_step, static_cast<__mmask16>(mask), a);
      _mm512_mask_storeu_ps(floats + m * call.row_step + kHalf,
                            static_cast<__mmask16>(mask >> kHalf), b);
    }
  }
}

// All chunks of a block of tiles.
inline void run(Work& work, int index, char* memory) {
  const LinearWgrad& call = work.call;
  const Side &left = call.left, &right = call.right;
  const Block block = block_of(work, index);
  const Memory at = memory_of(work, memory);
  const Sums left_sums = sums_of(work, index, true, at.left_sums);
  const Sums right_sums = sums_of(work, index, false, at.right_sums);
  const amx::Tiles tiles;

  for (const Chunk& chunk : work.chunks) {
    const auto* left_data = static_cast<const Bfloat16*>(left.data) + chunk.left_at;
    const auto* right_data = static_cast<const Bfloat16*>(right.data) + chunk.right_at;
    const int steps = times(chunk.tokens, kTile);
    pack_panels<true>(left_data + block.top * left.stride_n, left, chunk.tokens,
                      block.bottom - block.top, at.left);
    add_side(left_data + block.top * left.stride_n, left, chunk, left_sums, at.panel);
    add_side(right_data + block.left * right.stride_n, right, chunk, right_sums, at.panel);
    Squares found;
    for (int64_t i = block.left; i < block.right; i += kTile) {
      const int columns = count(block.right, i, kTile);
      const Bfloat16* const from = right_data + i * right.stride_n;
      const int64_t in_group = (i - block.left) % kGroup;
      if (!in_group) {
        pack_panels<false>(from, right, chunk.tokens, std::min<int64_t>(kGroup, block.right - i),
                           at.right);
      }
      for (int64_t o = block.top; o < block.bottom; o += kTile) {
        const int rows = count(block.bottom, o, kTile);
        const int64_t down = o - block.top, across = i - block.left;
        const int64_t beside = across * work.grid.tallest * kTile + down * kTile;
        const int64_t first = o * call.row_step + i * call.column_step;
        multiply(at.left + down * steps * kTile, at.right + in_group * steps * kTile, steps,
                 at.tile);
        float* const part = at.parts + beside;
        for (int k = 0; chunk.resume && k < kSquare; k += kLanes) {
          store(at.tile + k, load(at.tile + k) + load(part + k));
        }
        if (!chunk.last) {
          std::memcpy(part, at.tile, kSquare * sizeof(float));
          continue;
        }
        if (rows < kTile || columns < kTile) {  // an infinity times the zeros beyond made NaNs
          each(rows, columns, false, [&](int, int, int k) { at.tile[k] = 0.f; });
        }
        add_tile(at.tile, at.dw + beside, chunk, found);
        if (chunk.final) write(call, first, rows, columns, at.tile);
      }
    }
    found.note(work, index, chunk);
  }
  left_sums.end(call.B);
  right_sums.end(call.B);
}
