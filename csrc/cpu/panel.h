// SPDX-License-Identifier: Apache-2.0
// Panels: columns of a chunk's tokens side by side, in float32; their sums, and the squares of tiles.
// For one instruction set.

constexpr int kVectors = 2, kColumns = kLanes * kVectors;
// The sums of a tile, 2 registers of right and 1 of left: 31 of AVX-512's 32, 15 of AVX2's 16.
constexpr int kRows = kLanes == 16 ? 14 : 6;
typedef int Lanes __attribute__((vector_size(kLanes * sizeof(int))));

// As many numbers as a register has float64.
constexpr int kFew = kLanes / 2;
typedef float Few __attribute__((vector_size(kFew * sizeof(float))));
typedef float FewAnywhere __attribute__((vector_size(kFew * sizeof(float)), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(kFew * sizeof(double)), may_alias));

// The first ``count`` lanes; zeros in the others.
inline Vector first(Vector v, int count) {
  Lanes lane;
  for (int k = 0; k < kLanes; ++k) lane[k] = k;
  return lane < count - Lanes{} ? v : Vector{};
}

inline Few few_at(const float* from, int group) {
  return *reinterpret_cast<const FewAnywhere*>(from + group * kFew);
}

template <int kM = kRows, class Call>
auto with_rows(int rows, const Call& call) {
  if constexpr (kM > 1) {
    if (rows < kM) return with_rows<kM - 1>(rows, call);
  }
  return call(std::integral_constant<int, kM>{});
}

// ``columns`` columns of some tokens, token by token; zeros fill up each to kWidth.
template <int kWidth, class Element>
void pack_numbers(const Element* from, const Side& side, int tokens, int columns, float* to) {
  const bool whole = side.stride_n == 1 && columns == kWidth;
  for (int t = 0; t < tokens; ++t, from += side.stride_t, to += kWidth) {
    if (whole && std::is_same_v<Element, float> && kWidth > kFew && kWidth % kFew) {
      for (int k : {0, kWidth % kFew}) {  // some numbers twice: it takes two moves
        std::memcpy(to + k, from + k, sizeof(Few));
      }
    } else if (whole) {
      for (int k = 0; k < kWidth; ++k) to[k] = value(from[k]);
    } else {
      for (int k = 0; k < kWidth; ++k) to[k] = k < columns ? value(from[k * side.stride_n]) : 0.f;
    }
  }
}

// What a panel holds for each column: a number of each token.
struct Numbers {
  static constexpr int kTokens = 1;
  template <int kWidth, class Element>
  static void pack(const Element* from, const Side& side, int tokens, int columns, float* to) {
    pack_numbers<kWidth>(from, side, tokens, columns, to);
  }
  static void add_product(Vector& sum, float left, Vector right) { sum += broadcast(left) * right; }
};

// Panels of kWidth columns. A few tokens of all panels at a time, so that reads run along rows.
// ``kFill``: zeros fill up the last panel; else it is as narrow as its columns.
template <class Packed, int kWidth, bool kFill, class Element>
void pack_panels(const Element* from, const Side& side, int tokens, int64_t columns, float* to) {
  const int step = columns > kWidth ? 8 : tokens, rows = times(tokens, Packed::kTokens);
  for (int t = 0; t < tokens; t += step, from += step * side.stride_t) {
    const int few = std::min(step, tokens - t);
    for (int64_t k = 0; k < columns; k += kWidth) {
      const Element* at = from + k * side.stride_n;
      const int wide = count(columns, k, kWidth);
      if (kFill || wide == kWidth) {
        float* const panel = to + k * rows + t / Packed::kTokens * kWidth;
        Packed::template pack<kWidth>(at, side, few, wide, panel);
      } else {
        with_rows(wide, [&](auto narrow) {
          float* const panel = to + k * rows + t / Packed::kTokens * narrow;
          Packed::template pack<narrow>(at, side, few, narrow, panel);
        });
      }
    }
  }
}

// Adds the tokens of each sample in kColumns columns, whose first is ``column``. The next token's
// numbers come ``step`` later.
inline void add_tokens(const float* from, int64_t step, const Chunk& chunk, const Sums& sums,
                       int64_t column) {
  constexpr int kGroups = kColumns / kFew;
  const int tokens = chunk.tokens / chunk.samples;
  auto* square = reinterpret_cast<Doubles*>(sums.squares);
  Doubles total[kGroups] = {};
  const bool single = tokens == 1 && chunk.samples > 1;
  if (single) {  // the loop below takes three times as long for it
    for (int sample = 0; sample < chunk.samples; ++sample, from += step) {
      for (int g = 0; g < kGroups; ++g) {
        const Doubles v = __builtin_convertvector(few_at(from, g), Doubles);
        total[g] += v;
        square[sample * kSquares / kFew] += v * v;
      }
    }
  }
  for (int sample = 0; sample < chunk.samples && !single; ++sample) {
    Doubles sum[kGroups] = {};
    if (chunk.resume) std::memcpy(sum, sums.carried + column, kColumns * sizeof(double));
    for (int done = 0; done < tokens; done += kFewTokens) {
      Few few[kGroups] = {};
      for (int t = done; t < std::min(tokens, done + kFewTokens); ++t, from += step) {
        for (int g = 0; g < kGroups; ++g) few[g] += few_at(from, g);
      }
      for (int g = 0; g < kGroups; ++g) sum[g] += __builtin_convertvector(few[g], Doubles);
    }
    if (!chunk.last) {
      std::memcpy(sums.carried + column, sum, kColumns * sizeof(double));
      return;
    }
    for (int g = 0; g < kGroups; ++g) {
      total[g] += sum[g];
      square[sample * kSquares / kFew] += sum[g] * sum[g];
    }
  }
  for (int k = 0; k < kColumns; ++k) sums.total[column + k] += total[k / kFew][k % kFew];
}

// Adds the tokens of a block's columns in one side, where they lie or in a copy with zeros up to
// whole panels.
template <class Element>
void add_side(const Element* from, const Side& side, const Chunk& chunk, const Sums& sums,
              float* copy) {
  for (int64_t k = 0; sums.total && k < sums.columns; k += kColumns) {
    const Element* const at = from + k * side.stride_n;
    const int columns = count(sums.columns, k, kColumns);
    if (std::is_same_v<Element, float> && side.stride_n == 1 && columns == kColumns) {
      add_tokens(reinterpret_cast<const float*>(at), side.stride_t, chunk, sums, k);
    } else {
      pack_numbers<kColumns>(at, side, chunk.tokens, columns, copy);
      add_tokens(copy, kColumns, chunk, sums, k);
    }
  }
  sums.end_chunk(chunk);
}

// Of the tiles that a chunk completes. Vectors, as one number for each tile costs short samples more
// than their product.
struct Squares {
  Wide sample = {}, total = {};

  void note(Work& work, int block, const Chunk& chunk) const {
    double* const squares = work.found(block, kWeight);
    squares[chunk.sample] += sum_of(sample);
    squares[work.call.B] += sum_of(total);
  }
};
