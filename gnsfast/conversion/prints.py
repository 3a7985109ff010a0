# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors (prints), small enough to keep for a whole pass, and how they show where
the samples lie.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor


class Print(NamedTuple):
    """The fingerprint of a tensor: a number for each entry of its first dimensions. Differences
    below ``slack`` count as rounding. ``picked``: the data select or sort the rows. ``flat``: they
    are all rows of a flattened tensor [B, ...].
    """

    shape: tuple[int, ...]
    values: Tensor
    slack: Tensor
    picked: bool = False
    flat: bool = False

    def like(self, values: Tensor) -> bool:
        """Whether ``values``, of the same shape, differ from these by rounding alone."""
        return bool(((self.values - values).abs() <= self.slack).all())

    def same(self, other: "Print") -> bool:
        """Whether both tensors are the same but for rounding."""
        return self.shape == other.shape and self.like(other.values)


def print_of(t: Tensor) -> Print | None:
    """The print of ``t``, or None for a tensor without plain numbers in memory.

    It keeps two dimensions, or one of a floating-point matrix. The others are summed with weights
    that look random.
    """
    if t.layout != torch.strided or t.is_quantized or t.is_meta or is_batchedtensor(t):
        return None
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    kept = min(2, max(t.ndim - 1, 1) if t.is_floating_point() else t.ndim)
    x = t.reshape(*t.shape[:kept], t.shape[kept:].numel())
    if not t.is_floating_point():
        values = x.double() @ _weights(x).double()
        return Print(tuple(t.shape), values, torch.zeros_like(values))
    x = x.float()
    values, norm = x @ _weights(x), torch.linalg.vector_norm(x, dim=-1)
    if (large := ~(norm < LARGE)).any():
        rows = x[large].nan_to_num(nan=0.5).asinh()
        values[large], norm[large] = rows @ _weights(x), torch.linalg.vector_norm(rows, dim=-1)
    # A row whose sum almost cancels has the same absolute error as the others.
    slack = norm + 1e-2 * norm.max() if norm.numel() else norm
    slack = slack * (1e-3 if t.dtype.itemsize >= 4 else 3e-2)
    return Print(tuple(t.shape), values, slack)


LARGE = 1e6
"""A row of this norm holds a mask's -1e9 or -inf, which would hide the numbers beside it."""


def _weights(x: Tensor) -> Tensor:
    """A weight for each entry of the last dimension of ``x``. It uses no random generator, because
    their state belongs to the user.
    """
    if x.shape[-1] == 1:
        return torch.ones(1, dtype=torch.float32, device=x.device)
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float64)
    weights: Tensor = ((k * 12.9898).sin() * 43758.5453).frac().float()
    return weights


class Rows(NamedTuple):
    """Where the samples of a tensor lie: along dimension ``dim``, with ``each`` consecutive entries
    for every sample, or with entries that are B apart if ``interleaved``. With ``each`` 0 all
    samples share the tensor.
    """

    dim: int = 0
    each: int = 1
    interleaved: bool = False


SHARED = Rows(each=0)


class Lost(NamedTuple):
    """Why no ``Rows`` describe a tensor. ``mixed``: the values of a sample depend on others.
    ``pooled``: the tensor depends on the samples, but its size does not depend on their number.
    """

    reason: str
    mixed: bool = False
    pooled: bool = False


class Samples(NamedTuple):
    """The samples of four passes: all in their order, all in another order, and two parts."""

    whole: list[int]
    turned: list[int]
    part: list[int]
    other: list[int]


def rows_of(prints: Sequence[Print | None], samples: Samples) -> Rows | Lost:
    """Where the samples lie in a tensor, from its ``prints`` in the four passes."""
    whole, *others = (each for each in prints if each is not None)
    if len(others) < 3:
        return Lost("it has no numbers in memory to compare")
    turned, part, other = others
    if len({each.shape for each in (whole, *others)}) == 1:
        if all(whole.like(each.values) for each in others):
            return SHARED
        return Lost("it is computed from all samples together", pooled=True)
    alike = whole.shape == turned.shape and part.shape == other.shape
    shapes = [rows for rows in _candidates(whole, part, samples) if alike]
    found = [
        rows
        for rows in shapes
        if all(each.like(taken(whole.values, rows, own)) for each, own in zip(others, samples[1:]))
    ]
    if shapes and not (found or all(_among(p, whole, shapes[0].dim) for p in (part, other))):
        return Lost("its values for one sample depend on the others", mixed=True)
    if any(each.picked for each in (whole, *others)):
        return Lost(
            "the data select or sort its rows, so another batch may have other rows. If each "
            "sample always has the same number of rows, in the order of the samples, name the "
            "module in convert(model, fold=[...])"
        )
    if alike and _merged(whole, part, samples):
        return Lost(
            f"{len(samples.whole)} rows of the example become {list(whole.shape)} (if k "
            "consecutive rows are one sample, call convert(model, fold=['*']) without an example)",
            mixed=True,
        )
    if not shapes:
        return Lost(
            f"its shape is {list(whole.shape)} for {len(samples.whole)} samples and "
            f"{list(part.shape)} for {len(samples.part)}, so no dimension holds a fixed number of "
            "rows for each sample (a mask selects them, or they are gathered by expert)"
        )
    if not found:
        return Lost(
            "its rows are not in the order of the samples (they are sorted, or selected by a mask)"
        )
    if len(found) > 1:
        return Lost("its rows are too similar to tell to which samples they belong")
    if found[0].each > 1 and not all(each.flat for each in (whole, *others)):
        return Lost(
            "its rows do not all come from a flattened tensor [B, ...], so another batch may have "
            "other rows. If each sample always has the same number of consecutive rows, name the "
            "module in convert(model, fold=[...])"
        )
    return found[0]


def _candidates(whole: Print, part: Print, samples: Samples) -> Iterator[Rows]:
    """The ``Rows`` whose shapes are right."""
    B, n = len(samples.whole), len(samples.part)
    for dim in range(whole.values.ndim):
        size, of_part = whole.shape[dim], part.shape[dim] if dim < len(part.shape) else -1
        others = whole.shape[:dim] + whole.shape[dim + 1 :]
        if size % B or size == 0 or of_part * B != size * n:
            continue
        if others == part.shape[:dim] + part.shape[dim + 1 :]:
            yield Rows(dim, size // B)
            if size > B:
                yield Rows(dim, size // B, interleaved=True)


def _merged(whole: Print, part: Print, samples: Samples) -> bool:
    """Whether some dimension holds, in proportion, fewer entries than there are samples."""
    B, n = len(samples.whole), len(samples.part)
    sizes = [(a, b) for a, b in zip(whole.shape, part.shape) if a != b]
    return len(sizes) == 1 and all(0 < a < B and a * n == b * B for a, b in sizes)


def taken(values: Tensor, rows: Rows, samples: list[int]) -> Tensor:
    """The rows of ``samples``, laid out as ``rows``."""
    dim, each, interleaved = rows
    inner, axis = ((each, -1), dim + 1) if interleaved else ((-1, each), dim)
    index = torch.tensor(samples, device=values.device)
    taken: Tensor = values.unflatten(dim, inner).index_select(axis, index)
    return taken.flatten(dim, dim + 1)


LOOKED_UP = 64


def _among(part: Print, whole: Print, dim: int) -> bool:
    """Whether the first rows of ``part`` are rows of ``whole``, wherever they are."""
    few, slack, many = (
        t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (part.values, part.slack, whole.values)
    )
    few, slack = few[:LOOKED_UP, None], slack[:LOOKED_UP, None]
    return bool(((few - many).abs() <= slack).all(-1).any(1).all())
