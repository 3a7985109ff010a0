// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of linear_wgrad_sm80.cuh on the host model: main_sm80 SEED prints a line a case and
// exits with 1 at the first that is wrong.
#define GNSFAST_HOST_MODEL
#include "../linear_wgrad_sm80.cuh"
#include "check.h"

template <class Element, class Output>
bool run(const char* name, Shape s, int whole_tiles, int parts, int blocks, bool add,
         unsigned seed) {
  using namespace gnsfast;
  const Samples<Element> samples(s, seed);
  Problem p{s.B, s.T, s.I, s.O};
  p.tiles_i = (s.I + kTileI - 1) / kTileI;
  p.tiles = (s.O + kTileO - 1) / kTileO * p.tiles_i;
  p.whole_tiles = whole_tiles < 0 ? p.tiles : whole_tiles;
  p.parts = parts;
  p.add = add;
  const size_t split = p.tiles - p.whole_tiles;
  std::vector<float> partial(p.tiles * kWarps * (s.B + 1ull), NAN);
  std::vector<float> scratch(split * parts * kAccumulators * kThreads, NAN);
  p.partial = partial.data();
  p.scratch = scratch.data();
  std::vector<Output> dw(static_cast<size_t>(s.O) * s.I);
  for (auto& v : dw) from_float(add ? 1.f : NAN, &v);

  const Operand dy{samples.dy.data(), static_cast<int64_t>(s.T) * s.O, s.O, s.O};
  const Operand x{samples.x.data(), static_cast<int64_t>(s.T) * s.I, s.I, s.I};
  host_model::launch(blocks, 1, kThreads, kSharedBytes, seed,
                     [&] { linear_wgrad_kernel<Element, Output>(dy, x, dw.data(), p); });
  if (split) {
    host_model::launch(split, 1, kThreads, 1024, seed,
                       [&] { merge_kernel<Output>(dw.data(), p); });
  }
  return check(name, samples, dw, partial, add ? 1.f : 0.f, 0);
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  bool ok = true;
  ok = ok && run<bf16, float>("one block of tokens", {3, 32, 128, 128}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("one token", {6, 1, 136, 8}, -1, 1, 2, false, seed);
  ok = ok && run<bf16, float>("less than a step", {2, 7, 8, 8}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("ragged", {2, 70, 200, 264}, -1, 1, 2, false, seed);
  ok = ok && run<bf16, float>("ring goes round", {3, 130, 128, 136}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("fewer steps than stages", {1, 64, 136, 136}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("all tiles split", {5, 64, 136, 200}, 0, 2, 3, false, seed);
  ok = ok && run<bf16, float>("the last tile split", {3, 40, 200, 136}, 3, 3, 2, true, seed);
  ok = ok && run<bf16, float>("added", {2, 40, 72, 136}, -1, 1, 1, true, seed);
  ok = ok && run<bf16, bf16>("bfloat16 out", {2, 64, 128, 128}, -1, 1, 1, false, seed);
  ok = ok && run<__half, __half>("float16", {2, 70, 72, 128}, 0, 2, 1, false, seed);
  return ok ? 0 : 1;
}
