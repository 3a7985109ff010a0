// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel with one choice changed at a time, bfloat16 in and out. ``python -m benchmarks gpu
// --only cuda`` times them beside it; GNSFAST_CUDA_VARIANTS=1 builds them.
#include "launch_sm90.cuh"

namespace gnsfast {
namespace {

template <class V>
void launch(const LinearWgrad& call, const Plan& plan) {
  if (call.element != Dtype::kBfloat16 || call.output != Dtype::kBfloat16) {
    throw std::invalid_argument("the benchmarks' variants take bfloat16 and give bfloat16");
  }
  if (!V::kTotal && call.B != 1) {
    throw std::invalid_argument("the 128 x 256 tile has room for one sample, not for B = " +
                                std::to_string(call.B));
  }
  launch_sm90<__nv_bfloat16, __nv_bfloat16, V>(call, plan);
}

Plan plan_unsplit(int B, int T, int I, int O, int processors) {
  Plan plan = plan_sm90<Standard>(B, T, I, O, processors);
  plan.whole_tiles = plan.tiles;
  plan.helpers = 0;
  return plan;
}

using Unordered = Variant<192, 2, false, true>;
using Alone = Variant<192, 1, true, true>;
using Wide = Variant<256, 2, true, false>;

const Registered variants[] = {
    Registered{{"sm90 unordered", plan_sm90<Unordered>, launch<Unordered>}},
    Registered{{"sm90 cluster of 1", plan_sm90<Alone>, launch<Alone>}},
    Registered{{"sm90 unsplit", plan_unsplit, launch_standard}},
    Registered{{"sm90 128 x 256, one sample", plan_sm90<Wide>, launch<Wide>}},
};

}  // namespace
}  // namespace gnsfast
