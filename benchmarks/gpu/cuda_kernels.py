# SPDX-License-Identifier: Apache-2.0
"""The CUDA extension's kernels: beside plain dW and the Triton kernel, and the Hopper kernel with
one choice changed at a time beside what was counted for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.contestants import cases
from benchmarks.contestants.cases import LayerCase, plain_wgrad
from benchmarks.model.tables import predicted
from benchmarks.record import Rows
from gnsfast.ops import extension

Ways = dict[str, Callable[[], object]]

operands = partial(cases.operands, dtype=torch.bfloat16)

SIZE = 4096
"""Of the square layer whose kernel is taken apart: 352 tiles of 256 x 192, 66 at a time."""

VARIANTS = (
    "sm90 unordered",
    "sm90 cluster of 1",
    "sm90 unsplit",
    "sm90 128 x 256, one sample",
)
"""Of ``csrc/variants_sm90.cu``, which ``GNSFAST_CUDA_VARIANTS=1`` builds."""

COUNTED = {
    128: {"sm90 unordered": 1.09, "sm90 unsplit": 1.125},
    512: {"sm90 unordered": 1.02, "sm90 unsplit": 1.125},
    2048: {"sm90 unordered": 1.006, "sm90 unsplit": 1.125},
    16384: {"sm90 128 x 256, one sample": 0.89},
}
"""Time beside the kernel that ships, by tokens of a sample. A sample's end costs 150 cycles to
drain and restart where no other warpgroup multiplies meanwhile, a token 12 at 87 % of the tensor
cores' peak. Unsplit: 6 waves instead of 5 1/3. One sample: nothing ends and nothing is cut, 97 %
of four waves of 128 x 256 are filled, and 86 % of six of 128 x 192."""


def beside_triton(device: str, rounds: int, case: LayerCase) -> Rows:
    """Ratios to plain dW, bf16 in and out."""
    own = extension.kernel_for(torch.cuda.get_device_capability())
    x, dy = operands(case, device=device)
    dw = x.new_empty((case.O, case.I))
    ways: Ways = {"plain": partial(plain_wgrad, x, dy), "triton": partial(_triton, x, dy, dw)}
    for kernel in sorted({own, "sm80"}):
        ways[kernel] = partial(_summed, x, dy, dw, kernel)
    row: dict[str, Any] = {"fused weight gradient, bf16": case.name, "B": case.B}
    row |= rates(case, measure.interleave(ways, rounds, measure.cuda_seconds))
    name = torch.cuda.get_device_name()
    for kernel in ("triton", "sm90") if own == "sm90" else ("triton",):
        row[f"{kernel} predicted"] = predicted(case, name, kernel, route="fused")
    return [row]


def rates(case: LayerCase, timings: dict[str, measure.Timing]) -> dict[str, Any]:
    """Of each way to a case's weight gradient, then its ratio to the plain one."""
    flop = 2 * case.B * case.T * case.I * case.O
    found = {f"{k} TFLOP/s": round(flop / (1e9 * t.milliseconds), 1) for k, t in timings.items()}
    return found | ratios(timings)


def ratios(timings: dict[str, measure.Timing]) -> dict[str, Any]:
    first, *others = timings
    return {f"{name} / {first}": timings[name] for name in others}


def taken_apart(device: str, rounds: int, T: int, size: int = SIZE) -> Rows:
    """Times beside the Hopper kernel that ships, interleaved with it, and what was counted."""
    case = LayerCase("square", size, size, T, max(COUNTED))
    x, dy = operands(case, device=device)
    dw = x.new_empty((size, size))
    several = case.B > 1
    names = [name for name in VARIANTS if several != name.endswith("one sample")]
    ways: Ways = {n: partial(_summed, x, dy, dw, n) for n in ("sm90", *names)}
    ways["plain"] = partial(plain_wgrad, x, dy)
    timings = measure.interleave(ways, rounds, measure.cuda_seconds)
    return [
        {
            "variant": name,
            "T": T,
            "B": case.B,
            "ms": round(timing.milliseconds, 4),
            "time / sm90": timing,
            "counted": COUNTED[T].get(name, ""),
        }
        for name, timing in timings.items()
    ]


def _triton(x: Tensor, dy: Tensor, dw: Tensor) -> Tensor:
    """The fixed tile, which is never the extension."""
    from gnsfast.signatures import empty_rows
    from gnsfast.triton_kernels import configs, outer

    config, rows = configs.candidates(x.dtype, aligned=True)[0], empty_rows(x, 1, len(x))
    outer.fused_wgrad(x, dy, dw, rows, config=config)
    return rows[:, :-1]


def _summed(x: Tensor, dy: Tensor, dw: Tensor, kernel: str) -> Tensor:
    rows = x.new_empty((1, len(x) + 2), dtype=torch.float32)
    extension.linear_wgrad(x, dy, dw, None, rows, False, kernel)
    return rows
