// SPDX-License-Identifier: Apache-2.0
// Launches finish_kernel.
#include "finish.cuh"

#include "launch.h"

namespace gnsfast {

void launch_finish(const LinearWgrad& call, const Problem& p) {
  const Finish f{p, call.dy.data, call.dy.stride_b, call.dy.stride_t, call.rows, call.row_stride};
  with_types(call, [&](auto element, auto output) {
    using Output = decltype(output);
    finish_kernel<decltype(element), Output>
        <<<static_cast<int>(p.tasks.blocks()), kFinishThreads, kFinishShared + 16,
           static_cast<cudaStream_t>(call.stream)>>>(static_cast<Output*>(call.dw),
                                                     static_cast<Output*>(call.db), f);
  });
  check(cudaGetLastError(), "linear_wgrad, finish");
}

}  // namespace gnsfast
