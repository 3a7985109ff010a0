# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a tensor lie."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Dimension ``dim`` holds B samples of consecutive rows. If they are ``interleaved``, each has
    so many rows in turn: 1, or C where [B * C, T] was transposed and made one list. ``several`` is
    the number of rows that a sample had there when the table was learnt, 0 for one. ``ANY_NUMBER``
    stands for any number.
    """

    dim: int = 0
    interleaved: int = 0
    several: int = 0

    def __str__(self) -> str:
        how = "interleaved rows" if self.interleaved else "rows"
        how = f"{self.interleaved} {how}" if self.interleaved > 1 else how
        return f"{how} of dimension {self.dim}" if self.several else f"dimension {self.dim}"

    @classmethod
    def of(cls, shape: torch.Size, n: int, dim: int) -> "Layout":
        """That of n samples along a dimension of a tensor of this shape."""
        return cls(dim, 0, shape[dim] // n if shape[dim] > n else 0)

    def fits(self, shape: torch.Size | tuple[int, ...], B: int) -> bool:
        """Whether a tensor of this shape may hold B samples so."""
        if self.dim >= len(shape) or (B and shape[self.dim] % (B * max(self.interleaved, 1))):
            return False
        return bool(self.several) or shape[self.dim] == B

    @property
    def is_first(self) -> bool:
        """Whether dimension 0 has the size of the batch."""
        return self.dim == 0 and not self.several

    def samples_first(self, t: Tensor, B: int) -> Tensor:
        """``t`` with the samples in dimension 0 and, if they have several rows, those in
        ``dim`` + 1, and if they have several in turn, these in ``dim`` + 2.
        """
        d, n = self.dim, t.shape[self.dim]
        if n == B:
            return t.movedim(d, 0) if d else t
        parts, dim = (self._turns(n, B), d + 1) if self.interleaved else ((B, n // B), d)
        first: Tensor = torch.unflatten(t, d, parts).movedim(dim, 0)
        return first

    def _turns(self, n: int, B: int) -> tuple[int, ...]:
        """What n interleaved rows are: turns of B samples, each of which may have several rows."""
        run = self.interleaved
        return (n // (B * run), B, run) if run > 1 else (n // B, B)

    def owners(self, shape: torch.Size, B: int, device: torch.device) -> Tensor:
        """The sample of each entry of a tensor of this shape."""
        n = shape[self.dim]
        rows = torch.arange(n, device=device)
        run = self.interleaved
        rows = rows // run % B if run else rows // max(n // max(B, 1), 1)
        return rows.view(-1, *(1,) * (len(shape) - self.dim - 1)).expand(shape)

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's part of ``t``, with as many dimensions."""
        rows = t.shape[self.dim] // B
        if self.interleaved:
            apart: Tensor = torch.unflatten(t, self.dim, self._turns(t.shape[self.dim], B))
            one = apart.select(self.dim + 1, b)
            return one.flatten(self.dim, self.dim + 1) if self.interleaved > 1 else one
        return t.narrow(self.dim, b * rows, rows)

    def alone(self, t: Tensor, b: int, B: int) -> Tensor:
        """``t`` with zeros in the place of all samples but b."""
        return t.masked_fill(self.owners(t.shape, B, t.device) != b, 0.0)


class Lengths:
    """How much longer the samples of this pass are than those of the batch that its table was
    learnt from. Where a sample has several rows, their number may grow as its tokens do.

    ``pairs`` are sizes of a sample, now and then, of calls in which each sample has one row.
    ``several`` are for a number of rows in the table those of this pass.
    """

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()
        self.several: dict[int, set[int]] = {}

    def clear(self) -> None:
        """Know nothing of a pass."""
        self.pairs.clear()
        self.several.clear()

    def has(self, rows: int) -> bool:
        """Whether a call of this pass had so many rows of each sample, as in the table."""
        as_then = self.several.get(rows, {rows}) == {rows}
        return as_then and any(rows in now for now in self.several.values())

    def allows(self, then: int, now: int) -> bool:
        """Whether a sample may have so many rows ``now`` that had ``then`` ones in the table."""
        self.several.setdefault(then, set()).add(now)
        if now == then:
            return True
        if not self.pairs:  # no call tells so far: all that have several rows must agree
            self.pairs.add((now, then))
        return any(now * b == then * a or now * b * b == then * a * a for a, b in self.pairs)


def lengths_of(sizes: Sequence[int], then: Sequence[int]) -> frozenset[tuple[int, int]]:
    """The ``Lengths.pairs`` that a call shows whose samples have ``sizes``, and had others then."""
    changed = [(a, b) for a, b in zip(sizes, then) if a != b]
    product = math.prod(a for a, _ in changed), math.prod(b for _, b in changed)
    return frozenset((*changed, product)) if len(then) > 1 else frozenset()


class Chosen(NamedTuple):
    """Dimension 0 holds rows that the data have chosen, as before an expert. ``owner_N`` is the
    sample of each row.
    """

    owner_N: Tensor

    @property
    def order_N(self) -> Tensor:
        """The order in which the rows of each sample lie one after the other."""
        return self.owner_N.argsort(stable=True)

    def starts(self, B: int) -> Tensor:
        """[B + 1], where the rows of each sample begin in this order."""
        ends_B = torch.bincount(self.owner_N, minlength=B).cumsum(0)
        return torch.cat([ends_B.new_zeros(1), ends_B])

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's rows."""
        return t[self.owner_N == b]

    def alone(self, t: Tensor, b: int, B: int) -> Tensor:
        """``t`` with zeros in the place of all rows but those of sample b."""
        return t.masked_fill((self.owner_N != b).view(-1, *[1] * (t.ndim - 1)), 0.0)


class Owned(NamedTuple):
    """Each entry belongs to the sample that ``owner`` tells, which has the shape of the tensor."""

    owner: Tensor


FIRST = Layout()
"""Samples lie along dimension 0."""

ANY_NUMBER = -1

ALONE = Layout(several=ANY_NUMBER)
"""All rows belong to the one sample of the batch."""

SHARED = "shared"
"""No sample has a part in the tensor: it is made of parameters and constants alone."""

UNKNOWN = "unknown"
"""The samples of the tensor were not found."""

RAGGED = "ragged rows"
"""The samples have unequal numbers of rows, along dimension 0, or the first few together."""

Place = Layout | Chosen | str
