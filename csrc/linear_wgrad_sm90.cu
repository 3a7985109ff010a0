// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for every dtype that it takes.
#include "launch_sm90.cuh"

namespace gnsfast {

void launch_standard(const LinearWgrad& call, const Plan& plan) {
  with_types(call, [&](auto element, auto output) {
    launch_sm90<decltype(element), decltype(output), Standard>(call, plan);
  });
}

const Registered sm90{{"sm90", plan_sm90<Standard>, launch_standard}};

}  // namespace gnsfast
