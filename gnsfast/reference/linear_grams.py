# SPDX-License-Identifier: Apache-2.0
"""Σ_b g_b g_bᵀ of a linear layer's weight gradients g_b = dy_bᵀ x_b, or Σ_b g_bᵀ g_b. It is plain
torch on every device, because it consists of matrix products.

Legend: B samples, T tokens of a sample, N features of the side that the result has, M of the other,
G samples of a group, W columns of a block.
"""

import torch
from torch import Tensor

from gnsfast.signatures import LinearGrams
from gnsfast.tensors import accumulate_dtype, product_dtype, wide_bmm

WIDE = 2
"""The cost of a float64 multiply-add, in float32 multiply-adds. A CPU's vectors hold half as many
float64 numbers, while an H200 multiplies both at 67 TFLOP/s.
"""

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""The most numbers that are made at a time: enough for products to run at full speed, and on a CPU
few enough for a cache. On a GPU they are 256 MiB."""


def grams_route(T: int, N: int, M: int) -> str:
    """``tokens`` or ``tiles``, whichever needs fewer multiply-adds for a sample."""
    tokens = WIDE * T * T * (M + N) + T * N * N
    return "tokens" if tokens < T * M * N + M * N * N else "tiles"


def linear_grams(a: LinearGrams) -> Tensor:
    """See ``LinearGrams``."""
    own_BTN, other_BTM = (a.x_BTI, a.dy_BTO) if a.side else (a.dy_BTO, a.x_BTI)
    (B, T, N), M = own_BTN.shape, other_BTM.shape[2]
    gram_NN = own_BTN.new_zeros((N, N), dtype=product_dtype(own_BTN))
    if B * T * M * N:
        add = _add_by_tokens if grams_route(T, N, M) == "tokens" else _add_by_tiles
        add(own_BTN, other_BTM, gram_NN)
    return (gram_NN + gram_NN.T).mul_(0.5).to(accumulate_dtype(own_BTN.dtype))


def _add_by_tokens(own_BTN: Tensor, other_BTM: Tensor, gram_NN: Tensor) -> None:
    """Add Σ_b own_bᵀ (other_b other_bᵀ) own_b, without computing any g_b.

    The inner products are float64, because their sum cancels if tokens are similar and ``own`` sums
    to almost zero, as in key projections. With tokens within 1 % of each other, the error would be
    4e-3 in float32. In float64 it is 5e-6, as that of g_b itself.
    """
    (_, T, N), M, acc = own_BTN.shape, other_BTM.shape[2], gram_NN.dtype
    together = max(1, ELEMENTS[gram_NN.device.type] // (T * (M + N + T)))
    for own_GTN, other_GTM in zip(own_BTN.split(together), other_BTM.split(together)):
        wide_GTM = other_GTM.double()
        seen_GTN = torch.bmm(torch.bmm(wide_GTM, wide_GTM.mT), own_GTN.double()).to(acc)
        gram_NN.addmm_(own_GTN.to(acc).flatten(0, 1).T, seen_GTN.flatten(0, 1))


def _add_by_tiles(own_BTN: Tensor, other_BTM: Tensor, gram_NN: Tensor) -> None:
    """Add Σ_b g_b g_bᵀ, with g_bᵀ made for some samples or some of its rows at a time."""
    N, M = own_BTN.shape[2], other_BTM.shape[2]
    elements = ELEMENTS[gram_NN.device.type]
    together, width = max(1, elements // (M * N)), max(1, elements // N)
    for own_GTN, other_GTM in zip(own_BTN.split(together), other_BTM.split(together)):
        for other_GTW in other_GTM.split(width, 2):
            g_WN = wide_bmm(other_GTW.mT, own_GTN, gram_NN.dtype).flatten(0, 1)
            gram_NN.addmm_(g_WN.T, g_WN)
