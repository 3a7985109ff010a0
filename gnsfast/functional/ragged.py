# SPDX-License-Identifier: Apache-2.0
"""Whose rows a batch has, where its samples have unequal numbers of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.errors import AmbiguousRowsError


class RowMap:
    """Whose sample each of ``size`` rows is. In the ``order`` of the samples, which is None where
    the rows have it already, sample b has rows ``starts[b]`` to ``starts[b + 1]``. ``back`` is the
    reverse of ``order``. Slots after the last sample are empty. ``is_list``: the rows are those of
    several dimensions, as one list.
    """

    def __init__(
        self, starts: Tensor, size: int, order: Tensor | None = None, is_list: bool = False
    ) -> None:
        self.starts, self.size, self.order, self.is_list = starts, size, order, is_list
        self.back = None if order is None else order.argsort()

    def to(self, device: torch.device) -> "RowMap":
        moved = object.__new__(RowMap)
        for name, value in vars(self).items():
            is_moved = isinstance(value, Tensor)
            setattr(moved, name, value.to(device, non_blocking=True) if is_moved else value)
        return moved

    def owners(self) -> Tensor:
        """[size]: the sample of each row."""
        owner_N = documents_of_rows(self.starts, self.size)
        return owner_N if self.back is None else owner_N[self.back]

    def rows_of(self, t: Tensor, k: int) -> Tensor:
        """The rows of sample ``k`` in a tensor [size, ...]."""
        start, end = self.starts[k : k + 2].tolist()
        return t[start:end] if self.order is None else t[self.order[start:end].to(t.device)]


class Ragged(NamedTuple):
    """Whose rows a batch has: one map, or several for rows of several kinds. ``is_packed``: samples
    are documents, one after the other in the rows of the batch, which are one list.
    """

    maps: tuple[RowMap, ...]
    is_packed: bool

    @property
    def slots(self) -> int:
        """The number of samples, with empty ones."""
        return len(self.maps[0].starts) - 1

    def to(self, device: torch.device) -> tuple[RowMap, ...]:
        return tuple(each.to(device) for each in self.maps)

    @classmethod
    def packed(cls, starts: Tensor, num_samples: int, slots: int) -> "Ragged":
        """``cu_seqlens``, the ``starts`` of at least ``num_samples`` documents, in ``slots`` slots.

        Raises:
            ValueError: if ``starts`` is not on the CPU, does not hold integers, does not begin with
                0, decreases, or has fewer than ``num_samples`` documents. Further ones are padding.
        """
        _check_integers(starts, "cu_seqlens", "[documents + 1]")
        if len(starts) - 1 < num_samples:
            raise ValueError(
                f"cu_seqlens of shape {list(starts.shape)} holds too few documents "
                f"({len(starts) - 1}): num_samples is {num_samples}"
            )
        if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
            raise ValueError(
                "cu_seqlens must begin with 0 and not decrease. It holds the first row of each "
                f"document, and the end of the last. This one is {starts.tolist()[:8]}..."
            )
        padding = starts[-1:].expand(slots + 1 - len(starts))
        return cls((RowMap(torch.cat([starts, padding]), int(starts[-1]), is_list=True),), True)

    @classmethod
    def of_rows(cls, rows: Any, num_samples: int | None) -> "Ragged":
        """The ``rows=`` of a batch: the sample of each row [N], or several such maps. Tensors with
        a row for each sample, such as what a model pools, need no map.

        Raises:
            ValueError: if a map is not on the CPU, or does not hold integers from 0 to
                ``num_samples`` - 1.
            AmbiguousRowsError: if it says something else than another map, or than a row for each
                sample, of as many rows.
        """
        given = _named(rows)
        for name, owner_N in given:
            _check_integers(owner_N, name, "[N], the sample of each row")
        if not any(len(owner_N) for _, owner_N in given):
            raise ValueError("rows holds no row. Give a tensor [N] with the sample of each row.")
        if num_samples is None:
            num_samples = 1 + max(int(owner_N.max()) for _, owner_N in given if len(owner_N))
        owners: dict[int, Tensor] = {}
        names: dict[int, str] = {}
        for name, owner_N in given:
            N = len(owner_N)
            if N and not 0 <= int(owner_N.min()) <= int(owner_N.max()) < num_samples:
                raise ValueError(
                    f"{name} holds samples {int(owner_N.min())} to {int(owner_N.max())}, and "
                    f"num_samples is {num_samples}: give the sample of each row, from 0 to "
                    f"{num_samples - 1}. In a batch of torch_geometric this is batch.batch, and "
                    "num_samples is batch.num_graphs."
                )
            if N in owners and not torch.equal(owners[N], owner_N):
                raise AmbiguousRowsError(
                    f"{names[N]} and {name} have {N} rows both, of other samples, so the number "
                    "of rows does not tell which of them a tensor has. Append to one of them a row "
                    "that has no loss, such as a node without edges. GradientNoiseScale leaves "
                    "this update out."
                )
            owners[N], names[N] = owner_N.to(torch.int64), name
        one_each = torch.arange(num_samples, device="cpu")
        if not torch.equal(owners.setdefault(num_samples, one_each), one_each):
            raise AmbiguousRowsError(
                f"{names[num_samples]} has {num_samples} rows, as many as there are samples, in "
                "which sample b must then have row b: tensors that have one row for each sample "
                "cannot be told from it. Sort these rows by sample, or append a row that has no "
                "loss. GradientNoiseScale leaves this update out."
            )
        return cls(tuple(_sorted(owner_N, num_samples) for owner_N in owners.values()), False)


def ragged_of(
    cu_seqlens: Tensor | None, rows: Any, num_samples: int | None = None, multiple: int = 1
) -> Ragged | None:
    """Whose rows a batch has, by the arguments of a block; None where each sample is a row. The
    number of slots of documents is a ``multiple``. ``num_samples`` is by default that of all.
    """
    if cu_seqlens is not None and rows is not None:
        raise ValueError(
            "cu_seqlens and rows both say whose rows these are. cu_seqlens is for samples that lie "
            "one after the other, rows for any order: give one of them."
        )
    if cu_seqlens is not None:
        documents = max(len(cu_seqlens) - 1, 0)
        slots = -(-documents // multiple) * multiple
        return Ragged.packed(cu_seqlens, documents if num_samples is None else num_samples, slots)
    return None if rows is None else Ragged.of_rows(rows, num_samples)


def map_of(maps: Sequence[RowMap], shape: Sequence[int]) -> tuple[RowMap, int] | None:
    """The map of a tensor whose leading dimensions are ``shape``, and how many rows it has there
    for each of the map: the first dimension that is not 1 has its size, or in a list the first few
    together. None if they fit no map.
    """
    n = 1
    for k, size in enumerate(shape):
        n *= size
        for each in maps:
            if n == each.size and (each.is_list or n == size):
                inner = 1
                for other in shape[k + 1 :]:
                    inner *= other
                return each, inner
    return None


def _named(rows: Any) -> list[tuple[str, Any]]:
    """The maps of ``rows=`` with a name for messages."""
    if isinstance(rows, Mapping):
        return [(f"rows[{name!r}]", owner_N) for name, owner_N in rows.items()]
    if isinstance(rows, (list, tuple)) and any(isinstance(each, Tensor) for each in rows):
        return [(f"rows[{k}]", owner_N) for k, owner_N in enumerate(rows)]
    return [("rows", rows)]


def _check_integers(t: Any, name: str, what: str) -> None:
    """Raise unless ``t`` is a list of integers on the CPU."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a tensor {what}, not {type(t).__name__}")
    if t.device.type != "cpu":
        raise ValueError(
            f"{name} must be on the CPU, because every layer checks its rows against it and "
            "must not wait for the device. Keep a copy on the CPU where the batch is collated."
        )
    if t.ndim != 1 or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise ValueError(f"{name} must be integers {what}, not {t.dtype} {list(t.shape)}")


