// SPDX-License-Identifier: Apache-2.0
// The loops of gram.cpp and of bfloat16_gram.cpp, for one instruction set.

typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));

// How numbers of float32 are loaded and multiplied, and those of bfloat16.
struct Floats {
  using Element = float;
  static constexpr int kStep = kLanes;
  static Vector get(const float* from) { return load(from); }
  static void add_product(Vector& sum, Vector a, Vector b) { sum += a * b; }
};
struct Widened {
  using Element = Bfloat16;
  static constexpr int kStep = kLanes;
  static Vector get(const Bfloat16* from) {
    const auto words = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words);
    return reinterpret_cast<Vector>(words << 16);
  }
  static void add_product(Vector& sum, Vector a, Vector b) { sum += a * b; }
};

// Rows that are taken at once, both ways: their sums, and one vector of each, fit into the registers.
constexpr int kSide = kLanes == 16 ? 4 : 2;

// The products of kSide rows with kSide rows of ``K`` numbers.
template <class Numbers>
void multiply(const typename Numbers::Element* const (&a)[kSide],
              const typename Numbers::Element* const (&b)[kSide], int64_t K,
              double (&products)[kSide][kSide]) {
  constexpr int kStep = Numbers::kStep;
  for (auto& row : products) std::fill(row, row + kSide, 0.0);
  for (int64_t k = 0; k < K;) {
    Vector sums[kSide][kSide] = {};
    const auto add = [&](const auto* const (&x)[kSide], const auto* const (&y)[kSide], int64_t at) {
      Vector left[kSide], right[kSide];
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) {
        left[i] = Numbers::get(x[i] + at);
        right[i] = Numbers::get(y[i] + at);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kSide; ++j) Numbers::add_product(sums[i][j], left[i], right[j]);
      }
    };
    // In float32 for so many, as a longer sum would lose digits.
    const int64_t stop = std::min(K, k + 4096);
    for (; k + kStep <= stop; k += kStep) add(a, b, k);
    if (k < stop) {  // the last few, with zeros beyond
      typename Numbers::Element copy[2 * kSide][kStep] = {};
      const typename Numbers::Element *x[kSide], *y[kSide];
      for (int i = 0; i < kSide; ++i) {
        std::copy(a[i] + k, a[i] + stop, copy[i]);
        std::copy(b[i] + k, b[i] + stop, copy[kSide + i]);
        x[i] = copy[i];
        y[i] = copy[kSide + i];
      }
      add(x, y, 0);
      k = stop;
    }
    for (int i = 0; i < kSide; ++i) {
      for (int j = 0; j < kSide; ++j) products[i][j] += sum_of(sums[i][j]);
    }
  }
}

// One sample.
template <class Numbers>
void run_rows(const Gram& call, int64_t b) {
  const int64_t T = call.T;
  double sum = 0, absolute = 0;
  const auto multiply_rows = [&](const Side& side, int64_t s, int64_t t,
                                 double (&products)[kSide][kSide]) {
    using Element = typename Numbers::Element;
    const Element *x[kSide], *y[kSide];
    for (int i = 0; i < kSide; ++i) {  // beyond the last token that one again
      const auto row = [&](int64_t at) {
        return static_cast<const Element*>(side.data) + b * side.stride_b +
               std::min(at, T - 1) * side.stride_t;
      };
      x[i] = row(s + i);
      y[i] = row(t + i);
    }
    multiply<Numbers>(x, y, side.N, products);
  };
  for (int64_t s = 0; s < T; s += kSide) {
    for (int64_t t = 0; t <= s; t += kSide) {
      double of_left[kSide][kSide], of_right[kSide][kSide];
      multiply_rows(call.left, s, t, of_left);
      multiply_rows(call.right, s, t, of_right);
      for (int i = 0; i < kSide && s + i < T; ++i) {
        for (int j = 0; j < kSide && t + j < T; ++j) {
          const double term = (t < s ? 2 : 1) * of_left[i][j] * of_right[i][j];
          sum += term;
          absolute += std::abs(term);
        }
      }
    }
  }
  call.sqnorms[b] = sum;
  call.terms[b] = absolute;
}

inline void run(const Gram& call, int64_t b) {
  call.bfloat16 ? run_rows<Widened>(call, b) : run_rows<Floats>(call, b);
}
