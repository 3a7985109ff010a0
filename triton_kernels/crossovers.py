# SPDX-License-Identifier: Apache-2.0
"""Which route a linear layer's norms take on a GPU: one rule, counted until it is measured
(``python -m benchmarks gpu --only routes``).
"""

import functools

import torch
import triton
from torch import Tensor

from gnsfast.triton_kernels.configs import multiprocessors
from gnsfast.triton_kernels.gram import MAX_TOKENS
from gnsfast.triton_kernels.tiles import tf32_allowed

BOUNDARY = 24
"""A sample's end in the fused kernel (waiting, squaring, adding), in tokens of its GEMM: 5 % of a
sample of 512."""

GRAM_WASTE = 2
"""The Gram products are whole squares of which a triangle is needed."""

GRAM_READ = 350
"""Reading an element of x or dy once more, in floating-point operations that the tensor cores do
meanwhile: 2 bytes at 4 TB/s against 700 TFLOP/s."""


def linear_route(B: int, T: int, I: int, O: int, x: Tensor) -> str:
    """``closed``, ``gram`` or ``fused``, by the cost beside a plain weight gradient; ``x`` gives
    dtype and device.

    float32 that is multiplied as such never takes the Gram route: its products are as slow as the
    layer's own.
    """
    if T > 1 and x.dtype == torch.float32 and not tf32_allowed():
        return "fused"
    return counted_route(B, T, I, O, multiprocessors(x.device))


@functools.lru_cache(maxsize=4096)
def counted_route(B: int, T: int, I: int, O: int, processors: int) -> str:
    """The rule on a device of so many multiprocessors, for what the tensor cores multiply."""
    if T == 1:
        return "closed"
    if T > MAX_TOKENS:
        return "fused"
    padding = triton.cdiv(T, 64) * 64 - T
    fused = 2 * I * O * (padding + BOUNDARY)
    gram = T * (I + O) * (GRAM_WASTE * T + GRAM_READ)
    waves = triton.cdiv(B, processors) * processors / B  # a program takes a sample
    return "gram" if gram * waves < fused else "fused"
