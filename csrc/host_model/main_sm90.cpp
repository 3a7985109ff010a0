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
bool run(const char* name, Shape s, int whole_tiles, int parts, int clusters, bool add,
         unsigned seed) {
  using namespace gnsfast;
  constexpr int kTileI = V::kTileI, kCluster = V::kCluster;
  const Samples<Element> samples(s, seed);
  Problem p{s.B, s.T, s.I, s.O};
  p.tiles_i = (s.I + kTileI - 1) / kTileI;
  p.tiles = (s.O + kTileO * kCluster - 1) / (kTileO * kCluster) * p.tiles_i;
  p.whole_tiles = whole_tiles < 0 ? p.tiles : whole_tiles;
  p.parts = parts;
  p.add = add;
  const size_t split = p.tiles - p.whole_tiles;
  std::vector<float> partial(p.tiles * kCluster * kConsumerWarps * (s.B + 1ull), NAN);
  std::vector<float> scratch(split * parts * kCluster * V::kAccumulators * kConsumers, NAN);
  p.partial = partial.data();
  p.scratch = scratch.data();
  std::vector<Output> dw(static_cast<size_t>(s.O) * s.I);
  for (auto& v : dw) from_float(add ? 1.f : NAN, &v);

  const CUtensorMap map_dy = map_of(samples.dy, s.O, s, kBlockT);
  const CUtensorMap map_x = map_of(samples.x, s.I, s, kBlockT / kCluster);
  const auto races =
      host_model::launch(clusters * kCluster, kCluster, kThreads, V::kSharedBytes, seed, [&] {
        linear_wgrad_kernel<Element, Output, V>(map_dy, map_x, dw.data(), p);
      }, V::kOrdered);
  if (split) {
    host_model::launch(split * kCluster, 1, kConsumers, 1024, seed,
                       [&] { merge_kernel<Output, V>(dw.data(), p); });
  }
  return check(name, samples, dw, partial, add ? 1.f : 0.f, races);
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  using bf16 = __nv_bfloat16;
  using gnsfast::Variant;
  bool ok = true;
  ok = ok && run<bf16, float>("one block", {3, 64, 192, 256}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("one token", {3, 1, 200, 264}, -1, 1, 2, false, seed);
  ok = ok && run<bf16, float>("less than a step", {2, 7, 8, 8}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("ragged", {2, 100, 200, 264}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("ring goes round", {7, 128, 192, 128}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float, Variant<192, 1, true, true>>("no cluster", {2, 80, 200, 136}, -1, 1, 2, false, seed);
  ok = ok && run<bf16, float, Variant<192, 1, false, true>>("no cluster, no order", {2, 80, 200, 136}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float, Variant<192, 2, false, true>>("no order", {3, 197, 200, 264}, -1, 1, 1, false, seed);
  ok = ok && run<bf16, float>("all tiles split", {5, 64, 200, 264}, 0, 2, 2, false, seed);
  ok = ok && run<bf16, float>("the last tile split", {3, 80, 400, 256}, 2, 3, 2, true, seed);
  ok = ok && run<bf16, float>("added", {3, 80, 200, 136}, -1, 1, 1, true, seed);
  ok = ok && run<bf16, bf16>("bfloat16 out", {2, 64, 192, 256}, -1, 1, 1, false, seed);
  ok = ok && run<__half, __half>("float16", {2, 100, 200, 256}, 0, 2, 1, false, seed);
  ok = ok && run<bf16, bf16, Variant<256, 2, true, false>>("128 x 256, one sample",
                                                           {1, 400, 264, 264}, -1, 1, 1, false, seed);
  return ok ? 0 : 1;
}
