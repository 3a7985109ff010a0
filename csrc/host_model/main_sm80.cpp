// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of linear_wgrad_sm80.cuh on the host model: main_sm80 SEED prints a line a case and
// exits with 1 at the first that is wrong.
#define GNSFAST_HOST_MODEL
#include "../linear_wgrad_sm80.cuh"
#include "check.h"

template <class Element, class Output>
Results<Output> results_of(const Samples<Element>& samples, int at_once, bool bias, bool add,
                           unsigned seed) {
  using namespace gnsfast;
  const Shape s = samples.s;
  Results<Output> r(kTile, s, at_once, bias, add);
  const Operand dy{samples.dy.data(), static_cast<int64_t>(s.T) * s.O, s.O, s.O};
  const Operand x{samples.x.data(), static_cast<int64_t>(s.T) * s.I, s.I, s.I};
  const int blocks = std::min(units_of(r.plan), at_once);
  host_model::launch(blocks, 1, kThreads, kSharedBytes, seed,
                     [&] { linear_wgrad_kernel<Element, Output>(dy, x, r.dw.data(), r.p); });
  r.finish(samples, seed);
  return r;
}

template <class Element, class Output>
bool run(const char* name, Shape s, int at_once, bool bias, bool add, unsigned seed) {
  const Samples<Element> samples(s, seed);
  const auto r = results_of<Element, Output>(samples, at_once, bias, add, seed);
  check_bits(r, [&] { return results_of<Element, float>(samples, at_once, bias, add, seed); });
  return check(name, samples, r, 0);
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  bool ok = true;
  ok = ok && run<bf16, float>("one block of tokens", {3, 32, 128, 128}, 1, false, false, seed);
  ok = ok && run<bf16, float>("one token", {6, 1, 136, 8}, 2, true, false, seed);
  ok = ok && run<bf16, float>("less than a step", {2, 7, 8, 8}, 1, false, false, seed);
  ok = ok && run<bf16, float>("ragged", {2, 70, 200, 264}, 2, true, false, seed);
  ok = ok && run<bf16, float>("ring goes round", {3, 130, 128, 136}, 1, false, false, seed);
  ok = ok && run<bf16, float>("fewer steps than stages", {1, 64, 136, 136}, 1, false, false, seed);
  ok = ok && run<bf16, float>("all tiles cut", {5, 64, 136, 200}, 7, false, false, seed);
  ok = ok && run<bf16, float>("helper of three tiles", {4, 40, 264, 72}, 5, true, true, seed);
  ok = ok && run<bf16, float>("the last tile cut", {3, 40, 200, 136}, 3, true, true, seed);
  ok = ok && run<bf16, float>("whole tiles, then cut", {5, 33, 264, 264}, 7, true, false, seed);
  ok = ok && run<bf16, float>("added", {2, 40, 72, 136}, 1, false, true, seed);
  ok = ok && run<bf16, bf16>("bfloat16 out", {2, 64, 128, 128}, 1, true, false, seed);
  ok = ok && run<__half, __half>("float16", {2, 70, 72, 128}, 2, true, false, seed);
  ok = ok && run<bf16, Nothing>("norms alone", {2, 70, 200, 264}, 2, true, false, seed);
  ok = ok && run<__half, Nothing>("norms alone, cut", {5, 33, 264, 264}, 7, true, false, seed);
  return ok ? 0 : 1;
}