def _sorted(owner_N: Tensor, num_samples: int) -> RowMap:
    """The map of owners in any order."""
    ends_B = torch.bincount(owner_N, minlength=num_samples).cumsum(0)
    starts = torch.cat([ends_B.new_zeros(1), ends_B])
    in_order = bool((owner_N.diff() >= 0).all())
    return RowMap(starts, len(owner_N), None if in_order else owner_N.argsort(stable=True))


def documents_of_rows(starts: Tensor, N: int) -> Tensor:
    """[N]: the number of each row's document."""
    row_N = torch.arange(N, dtype=starts.dtype, device=starts.device)
    return torch.bucketize(row_N, starts[1:-1], right=True)


def cu_seqlens(position_ids: Tensor) -> Tensor:
    """Find where documents begin in packed rows, from positions that restart with each document.

    For one row it equals ``torch.nn.functional.pad((position_ids.flatten() == 0).nonzero()[:, 0],
    (0, 1), value=position_ids.numel())``.

    Args:
        position_ids: integers [N] or [rows, T], as Hugging Face's collators make them. A document
            begins at the start of each row, and where a position does not follow the one before.

    Returns:
        int32 [documents + 1]: FlashAttention's ``cu_seqlens``, with all rows as one list. On a GPU
        the call waits for the device.

    Raises:
        ValueError: for a tensor of another dtype or shape.

    >>> gnsfast.cu_seqlens(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]))
    tensor([ 0,  3,  5,  6, 10], dtype=torch.int32)
    """
    if position_ids.ndim not in (1, 2) or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids must be integers [N] or [rows, T], not {position_ids.dtype} "
            f"{list(position_ids.shape)}"
        )
    rows = position_ids.reshape(-1, position_ids.shape[-1])
    first = torch.ones_like(rows, dtype=torch.bool)
    first[:, 1:] = rows.diff(dim=1) != 1
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_full((1,), rows.numel())]).to(torch.int32)
