# SPDX-License-Identifier: Apache-2.0
"""Sums over samples beside the gradient: of g_b² for each coordinate of a sample's gradient g_b, of
g_b g_bᵀ for a matrix on its smaller side, and of every second g_b.

The backward of a layer adds to them, from the operands of its operator. They are additional work:
every second gradient costs half a weight gradient, squares cost one or more, and the products
g_b g_bᵀ of wide layers several. Only measured updates compute them.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from gnsfast import ops
from gnsfast.combinations import SIGN, SPECTRAL
from gnsfast.functional.plan import Operator
from gnsfast.reference import normed_input, sample_sums, sum_tokens
from gnsfast.signatures import (
    BY_SAMPLE,
    EmbeddingWgrad,
    LinearGrams,
    LinearSquares,
    LinearWgrad,
    NormBackward,
)
from gnsfast.tensors import accumulate_dtype


class Sums:
    """Sums to which the backward pass adds."""

    feature: str

    def __init__(self, sums: Callable[[], Sequence[Any]]) -> None:
        self.sums = sums

    @classmethod
    def merged(cls, each: Sequence[Any]) -> Any:
        """The sums of several parameters of one function, with None for one without sums."""
        raise NotImplementedError

    def add(self, operator: Operator, a: Any, wanted: Sequence[bool]) -> None:
        """Add the samples of the operator's arguments ``a``."""
        raise NotImplementedError

    def serves(self, a: Any) -> bool:
        """Whether the sums follow from an operator's arguments ``a``."""
        raise NotImplementedError

    def add_sample(self, b: int, g: Tensor) -> None:
        """Add sample b's gradient of the one parameter of these sums."""
        raise NotImplementedError

    def of(self, k: int) -> Any:
        """The sums of parameter number ``k`` alone."""
        own = copy.copy(self)
        own.sums = lambda: [self.sums()[k]]
        return own


class Squares(Sums):
    """Adds Σ_b g_b² of a module's parameters to ``sums()``, tensors of their shapes, in order."""

    feature = SIGN

    @classmethod
    def merged(cls, each: Sequence[Any]) -> "Squares":
        return cls(lambda: _sums_of(each))

    def serves(self, a: Any) -> bool:
        return type(a) in SQUARES or isinstance(a, EmbeddingWgrad)

    def add_sample(self, b: int, g: Tensor) -> None:
        [total] = self.sums()
        total += g.square().view_as(total)

    def add(self, operator: Operator, a: Any, wanted: Sequence[bool]) -> None:
        if isinstance(a, EmbeddingWgrad):
            sum_SD, _, id_S = sample_sums(a)
            self._add_rows(id_S, sum_SD.square())
            return
        for total, squares in zip(self.sums(), SQUARES[type(a)](a), strict=True):
            if total is not None:
                total += squares.view_as(total)

    def add_cross_terms(self, ids_BT: Tensor, products_BTD: Tensor) -> None:
        """Add the 2 a b of (a + b)², for an embedding's gradient a and a later use's b of the same
        weight; ``products_BTD`` are those of each token.
        """
        self._add_rows(ids_BT.flatten(), 2.0 * products_BTD.flatten(0, 1))

    def _add_rows(self, id_N: Tensor, rows_ND: Tensor) -> None:
        [total] = self.sums()
        total.index_add_(0, id_N, rows_ND.to(total.dtype))


class Grams(Sums):
    """Adds Σ_b g_b g_bᵀ of a linear layer's weight to the one tensor of ``sums()``, on the weight's
    smaller side.
    """

    feature = SPECTRAL

    @classmethod
    def merged(cls, each: Sequence[Any]) -> "Grams":
        return cls(lambda: [total for total in _sums_of(each) if total is not None])

    def serves(self, a: Any) -> bool:
        return isinstance(a, LinearWgrad) and a.weight

    def add_sample(self, b: int, g: Tensor) -> None:
        [sum_SS] = self.sums()
        g = g.mT if g.shape[0] > g.shape[1] else g
        sum_SS += g @ g.mT

    def add(self, operator: Operator, a: Any, wanted: Sequence[bool]) -> None:
        O, I = a.dy_BTO.shape[-1], a.x_BTI.shape[-1]
        side = O > I or (O == I and a.transposed)  # a stored [I, O] weight has its rows on side 1
        [sum_SS] = self.sums()
        sum_SS += ops.linear_grams(LinearGrams(a.x_BTI, a.dy_BTO, int(side)))


class Halves(Sums):
    """Adds every second sample's gradient, from the sample ``first`` on, to ``sums()``. These are a
    tensor for each trained parameter of a module, in order, or None where no sum is needed.
    """

    def __init__(self, sums: Callable[[], Sequence[Any]], first: int, feature: str) -> None:
        super().__init__(sums)
        self.first, self.feature = first, feature

    @classmethod
    def merged(cls, each: Sequence[Any]) -> "Halves":
        some = next(sums for sums in each if sums is not None)
        return cls(lambda: _sums_of(each), some.first, some.feature)

    def serves(self, a: Any) -> bool:
        return type(a) in BY_SAMPLE

    def add_sample(self, b: int, g: Tensor) -> None:
        [total] = self.sums()
        if b % 2 == self.first:
            total += g.view_as(total)

    def add(self, operator: Operator, a: Any, wanted: Sequence[bool]) -> None:
        inputs, kinds = BY_SAMPLE[type(a)]
        # The kernels of norms assume that statistics are contiguous.
        own = (t if t is None else t[self.first :: 2].contiguous() for t in a[:inputs])
        half = type(a)(*own, *a[inputs:])
        if not len(half[0]):
            return
        if "dtype" in half._fields:
            half = half._replace(dtype=accumulate_dtype(a[0].dtype))
        if isinstance(half, LinearWgrad):
            half = half._replace(ids_BS=None)
        found = [t for t, kind in zip(operator(half), kinds) if kind == "sum"]
        for total, part in zip(self.sums(), compress(found, wanted), strict=True):
            if total is not None:
                total += part.view_as(total)


def _sums_of(each: Sequence[Any]) -> list[Any]:
    return [None if sums is None else sums.sums()[0] for sums in each]


def _linear(a: LinearWgrad) -> Iterator[Tensor]:
    if a.weight:
        yield ops.linear_squares(LinearSquares(a.x_BTI, a.dy_BTO, a.transposed))
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
