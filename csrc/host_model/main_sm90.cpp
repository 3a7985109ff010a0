// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of linear_wgrad_sm90.cuh on the host model: main_sm90 SEED prints a line a case and
// exits with 1 at the first that is wrong.
#define GNSFAST_HOST_MODEL
#include "../linear_wgrad_sm90.cuh"
#include "check.h"

template <class Element>
CUtensorMap map_of(const std::vector<Element>& values, int features, Shape s, int box_tokens) {
  return {reinterpret_cast<const uint8_t*>(values.data()),
          {features, s.T, s.B},
          {2, 2ll * features, 2ll * features * s.T},
          gnsfast::kColumns,
          box_tokens};
}

template <class Element, class Output, class V = gnsfast::Standard>
Results<Output> results_of(const Samples<Element>& samples, int at_once, bool bias, bool add,
                           unsigned seed, unsigned long long& races) {
  using namespace gnsfast;
  const Shape s = samples.s;
  Results<Output> r(V::kTile, s, at_once, bias, add);
  const CUtensorMap map_dy = map_of(samples.dy, s.O, s, kBlockT);
  const CUtensorMap map_x = map_of(samples.x, s.I, s, kBlockT / V::kCluster);
  const int blocks = std::min(units_of(r.plan), at_once) * V::kCluster;
  races =
      host_model::launch(blocks, V::kCluster, kThreads, V::kSharedBytes, seed, [&] {
        linear_wgrad_kernel<Element, Output, V>(map_dy, map_x, r.dw.data(), r.p);
      }, V::kOrdered);
  r.finish(samples, seed);
  return r;
}

template <class Element, class Output, class V = gnsfast::Standard>
bool run(const char* name, Shape s, int at_once, bool bias, bool add, unsigned seed) {
  const Samples<Element> samples(s, seed);
  unsigned long long races = 0, beside = 0;
  const auto r = results_of<Element, Output, V>(samples, at_once, bias, add, seed, races);
  check_bits(r, [&] {
    return results_of<Element, float, V>(samples, at_once, bias, add, seed, beside);
  });
  return check(name, samples, r, races);
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  using gnsfast::Variant;
  bool ok = true;
  ok = ok && run<bf16, float>("one block", {3, 64, 192, 256}, 1, false, false, seed);
  ok = ok && run<bf16, float>("one token", {3, 1, 200, 264}, 2, true, false, seed);
  ok = ok && run<bf16, float>("less than a step", {2, 7, 8, 8}, 1, false, false, seed);
  ok = ok && run<bf16, float>("ragged", {2, 100, 200, 264}, 1, true, false, seed);
  ok = ok && run<bf16, float>("ring goes round", {7, 128, 192, 128}, 1, false, false, seed);
  ok = ok && run<bf16, float, Variant<192, 1, true, true>>("no cluster", {2, 80, 200, 136}, 2, false, false, seed);
  ok = ok && run<bf16, float, Variant<192, 1, false, true>>("no cluster, no order", {2, 80, 200, 136}, 1, false, false, seed);
  ok = ok && run<bf16, float, Variant<192, 2, false, true>>("no order", {3, 197, 200, 264}, 1, false, false, seed);
  ok = ok && run<bf16, float>("all tiles cut", {5, 64, 200, 264}, 6, false, false, seed);
  ok = ok && run<bf16, float>("helper of three tiles", {4, 80, 400, 72}, 5, true, true, seed);
  ok = ok && run<bf16, float>("the last tile cut", {3, 80, 400, 136}, 2, true, true, seed);
  ok = ok && run<bf16, float>("added", {3, 80, 200, 136}, 1, false, true, seed);
  ok = ok && run<bf16, bf16>("bfloat16 out", {2, 64, 192, 256}, 1, true, false, seed);
  ok = ok && run<__half, __half>("float16", {2, 100, 200, 256}, 4, true, false, seed);
  ok = ok && run<bf16, Nothing>("norms alone", {2, 100, 200, 264}, 1, true, false, seed);
  ok = ok && run<__half, Nothing>("norms alone, cut", {4, 80, 400, 72}, 5, true, false, seed);
  ok = ok && run<bf16, bf16, Variant<256, 2, true, false>>("128 x 256, one sample",
                                                           {1, 400, 264, 264}, 1, false, false, seed);
  return ok ? 0 : 1;
}
