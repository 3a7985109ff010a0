# SPDX-License-Identifier: Apache-2.0
"""``python csrc/generate_wgmma.py`` writes ``wgmma_sm90.cuh``: a wrapper for each shape and dtype,
because the instruction names every accumulator register.
"""

from pathlib import Path

SHAPES = (("__nv_bfloat16", "bf16", 192), ("__half", "f16", 192), ("__nv_bfloat16", "bf16", 256))
PER_LINE = 12

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
// Written by generate_wgmma.py.
//
// D[64, N] = A[64, 16] B[16, N] + D, both operands in shared memory and both "transposed": as dyᵀ x
// has it, tokens are the rows of memory and the dimension that is summed over.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gnsfast {

template <class Element, int kN>
struct Wgmma;
"""


def wrapper(element: str, ptx: str, width: int) -> str:
    """``accumulate`` 0 starts a new sum: D need not be cleared."""
    registers = width // 2
    names = [f"%{i}" for i in range(registers)]
    lines = [", ".join(names[i : i + PER_LINE]) for i in range(0, registers, PER_LINE)]
    body = "".join(
        f'        "{line}{", " if i + 1 < len(lines) else ""}"\n' for i, line in enumerate(lines)
    )
    outputs = [f'"+f"(d[{i}])' for i in range(registers)]
    bound = ",\n          ".join(", ".join(outputs[i : i + 6]) for i in range(0, registers, 6))
    a, b, accumulate = registers, registers + 1, registers + 2
    return f"""
template <>
struct Wgmma<{element}, {width}> {{
  static __device__ __forceinline__ void issue(float (&d)[{registers}], uint64_t a, uint64_t b,
                                               int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{accumulate}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{ptx}.{ptx} {{"
{body}        "}}, %{a}, %{b}, p, 1, 1, 1, 1;\\n}}\\n"
        : {bound}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
}};
"""


def text() -> str:
    return HEADER + "".join(wrapper(*shape) for shape in SHAPES) + "\n}  // namespace gnsfast\n"


if __name__ == "__main__":
    Path(__file__).with_name("wgmma_sm90.cuh").write_text(text(), encoding="utf-8")
