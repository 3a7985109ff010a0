# SPDX-License-Identifier: Apache-2.0
"""Sums over samples of what is quadratic in a sample's gradient g_b: g_b² of each coordinate, or
g_b g_bᵀ of a matrix on its smaller side.

The backward of a layer adds to them, from the operands of its operator. They are a step of their
own, about as dear as the weight's gradient, and serve measured updates only.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gnsfast import ops
from gnsfast.combinations import SIGN, SPECTRAL
from gnsfast.reference import normed_input, sample_sums, sum_tokens
from gnsfast.signatures import EmbeddingWgrad, LinearWgrad, NormBackward


class Squares:
    """Adds Σ_b g_b² of a module's parameters to ``sums``, tensors of their shapes, in order."""

    feature = SIGN

    def __init__(self, sums: Sequence[Tensor]) -> None:
        self.sums = sums

    def add(self, a: Any) -> None:
        """Add the samples of an operator's arguments."""
        if isinstance(a, EmbeddingWgrad):
            sum_SD, _, id_S = sample_sums(a)
            self._add_rows(id_S, sum_SD.square())
            return
        for total, squares in zip(self.sums, SQUARES[type(a)](a), strict=True):
            total += squares.view_as(total)

    def add_cross_terms(self, ids_BT: Tensor, products_BTD: Tensor) -> None:
        """Add the 2 a b of (a + b)², for an embedding's gradient a and a later use's b of the same
        weight; ``products_BTD`` are those of each token.
        """
        self._add_rows(ids_BT.flatten(), 2.0 * products_BTD.flatten(0, 1))

    def _add_rows(self, id_N: Tensor, rows_ND: Tensor) -> None:
        [total] = self.sums
        total.index_add_(0, id_N, rows_ND.to(total.dtype))


class Grams:
    """Adds Σ_b g_b g_bᵀ of a linear layer's weight to ``sum_SS``, on the weight's smaller side."""

    feature = SPECTRAL

    def __init__(self, sum_SS: Tensor) -> None:
        self.sum_SS = sum_SS

    def add(self, a: Any) -> None:
        """Add the samples of an operator's arguments."""
        O, I = a.dy_BTO.shape[-1], a.x_BTI.shape[-1]
        side = O > I or (O == I and a.transposed)  # a stored [I, O] weight has its rows on side 1
        self.sum_SS += ops.linear_grams(a.x_BTI, a.dy_BTO, int(side))


def _linear(a: LinearWgrad) -> Iterator[Tensor]:
    if a.weight:
        yield ops.linear_squares(a.x_BTI, a.dy_BTO, a.transposed)
    if a.bias:
        yield sum_tokens(a.dy_BTO).square().sum(0)


def _norm(a: NormBackward) -> Iterator[Tensor]:
    normed_BTF, _ = normed_input(a)
    if a.weight:
        yield (normed_BTF * a.dy_BTF).sum(1).square().sum(0)
    if a.bias:
        yield a.dy_BTF.to(normed_BTF.dtype).sum(1).square().sum(0)


SQUARES: dict[type, Callable[[Any], Iterator[Tensor]]] = {LinearWgrad: _linear, NormBackward: _norm}
"""Operator's arguments -> Σ_b g_b² of each parameter whose gradient is wanted."""
