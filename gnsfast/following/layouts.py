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


class Print(NamedTuple):
    """The fingerprint of a tensor: for each dimension a number for each of its indices, which a
    change there changes. It takes little memory, so those of whole passes can be kept.
    """

    shape: torch.Size
    along: tuple[Tensor, ...]

    @classmethod
    def of(cls, t: Tensor) -> "Print":
        """The fingerprint of ``t``, in its own precision where it has floating-point numbers."""
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        shape, t = t.shape, t.detach().as_subclass(Tensor)
        if t.is_complex():
            t = torch.view_as_real(t).sum(-1)
        elif not t.is_floating_point():
            t = t.double()
        found = _along(t)
        if not all(bool(each.isfinite().all()) for each in found):  # as of a mask
            found = _along(t.nan_to_num(0.1, 1e4, -1e4))
        return cls(shape, tuple(found))

    def differs(self, other: "Print", d: int) -> Tensor:
        """At which indices of dimension ``d`` two tensors differ by more than rounding."""
        a, b = self.along[d], other.along[d]
        largest = a.abs().amax() if a.numel() else 0.0
        return (a - b).abs() > TOLERANCE * largest


TOLERANCE = 1e-5
"""Of the largest number of a print: below it a difference between two passes is rounding."""


def _along(t: Tensor) -> list[Tensor]:
    """A number for each index of each dimension of ``t``, in two passes over it."""
    found: list[Tensor] = []
    if not t.numel():
        return [t.new_zeros(size) for size in t.shape]
    for d in reversed(range(t.ndim)):  # the last dimension is summed over, and so on
        rest = t.reshape(-1, t.shape[d])
        found.append(_weights(len(rest), t) @ rest)
        t = t @ _weights(t.shape[d], t) if d else t
    return found[::-1]


def _weights(n: int, like: Tensor) -> Tensor:
    """Weights that look random. They use no random generator, whose state belongs to the user."""
    k = torch.arange(1, n + 1, dtype=torch.float64, device=like.device)
    return k.mul(0.7391).sin_().to(like.dtype)


def place_of(
    base: Print, others: dict[int, Print], fewer: torch.Size | None, n: int
) -> Place | None:
    """Where the n samples of a tensor lie. ``base`` is its print, ``others`` are those in passes in
    which one sample was replaced, by the number of that sample, and ``fewer`` is its shape in a
    pass of n - 1 samples. None if nothing in it changed.
    """
    if any(other.shape != base.shape for other in others.values()):
        return UNKNOWN
    dims = range(len(base.shape))
    changed = {b: [base.differs(other, d) for d in dims] for b, other in others.items()}
    if not any(bool(c.any()) for each in changed.values() for c in each):
        return grown(base.shape, fewer, n)
    for d, size in enumerate(base.shape):
        if size < n or size % n:
            continue
        for interleaved in (False, True):
            parts = (size // n, n) if interleaved else (n, size // n)
            own = {
                b: each[d].view(parts).any(0 if interleaved else 1) for b, each in changed.items()
            }
            if not any(bool(o[[j for j in range(n) if j != b]].any()) for b, o in own.items()):
                return Layout(d, interleaved, size > n)
    return UNKNOWN


def grown(shape: torch.Size, fewer: torch.Size | None, n: int) -> Layout | None:
    """The one dimension whose size is in proportion to the number of samples."""
    if fewer is None or len(fewer) != len(shape):
        return None
    dims = [d for d, (a, b) in enumerate(zip(shape, fewer)) if a != b]
    if len(dims) != 1 or shape[dims[0]] * (n - 1) != fewer[dims[0]] * n:
        return None
    return Layout(dims[0], False, shape[dims[0]] > n)


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
