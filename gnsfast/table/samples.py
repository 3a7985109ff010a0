# SPDX-License-Identifier: Apache-2.0
"""Some samples of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.errors import SampleShapeError
from gnsfast.following import Layout
from gnsfast.reasons import TAKE
from gnsfast.tensors import map_tensors, tensors_of

Take = Callable[[Any, list[int]], Any] | int
"""``take(batch, samples)`` is a batch of these samples, some of which may come twice. A number K
says that the rows b, b + n, ..., b + (K - 1) n of n samples are sample b.
"""


class Samples(NamedTuple):
    """The ``n`` samples of a ``batch``, some of which ``take`` cuts out, or where that is None
    ``layouts`` tell where each tensor holds them.
    """

    batch: Any
    n: int
    take: Callable[[Any, list[int]], Any] | None
    layouts: tuple[Layout | None, ...]

    @classmethod
    def of(cls, batch: Any, n: int, take: Take | None, name: str) -> "Samples":
        """The samples of a batch of model ``name``.

        Raises:
            SampleShapeError: if no tensor of the batch has ``n`` of them, and there is no ``take``.
        """
        tensors = tensors_of(batch)
        if isinstance(take, int):
            rows = take * n
            layouts = tuple(_of_turns(t, take, n) for t in tensors)
            holds, take = any(layout and layout.several for layout in layouts), None
        else:
            rows = n
            layouts = tuple(_layout_of(t, n) for t in tensors)
            holds = any(layout and not layout.several for layout in layouts)
        if take is None and n > 1 and not holds:
            shapes = ", ".join(str([*t.shape]) for t in tensors[:4]) or "none"
            raise SampleShapeError(
                f"{name}: the block has {n} samples, but the model got tensors of shape {shapes}, "
                f"none of which has dimension 0 or 1 of size {rows}. Give the block the "
                f"number of samples of the batch. If it has, say how to cut samples out: {TAKE}. "
                "If samples have unequal numbers of rows, say whose each row is: "
                "gns.update(n, rows=owner), which is batch.batch of torch_geometric."
            )
        return cls(batch, n, take, layouts)

    @property
    def are_unclear(self) -> bool:
        """Whether dimensions 0 and 1 of ids or of features of tokens have as many entries, and
        nobody has said which of them holds the samples.
        """
        tensors = tensors_of(self.batch)
        tokens = [t for t in tensors if t.ndim == (3 if t.is_floating_point() else 2)]
        square = any(t.shape[:2] == (self.n, self.n) for t in tokens)
        return self.take is None and self.n > 1 and square

    @property
    def are_in_turn(self) -> bool:
        """Whether a number said that the rows of samples come in turn."""
        return any(layout is not None and layout.interleaved for layout in self.layouts)

    def some(self, samples: Sequence[int]) -> Any:
        """A batch of some samples, counted from 0 again where the batch has fewer. Its tensors are
        copies.
        """
        chosen = [b % max(self.n, 1) for b in samples]
        if self.take is not None:
            return map_tensors(_copy, self.take(self.batch, chosen))
        layouts = iter(self.layouts)

        def cut(t: Tensor) -> Tensor:
            layout = next(layouts)
            if layout is None:
                return _copy(t)
            parts = [layout.of_sample(t.detach(), b, self.n) for b in chosen]
            if layout.interleaved:
                some = torch.stack(parts, 1).flatten(0, 1)
            else:
                some = torch.cat(parts, layout.dim)
            return some.requires_grad_(t.requires_grad)

        return map_tensors(cut, self.batch)


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _of_turns(t: Tensor, rows_per_sample: int, n: int) -> Layout | None:
    """Samples whose rows come in turn: all first rows, all second ones."""
    if not t.ndim or t.shape[0] not in (n, rows_per_sample * n):
        return None
    return Layout(0) if t.shape[0] == n else Layout(0, 1, rows_per_sample)


def _layout_of(t: Tensor, n: int) -> Layout | None:
    """The first of dimensions 0 and 1 whose size is n. One row [1, T] of positions and a mask
    [T, T] hold no samples. A mask of each head [n * heads, T, T] has several rows of each.
    """
    shape = t.shape
    if t.layout != torch.strided or t.is_nested or not shape or not n:
        return None
    if shape[0] == n:
        return Layout(0)
    if len(shape) > 1 and shape[1] == n:
        is_mask = len(shape) == 2 and (t.is_floating_point() or t.dtype == torch.bool)
        return None if is_mask or (len(shape) == 2 and shape[0] == 1) else Layout(1)
    if len(shape) == 3 and shape[0] and shape[0] % n == 0 and n > 1:
        return Layout(0, several=shape[0] // n)
    return None
