# SPDX-License-Identifier: Apache-2.0
"""Ragged batches: documents that are packed into the rows of a batch, which are one list of tokens,
and rows whose samples the user tells.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import reasons
from gnsfast.following.checkpoints import recomputing, saves_nothing
from gnsfast.following.layouts import ALONE, FIRST, RAGGED, UNKNOWN, Chosen, Layout, Place
from gnsfast.following.leaf import Leaf, Row
from gnsfast.following.owners import owners_of
from gnsfast.functional import RowMap, map_of
from gnsfast.torch_internals import dispatch_modes


def in_order(x: Tensor, layout: Layout, leaf: Leaf) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x`` with the rows of the batch first, so that tokens lie as documents count them, and the
    reverse for a tensor with the same tokens.
    """
    d = layout.dim
    if layout.interleaved and not d:
        rows = leaf.rows
        return x.unflatten(0, (-1, rows)).transpose(0, 1), lambda y: y.transpose(0, 1).flatten(0, 1)
    if d:
        return x.movedim(d, 0), lambda y: y.movedim(0, d).contiguous()
    return x, lambda y: y


class Segments(NamedTuple):
    """The rows of a use in the order of their samples: where those of each begin, with all rows of
    a kernel as one list, and the map that tells the order.
    """

    starts: Tensor
    rows: RowMap

    @classmethod
    def of(cls, shape: torch.Size, leaf: Leaf) -> "Segments | None":
        """Those of a tensor whose leading dimensions are ``shape``; None where it does not hold the
        rows of the batch.
        """
        rows = map_of(leaf.maps, shape)
        if rows is None:
            return None
        each, inner = rows
        return cls(each.starts if inner == 1 else each.starts * inner, each)

    def run(self, kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``kernel(x)``, which sees the rows sorted by sample."""
        order, back = self.rows.order, self.rows.back
        if order is None or back is None:
            return kernel(x)
        lead = leading(x.shape, self.rows.size)
        y = kernel(rows_at(x.flatten(0, lead - 1), order))
        if not y.ndim:  # a loss
            return y
        in_place: Tensor = rows_at(y, back).unflatten(0, x.shape[:lead])
        return in_place


def leading(shape: torch.Size, size: int) -> int:
    """How many leading dimensions hold so many rows."""
    return next(k for k in range(1, len(shape) + 1) if shape[:k].numel() == size)


def unmapped(function: str, data: Sequence[Tensor], leaf: Leaf) -> str:
    """Why the samples of ``data`` in a call are not known in a ragged batch."""
    is_packed = any(each.is_list for each in leaf.maps)
    reason = reasons.OTHER_TOKENS if is_packed else reasons.OTHER_ROWS
    return reason.text(
        function=function,
        shapes=", ".join(str([*t.shape]) for t in data),
        sizes=", ".join(str(each.size) for each in leaf.maps),
    )


def in_pass(place: Place, t: Tensor, leaf: Leaf) -> Place:
    """Where the samples of the open pass lie in ``t``, of which the table says ``place``."""
    if place != RAGGED:
        return place
    rows = next((each for each in leaf.maps if t.shape[:1] == (each.size,)), None)
    return UNKNOWN if rows is None or rows.is_list else Chosen(rows.owners())


def place_of(place: object, x: Tensor, leaf: Leaf) -> Layout | None:
    """Where the rows of the batch lie in ``x``, of which the table says ``place``, or nothing."""
    if isinstance(place, Layout):
        fits = place.fits(x.shape, leaf.rows) or leaf.rows == 1
        plain = place.dim == 0 or x.shape[place.dim] == leaf.rows
        plain &= place.interleaved <= 1
        return place if leaf.rows and fits and plain else None
    # Without a table only one row, or rows along dimension 0, are known to be in order.
    known = leaf.rows == 1 or (x.ndim and x.shape[0] == (leaf.rows or 1))
    return FIRST if place in (None, RAGGED) and known else None


def alone(t: Tensor, leaf: Leaf) -> Layout | None:
    """Where the samples lie in a tensor of which no table says it: nowhere else than in all of it,
    if there is one sample. None if there are several.
    """
    return ALONE if leaf.lanes == 1 and t.ndim else None


def owners(x: Tensor, leaf: Leaf, row: Row) -> Tensor | None:
    """The samples of rows that the data have chosen from those of the batch; None where it is not
    as in the table.
    """
    if not leaf.is_ragged and leaf.samples == 1:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for each in leaf.maps:
        of_rows = owners_of(x, each.size)
        if of_rows is not None and of_rows.per_sample:
            return each.owners()[of_rows.owner_N]
    chosen = None if leaf.is_ragged else owners_of(x, leaf.samples)
    if chosen is None or not chosen.per_sample:
        return None
    known = any(leaf.lengths.allows(k, chosen.per_sample) for k in row.chosen)
    return chosen.owner_N if known else None


def owners_to_save(x: Tensor, leaf: Leaf, row: Row) -> Tensor | None:
    """The same for a function that saves them for backward. There those that a checkpoint finds
    when it runs again take the place of these.
    """
    if dispatch_modes():
        return None  # a selective checkpoint keeps results of forward, whose rows lie otherwise
    owner_N = None if saves_nothing() else owners(x, leaf, row)
    if owner_N is None and (saves_nothing() or recomputing()):
        if recomputing():
            leaf.fail("the samples of its rows were not found when a checkpoint ran again")
        owner_N = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return owner_N


class _Rows(torch.autograd.Function):
    """``x[index_N]`` for rows that differ, which ``owners_of`` does not take for a choice of the
    data. It goes on behind ``before``, from which they were made.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_N: Tensor, before: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.rows = len(x)
        return x[index_N]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        return g.new_zeros(ctx.rows, *g.shape[1:]).index_copy_(0, index_N, g), None, None


rows_at: Callable[..., Tensor] = _Rows.apply


def run_padded(kernel: Callable[[Tensor], Tensor], x_NI: Tensor, chosen: Chosen, B: int) -> Tensor:
    """``kernel(x_NI)`` of rows that the data have chosen, which sees as many rows of each sample:
    those that are missing are zeros. In a checkpoint, whose first run does not know the samples,
    each gets as many as there are.
    """
    order_N, starts, N = chosen.order_N, chosen.starts(B), len(x_NI)
    T = N if saves_nothing() or recomputing() else int(starts.diff().max())
    numbers_N = torch.arange(N, device=x_NI.device)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = numbers_N - starts[chosen.owner_N[order_N]]
    x_BTI = x_NI.new_zeros(B, T, x_NI.shape[1]).index_put((chosen.owner_N, place_N), x_NI)
    return rows_at(kernel(x_BTI).flatten(0, 1), chosen.owner_N * T + place_N, x_NI)
