// SPDX-License-Identifier: Apache-2.0
// Random samples, what a call of linear_wgrad writes, and a check of it against sums in double
// precision; included after a kernel.
#pragma once
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "../finish.cuh"

struct Shape {
  int B, T, I, O;
};

// Norms alone: no gradient is there to be poisoned or read.
using gnsfast::kStored;
using gnsfast::Nothing;
inline void from_float(float, Nothing*) {}
inline float to_float(Nothing) { return NAN; }

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

// What a call writes and the memory that it takes, all NaN before. ``at_once`` clusters run; tiles
// are cut as if samples were long, wherever whole samples allow.
template <class Output>
struct Results {
  gnsfast::Plan plan;
  std::vector<Output> dw, db;
  std::vector<float> rows;
  std::vector<uint8_t> memory;
  gnsfast::Problem p;

  Results(gnsfast::Tile tile, Shape s, int at_once, bool bias, bool add)
      : plan(gnsfast::plan_tiles(tile, s.B, INT32_MAX / 2, s.I, s.O, at_once * tile.cluster)),
        dw(static_cast<size_t>(s.O) * s.I),
        db(bias ? s.O : 0),
        rows((bias ? 2 : 1) * stride(s), NAN) {
    const auto tasks = gnsfast::tasks_of(plan, s.B, s.T, s.O, bias);
    memory.assign(gnsfast::workspace_of(plan, tasks, s.B, nullptr).bytes, 0xFF);
    p = gnsfast::problem_of(s.B, s.T, s.I, s.O, add, plan, bias, memory.data());
    for (auto& v : dw) from_float(add ? 1.f : NAN, &v);
    for (auto& v : db) from_float(add ? 1.f : NAN, &v);
  }

  static int stride(Shape s) { return s.B + 5; }  // rows are those of a wider matrix

  template <class Element>
  void finish(const Samples<Element>& samples, unsigned seed) {
    const Shape s = samples.s;
    const gnsfast::Finish f{p,   samples.dy.data(), static_cast<int64_t>(s.T) * s.O,
                            s.O, rows.data(),       stride(s)};
    host_model::launch(p.tasks.blocks(), 1, gnsfast::kFinishThreads, gnsfast::kFinishShared + 16,
                       seed, [&] { gnsfast::finish_kernel<Element>(dw.data(), db.data(), f); });
  }
};

// Whether norms alone have the bits of those beside dW; every other call has nothing to compare.
template <class Output, class Of>
void check_bits(const Results<Output>& r, Of results_beside) {
  if constexpr (!kStored<Output>) {
    const Results<float> beside = results_beside();
    if (memcmp(r.rows.data(), beside.rows.data(), r.rows.size() * sizeof(float)) != 0) {
      host_model::fail("norms alone have other bits than beside dW");
    }
  }
}

// The largest error of a probe row, relative; ``want`` are the B + 1 squared norms.
inline double row_error(const float* row, const std::vector<double>& want) {
  double worst = row[want.size()] == 1.f ? 0 : NAN;
  for (size_t k = 0; k < want.size(); ++k) {
    worst = larger(worst, std::abs(row[k] - want[k]) / want[k]);
  }
  return worst;
}

// The largest error of a gradient, in units of its largest element. It held ``added`` before.
template <class Output>
double gradient_error(const std::vector<Output>& got, const std::vector<double>& want,
                      float added) {
  double worst = 0, largest = 0;
  if (!kStored<Output>) return 0;
  for (double v : want) largest = std::max(largest, std::abs(v));
  for (size_t k = 0; k < want.size(); ++k) {
    worst = larger(worst, std::abs(to_float(got[k]) - added - want[k]) / largest);
  }
  return worst;
}

// Norms of each sample and of the sum; ``of`` gives each of a sample's ``size`` elements.
template <class Of>
std::vector<double> norms_and_sum(int B, size_t size, std::vector<double>& total, Of of) {
  std::vector<double> norms(B + 1, 0.0);
  total.assign(size, 0.0);
  for (int b = 0; b < B; ++b) {
    for (size_t k = 0; k < size; ++k) {
      const double g = of(b, k);
      norms[b] += g * g;
      total[k] += g;
    }
  }
  for (double v : total) norms[B] += v * v;
  return norms;
}

inline bool report(const char* name, Shape s, double gradient, double norms, double rounding,
                   unsigned long long races) {
  const bool ok = gradient <= rounding && norms <= 1e-5 && races == 0;
  printf("%-22s B %d T %3d I %3d O %3d  gradients %.1e  norms %.1e  races %llu  %s\n", name, s.B,
         s.T, s.I, s.O, gradient, norms, races, ok ? "ok" : "WRONG");
  return ok;
}

template <class Output>
constexpr double kRounding = sizeof(Output) == 2 ? 4e-3 : 1e-6;

// Prints the largest error of dW and db, and the largest of a squared norm.
template <class Element, class Output>
bool check(const char* name, const Samples<Element>& samples, const Results<Output>& r,
           unsigned long long races) {
  const Shape s = samples.s;
  const float added = r.p.add ? 1.f : 0.f;
  auto dy = [&](int b, int t, int o) {
    return static_cast<double>(to_float(samples.dy[(static_cast<size_t>(b) * s.T + t) * s.O + o]));
  };
  std::vector<double> total;
  std::vector<double> norms = norms_and_sum(s.B, r.dw.size(), total, [&](int b, size_t k) {
    double g = 0;
    for (int t = 0; t < s.T; ++t) {
      const size_t x = (static_cast<size_t>(b) * s.T + t) * s.I + k % s.I;
      g += dy(b, t, k / s.I) * to_float(samples.x[x]);
    }
    return g;
  });
  double worst = row_error(r.rows.data(), norms), gradient = gradient_error(r.dw, total, added);
  if (!r.db.empty()) {
    norms = norms_and_sum(s.B, s.O, total, [&](int b, size_t o) {
      double g = 0;
      for (int t = 0; t < s.T; ++t) g += dy(b, t, o);
      return g;
    });
    worst = larger(worst, row_error(r.rows.data() + r.stride(s), norms));
    gradient = larger(gradient, gradient_error(r.db, total, added));
  }
  return report(name, s, gradient, worst, kRounding<Output>, races);
}
