// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of finish.cuh on the host model, after random numbers in place of the product:
// main_finish SEED prints a line a case and exits with 1 at the first that is wrong.
#define GNSFAST_HOST_MODEL
#include "../finish.cuh"
#include "check.h"

template <class Number>
bool same_bits(const std::vector<Number>& a, const std::vector<Number>& b) {
  return memcmp(a.data(), b.data(), a.size() * sizeof(Number)) == 0;
}

// Parts of cut tiles and norms, as the kernel before would leave them.
template <class Element, class Output>
bool run(const char* name, gnsfast::Tile tile, Shape s, int at_once, bool bias, bool add,
         unsigned seed) {
  using namespace gnsfast;
  const Samples<Element> samples(s, seed);
  Results<Output> r(tile, s, at_once, bias, add);
  const Problem& p = r.p;
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.5f, 1.f);
  std::fill_n(p.work.tickets, p.tasks.tickets, 0);
  std::vector<double> norms(s.B + 1, 0.0), total(r.dw.size(), 0.0);
  for (int64_t row = 0; row < r.plan.norm_rows(); ++row) {
    for (int column = 0; column <= s.B; ++column) {
      float& v = p.work.norms[row * (s.B + 1) + column];
      norms[column] += v = uniform(random);
    }
  }
  for (int64_t k = 0; k < r.plan.scratch_elements(); ++k) p.work.scratch[k] = uniform(random);
  std::vector<bool> cut(r.dw.size(), false);
  for (int unit = r.plan.whole_tiles; r.plan.helpers && unit < units_of(r.plan); ++unit) {
    for (Walk walk{unit}; walk.next(p, units_of(r.plan));) {
      const Piece& piece = walk.piece;
      for (int rank = 0; rank < tile.cluster; ++rank) {
        const float* part = part_at(p, tile, piece.slot, rank);
        const Corner corner = corner_of(r.plan, tile, piece.tile, rank);
        for (int k = 0; k < tile.o * tile.i; ++k) {
          const int row = corner.o + k / tile.i, column = corner.i + k % tile.i;
          if (row >= s.O || column >= s.I) {
            p.work.scratch[part + k - p.work.scratch] = 0.f;  // as products of zeros are
            continue;
          }
          total[static_cast<size_t>(row) * s.I + column] += part[k];
          cut[static_cast<size_t>(row) * s.I + column] = true;
        }
      }
    }
  }
  for (double v : total) norms[s.B] += v * v;
  const auto dw = r.dw, db = r.db;
  r.finish(samples, seed);
  const Results<Output> once = r;
  r.dw = dw;
  r.db = db;
  std::fill_n(p.work.tickets, p.tasks.tickets, 0);
  r.finish(samples, seed + 1000);  // blocks come in another order
  if (!same_bits(once.dw, r.dw) || !same_bits(once.db, r.db) || !same_bits(once.rows, r.rows)) {
    host_model::fail("two runs give different bits");
  }

  const float added = add ? 1.f : 0.f;
  for (size_t k = 0; k < cut.size(); ++k) {
    const bool untouched = add ? to_float(r.dw[k]) == 1.f : std::isnan(to_float(r.dw[k]));
    if (!cut[k] && !untouched) host_model::fail("a whole tile was written again");
    if (!cut[k]) from_float(added, &r.dw[k]);
  }
  double worst = row_error(r.rows.data(), norms);
  double gradient = r.plan.helpers ? gradient_error(r.dw, total, added) : 0;
  if (bias) {
    norms = norms_and_sum(s.B, s.O, total, [&](int b, size_t o) {
      double g = 0;
      for (int t = 0; t < s.T; ++t) {
        g += to_float(samples.dy[(static_cast<size_t>(b) * s.T + t) * s.O + o]);
      }
      return g;
    });
    worst = larger(worst, row_error(r.rows.data() + r.stride(s), norms));
    gradient = larger(gradient, gradient_error(r.db, total, added));
  }
  for (size_t row = 0; row < r.rows.size(); row += r.stride(s)) {
    if (!std::isnan(r.rows[row + s.B + 2])) host_model::fail("a number beyond a row was written");
  }
  return report(name, s, gradient, worst, kRounding<Output>, 0);
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  const gnsfast::Tile pair{128, 192, 2}, one{128, 128, 1};
  bool ok = true;
  ok = ok && run<bf16, float>("nothing cut, no bias", one, {3, 40, 136, 264}, 2, false, false, seed);
  ok = ok && run<bf16, float>("many rows of norms", pair, {4, 9, 1992, 520}, 1, false, false, seed);
  ok = ok && run<bf16, float>("many samples", one, {70, 3, 136, 72}, 1, true, false, seed);
  ok = ok && run<bf16, float>("many columns", one, {2, 2, 8, 8456}, 1, true, false, seed);
  ok = ok && run<bf16, float>("two warps a sample", one, {9, 40, 8, 520}, 1, true, false, seed);
  ok = ok && run<bf16, float>("columns and chunks", one, {3, 601, 8, 520}, 1, true, false, seed);
  ok = ok && run<bf16, float>("one sample", pair, {1, 300, 72, 264}, 4, true, true, seed);
  ok = ok && run<bf16, float>("helpers of one tile", pair, {4, 2, 200, 512}, 16, false, false, seed);
  ok = ok && run<bf16, float>("helper of three tiles", pair, {5, 2, 400, 136}, 4, true, true, seed);
  ok = ok && run<bf16, bf16>("whole and cut", one, {3, 260, 200, 392}, 5, true, false, seed);
  ok = ok && run<__half, __half>("float16", pair, {7, 70, 600, 40}, 3, true, false, seed);
  ok = ok && run<bf16, float>("many parts", pair, {2, 2, 2112, 512}, 44, false, false, seed);
  ok = ok && run<bf16, float>("rounds of samples", one, {257, 65, 8, 264}, 1, true, true, seed);
  ok = ok && run<bf16, float>("longer chunks", one, {50, 520, 8, 264}, 1, true, false, seed);
  ok = ok && run<bf16, Nothing>("norms alone", one, {3, 260, 200, 392}, 5, true, false, seed);
  return ok ? 0 : 1;
}
