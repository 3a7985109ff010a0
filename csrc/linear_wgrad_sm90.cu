// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for every type that it takes.
#include "launch_sm90.cuh"

namespace gnsfast {

namespace {

void launch(const LinearWgrad& call, const Plan& plan, int processors) {
  with_types(call, [&](auto element, auto output) {
    launch_sm90<decltype(element), decltype(output), Standard>(call, plan, processors);
  });
}

}  // namespace

const Kernel kSm90{"sm90", plan_sm90<Standard>, launch};

}  // namespace gnsfast
