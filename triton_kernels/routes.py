# SPDX-License-Identifier: Apache-2.0
"""Which route a linear layer's norms take on a GPU: one rule, counted until it is measured
(``python -m benchmarks gpu --only routes``).
"""

import torch
import triton

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


def linear_route(T: int, I: int, O: int, dtype: torch.dtype) -> str:
    """``closed``, ``gram`` or ``fused``, by the cost beside a plain weight gradient.

    float32 that is multiplied as such never takes the Gram route: where its terms cancel it loses
    digits, which the narrow types and tf32 have lost before.
    """
    if T == 1:
        return "closed"
    if T > MAX_TOKENS or (dtype == torch.float32 and not tf32_allowed()):
        return "fused"
    padding = triton.cdiv(T, 64) * 64 - T
    fused = 2 * I * O * (padding + BOUNDARY)
    gram = T * (I + O) * (2 * GRAM_WASTE * T / 2 + GRAM_READ)
    return "gram" if gram < fused else "fused"
