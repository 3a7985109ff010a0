// SPDX-License-Identifier: Apache-2.0
// Random samples, and a check of a kernel's results against sums in double precision.
#pragma once
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

struct Shape {
  int B, T, I, O;
};

template <class Element>
struct Samples {
  Shape s;
  std::vector<Element> dy, x;

  Samples(Shape shape, unsigned seed)
      : s(shape),
        dy(static_cast<size_t>(s.B) * s.T * s.O),
        x(static_cast<size_t>(s.B) * s.T * s.I) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto& v : dy) from_float(normal(random), &v);
    for (auto& v : x) from_float(normal(random), &v);
  }
};

inline double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }  // NaN stays

// Prints the largest error of dW, in units of its largest element, and the largest relative error of a
// squared norm. ``added`` is what dw held before.
template <class Element, class Output>
bool check(const char* name, const Samples<Element>& samples, const std::vector<Output>& dw,
           const std::vector<float>& partial, float added, unsigned long long races) {
  const Shape s = samples.s;
  const size_t size = static_cast<size_t>(s.O) * s.I, rows = partial.size() / (s.B + 1);
  double worst_dw = 0, worst_sqnorm = 0, largest = 0, sum = 0;
  std::vector<double> total(size, 0.0);
  auto compare = [&](int column, double want) {
    double got = 0;
    for (size_t r = 0; r < rows; ++r) got += partial[r * (s.B + 1) + column];
    worst_sqnorm = larger(worst_sqnorm, std::abs(got - want) / want);
  };
  for (int b = 0; b < s.B; ++b) {
    double sqnorm = 0;
    for (size_t k = 0; k < size; ++k) {
      double g = 0;
      for (int t = 0; t < s.T; ++t) {
        const size_t token = static_cast<size_t>(b) * s.T + t;
        g += static_cast<double>(to_float(samples.dy[token * s.O + k / s.I])) *
             to_float(samples.x[token * s.I + k % s.I]);
      }
      sqnorm += g * g;
      total[k] += g;
    }
    compare(b, sqnorm);
  }
  for (double v : total) {
    largest = std::max(largest, std::abs(v));
    sum += v * v;
  }
  compare(s.B, sum);
  for (size_t k = 0; k < size; ++k) {
    worst_dw = larger(worst_dw, std::abs(to_float(dw[k]) - added - total[k]) / largest);
  }
  const double rounding = sizeof(Output) == 2 ? 4e-3 : 1e-6;
  const bool ok = worst_dw <= rounding && worst_sqnorm <= 1e-5 && races == 0;
  printf("%-22s B %d T %3d I %3d O %3d  dW %.1e  norms %.1e  races %llu  %s\n", name, s.B, s.T,
         s.I, s.O, worst_dw, worst_sqnorm, races, ok ? "ok" : "WRONG");
  return ok;
}
