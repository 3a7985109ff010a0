# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX of Hopper and Blackwell kernels: whether a matrix product may read shared memory
that copies (``cp.async``) have not yet written, as it sees it. ``python -m benchmarks.fences 100
linear_wgrad`` prints a JSON row for each kernel whose name has that pattern.

Products reach shared memory by another path than copies and threads do (the async proxy). A wait
for copies does not order the two paths: that takes a ``fence.proxy.async`` after it. Triton before
3.7.1 has none, and a B200 was seen to multiply stale numbers (pytorch issue 181248). Triton 3.7.1
puts it before the wait in some kernels of attention, whose tiles have one stage for that reason.
"""

import json
import re
import sys


def main(gpu: str, pattern: str) -> None:
    from benchmarks import compile_kernels, compile_reading, no_gpu

    read = compile_reading.unfenced
    compile_kernels.read_cubin = lambda compiled, _: {"unfenced": read(compiled.asm["ptx"])}
    device = no_gpu.pretend(gpu)
    for case in compile_kernels.cases(device):
        if case.tensor_cores and re.search(pattern, f"{case.name}, {case.dtype}"):
            print(json.dumps(compile_kernels.compile_case(case, device)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
