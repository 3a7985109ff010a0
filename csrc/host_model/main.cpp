// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of linear_wgrad_sm90.cuh on the host model, against sums in double precision:
// host_model SEED prints a line a case and exits with 1 where one is wrong.
#define GNSFAST_HOST_MODEL
#include "../linear_wgrad_sm90.cuh"

struct Shape {
  int B, T, I, O;
};

template <class Element>
std::vector<Element> draw(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<Element> values(count);
  for (auto& v : values) from_float(normal(random), &v);
  return values;
}

template <class Element>
CUtensorMap map_of(const std::vector<Element>& values, int features, int tokens, int samples,
                   int box_tokens) {
  return {reinterpret_cast<const uint8_t*>(values.data()),
          {features, tokens, samples},
          {2, 2ll * features, 2ll * features * tokens},
          gnsfast::kColumns,
          box_tokens};
}

// The largest error of dW, in units of its largest element, and of a squared norm, relative.
struct Errors {
  double dw = 0, sqnorm = 0;
};

double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }  // NaN stays

template <class Element, class Output, int kCluster, bool kOrdered>
bool run(const char* name, Shape s, int whole_tiles, int parts, int clusters, bool add,
         unsigned seed) {
  using namespace gnsfast;
  std::mt19937 random(seed);
  const auto dy = draw<Element>(static_cast<size_t>(s.B) * s.T * s.O, random);
  const auto x = draw<Element>(static_cast<size_t>(s.B) * s.T * s.I, random);
  const int tiles_o = (s.O + kTileO * kCluster - 1) / (kTileO * kCluster);
  const int tiles_i = (s.I + kTileI - 1) / kTileI;
  Problem p{s.B, s.T, s.I, s.O};
  p.tiles_i = tiles_i;
  p.tiles = tiles_o * tiles_i;
  p.whole_tiles = whole_tiles < 0 ? p.tiles : whole_tiles;
  p.parts = parts;
  p.add = add;
  const int rows = p.tiles * kCluster * kConsumerWarps, split = p.tiles - p.whole_tiles;
  std::vector<float> partial(static_cast<size_t>(rows) * (s.B + 1), NAN);
  std::vector<float> scratch(
      static_cast<size_t>(split) * parts * kCluster * kAccumulators * kConsumers, NAN);
  p.partial = partial.data();
  p.scratch = scratch.data();
  std::vector<Output> dw(static_cast<size_t>(s.O) * s.I);
  for (auto& v : dw) from_float(add ? 1.f : NAN, &v);

  const CUtensorMap map_dy = map_of(dy, s.O, s.T, s.B, kBlockT);
  const CUtensorMap map_x = map_of(x, s.I, s.T, s.B, kBlockT / kCluster);
  const uint64_t races =
      host_model::launch(clusters * kCluster, kCluster, kThreads, kSharedBytes, seed, [&] {
        linear_wgrad_kernel<Element, Output, kCluster, kOrdered>(map_dy, map_x, dw.data(), p);
      });
  if (split) {
    host_model::launch(split * kCluster, 1, kConsumers, 1024, seed,
                       [&] { merge_kernel<Output, kCluster>(dw.data(), p); });
  }

  Errors worst;
  std::vector<double> total(static_cast<size_t>(s.O) * s.I, 0.0);
  auto compare = [&](int column, double want) {
    double got = 0;
    for (int r = 0; r < rows; ++r) got += partial[static_cast<size_t>(r) * (s.B + 1) + column];
    const double error = std::abs(got - want) / want;
    worst.sqnorm = larger(worst.sqnorm, error);
  };
  double largest = 0, sum = 0;
  for (int b = 0; b < s.B; ++b) {
    double sqnorm = 0;
    for (int o = 0; o < s.O; ++o) {
      for (int i = 0; i < s.I; ++i) {
        double g = 0;
        for (int t = 0; t < s.T; ++t) {
          const size_t token = static_cast<size_t>(b) * s.T + t;
          g += static_cast<double>(to_float(dy[token * s.O + o])) * to_float(x[token * s.I + i]);
        }
        sqnorm += g * g;
        total[static_cast<size_t>(o) * s.I + i] += g;
      }
    }
    compare(b, sqnorm);
  }
  for (double v : total) {
    largest = std::max(largest, std::abs(v));
    sum += v * v;
  }
  compare(s.B, sum);
  for (size_t k = 0; k < total.size(); ++k) {
    const double error = std::abs(to_float(dw[k]) - (add ? 1.0 : 0.0) - total[k]) / largest;
    worst.dw = larger(worst.dw, error);
  }
  const double rounding = sizeof(Output) == 2 ? 4e-3 : 1e-6;
  const bool ok = worst.dw <= rounding && worst.sqnorm <= 1e-5 && races == 0;
  printf("%-34s B %d T %3d I %3d O %3d cluster %d  dW %.1e  norms %.1e  races %llu  %s\n", name, s.B,
         s.T, s.I, s.O, kCluster, worst.dw, worst.sqnorm, static_cast<unsigned long long>(races),
         ok ? "ok" : "WRONG");
  return ok;
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  bool ok = true;
  ok &= run<bf16, float, 2, true>("one block", {3, 64, 192, 256}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 2, true>("one token", {3, 1, 200, 264}, -1, 1, 2, false, seed);
  ok &= run<bf16, float, 2, true>("less than a step", {2, 7, 8, 8}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 2, true>("ragged", {2, 100, 200, 264}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 2, true>("ring goes round", {7, 128, 192, 128}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 1, true>("no cluster", {2, 80, 200, 136}, -1, 1, 2, false, seed);
  ok &= run<bf16, float, 1, false>("no cluster, no order", {2, 80, 200, 136}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 2, false>("no order", {3, 197, 200, 264}, -1, 1, 1, false, seed);
  ok &= run<bf16, float, 2, true>("all tiles split", {5, 64, 200, 264}, 0, 2, 2, false, seed);
  ok &= run<bf16, float, 2, true>("the last tile split", {3, 80, 400, 256}, 2, 3, 2, true, seed);
  ok &= run<bf16, float, 2, true>("added", {3, 80, 200, 136}, -1, 1, 1, true, seed);
  ok &= run<bf16, bf16, 2, true>("bfloat16 out", {2, 64, 192, 256}, -1, 1, 1, false, seed);
  ok &= run<__half, __half, 2, true>("float16", {2, 100, 200, 256}, 0, 2, 1, false, seed);
  return ok ? 0 : 1;
}
