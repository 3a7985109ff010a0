# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a tensor lie."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Dimension ``dim`` holds B samples of consecutive rows, or if ``interleaved`` rows that are B
    apart. ``several``: a sample had more than one row there in the example. ``None`` stands for
    unknown: without an example only a dimension of size B counts.
    """

    dim: int = 0
    interleaved: bool = False
    several: bool | None = None

    def fits(self, shape: torch.Size | tuple[int, ...], B: int) -> bool:
        """Whether a tensor of this shape may hold B samples so. Where each sample had one row in
        the example, more rows may lie in either order.
        """
        if self.dim >= len(shape) or (B and shape[self.dim] % B):
            return False
        return bool(self.several) or shape[self.dim] == B

    def samples_first(self, t: Tensor, B: int) -> Tensor:
        """``t`` with the samples in dimension 0 and, if they have several rows, those in
        ``dim`` + 1.
        """
        d, n = self.dim, t.shape[self.dim]
        if n == B:
            return t.movedim(d, 0) if d else t
        parts, own = ((n // B, B), d + 1) if self.interleaved else ((B, n // B), d)
        first: Tensor = torch.unflatten(t, d, parts).movedim(own, 0)
        return first

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's part of ``t``, with as many dimensions."""
        each = t.shape[self.dim] // B
        if self.interleaved:
            rows: Tensor = torch.unflatten(t, self.dim, (each, B))
            return rows.select(self.dim + 1, b)
        return t.narrow(self.dim, b * each, each)


class Chosen(NamedTuple):
    """Dimension 0 holds rows that the data have chosen, as before an expert. ``owner_N`` is the
    sample of each row.
    """

    owner_N: Tensor

    def of_sample(self, t: Tensor, b: int, B: int) -> Tensor:
        """Sample b's rows."""
        return t[self.owner_N == b]


FIRST = Layout()
"""Samples lie along dimension 0."""

ALONE = Layout(several=True)
"""All rows belong to the one sample of the batch."""

SHARED = "shared"
"""No sample has a part in the tensor: it is made of parameters and constants alone."""

UNKNOWN = "unknown"
"""The samples of the tensor were not found."""

Place = Layout | Chosen | str


def place_of(
    base: Tensor, others: dict[int, Tensor], fewer: tuple[int, ...] | None, n: int
) -> Place | None:
    """Where the n samples of ``base`` lie. ``others`` is the same tensor in passes in which one
    sample was replaced, by the number of that sample, and ``fewer`` its shape in a pass of n - 1
    samples. None if nothing in it changed.
    """
    if any(o.shape != base.shape for o in others.values()):
        return UNKNOWN
    changed = {b: _differs(base, o) for b, o in others.items()}
    if not any(bool(c.any()) for c in changed.values()):
        return grown(base.shape, fewer, n)
    for d, size in enumerate(base.shape):
        if size < n or size % n:
            continue
        rest = [i for i in range(base.ndim) if i != d]
        rows = {b: c.amax(rest) if rest else c for b, c in changed.items()}
        for interleaved in (False, True):
            parts = (size // n, n) if interleaved else (n, size // n)
            within = 0 if interleaved else 1
            if all(
                not bool(r.view(parts).amax(within)[[j for j in range(n) if j != b]].any())
                for b, r in rows.items()
            ):
                return Layout(d, interleaved, size > n)
    return UNKNOWN


def grown(shape: torch.Size, fewer: tuple[int, ...] | None, n: int) -> Layout | None:
    """The one dimension whose size is in proportion to the number of samples."""
    if fewer is None or len(fewer) != len(shape):
        return None
    dims = [d for d, (a, b) in enumerate(zip(shape, fewer)) if a != b]
    if len(dims) != 1 or shape[dims[0]] * (n - 1) != fewer[dims[0]] * n:
        return None
    return Layout(dims[0], False, shape[dims[0]] > n)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return a != b
    a, b = (t.nan_to_num(0.1, 1e4, -1e4) for t in (a, b))
    size = a.abs().amax() if a.numel() else 0.0
    return (a - b).abs() > TOLERANCE * size


TOLERANCE = 1e-5
"""Of the largest entry of a tensor: below it a difference between two passes counts as rounding."""


def owners_of(x: Tensor, B: int) -> Tensor | None:
    """The samples of rows [n, ...] that were indexed from those of a batch, as autograd's graph of
    ``x`` tells. Whether all between the index and ``x`` keeps the rows is for the example to show.
    """
    todo: list[tuple[Any, int, int | None]] = [(x.grad_fn, x.output_nr, None)]
    seen, n = 0, x.shape[0]
    while todo and seen < FAR:
        (fn, number, start), seen = todo.pop(0), seen + 1
        if fn is None:
            continue
        name = fn.name()
        if name == "SplitWithSizesBackward0" and fn._saved_dim == 0:  # rows of one expert of all
            start = (start or 0) + sum(fn._saved_split_sizes[:number])
        if name == "IndexBackward0":
            k, index = next((k, i) for k, i in enumerate(fn._saved_indices) if i is not None)
            rows = fn._saved_self_sym_sizes[k]
            chosen = index.ndim == 1 and index.dtype == torch.int64 and B and rows % B == 0
            if chosen and (len(index) == n if start is None else len(index) >= start + n):
                first = start or 0
                owner_N: Tensor = index.as_subclass(Tensor)[first : first + n] // (rows // B)
                return owner_N
        todo += [(f, nr, start) for f, nr in fn.next_functions]
    return None


FAR = 80
"""So many nodes of the graph are searched for the index of an expert's rows."""
