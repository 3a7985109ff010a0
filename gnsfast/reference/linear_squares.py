# SPDX-License-Identifier: Apache-2.0
"""Σ_b (dy_bᵀ x_b)²: the second moment of every coordinate of a linear layer's weight.

Legend: B samples, T tokens of a sample, and the weight is [M, N]: its rows M are O, or I where it
is stored transposed. G samples of a group, W columns of a block.
"""

from torch import Tensor

from gnsfast.reference.outer import COLUMNS, GROUP, TILE, even_block
from gnsfast.signatures import LinearSquares
from gnsfast.tensors import accumulate_dtype, product_dtype


def linear_squares(a: LinearSquares) -> Tensor:
    """See ``LinearSquares``."""
    x, dy = a.x_BTI, a.dy_BTO
    left_BTM, right_BTN = (x, dy) if a.transposed else (dy, x)
    (B, T, M), N, acc = left_BTM.shape, right_BTN.shape[2], accumulate_dtype(x.dtype)
    if T == 1:
        exact = product_dtype(x)
        left_BM, right_BN = left_BTM[:, 0].to(exact), right_BTN[:, 0].to(exact)
        return (left_BM.square().T @ right_BN.square()).to(acc)
    squares_MN = x.new_zeros((M, N), dtype=acc)
    if B * T * M * N == 0:
        return squares_MN
    width, height = even_block(N, COLUMNS), even_block(M, TILE // min(N, COLUMNS))
    columns = zip(right_BTN.split(width, 2), squares_MN.split(width, 1))
    for right_BTW, squares_MW in columns:
        rows = zip(left_BTM.split(height, 2), squares_MW.split(height))
        for left_BTH, squares_HW in rows:
            _add_squares(left_BTH, right_BTW, squares_HW)
    return squares_MN


def _add_squares(left_BTH: Tensor, right_BTW: Tensor, squares_HW: Tensor) -> None:
    """Add one block's squares. The products of as many samples as fit a cache are made at once. The
    squares of one product are added in a single pass, those of several in three.
    """
    acc, together = squares_HW.dtype, max(1, GROUP // squares_HW.numel())
    for left_GTH, right_GTW in zip(left_BTH.split(together), right_BTW.split(together)):
        g_GHW = left_GTH.to(acc).mT @ right_GTW.to(acc)
        if together == 1:
            squares_HW.addcmul_(g_GHW[0], g_GHW[0])
        else:
            squares_HW += g_GHW.square_().sum(0)
