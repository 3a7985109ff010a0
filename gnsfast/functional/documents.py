# SPDX-License-Identifier: Apache-2.0
"""Finds where the documents of packed rows begin."""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Where documents begin in the rows of a batch, with all rows as one list.

    ``starts`` is [slots + 1]. Slots after the last document are empty. ``tokens`` is the end of the
    last document.
    """

    starts: Tensor
    tokens: int

    def to(self, device: torch.device) -> "Documents":
        return Documents(self.starts.to(device, non_blocking=True), self.tokens)


def document_slots(starts: Tensor, num_samples: int, slots: int) -> Documents:
    """``cu_seqlens``, the ``starts`` of at least ``num_samples`` documents, in ``slots`` slots.

    Raises:
        ValueError: if ``starts`` is not on the CPU, does not hold integers, does not begin with 0,
            decreases, or has fewer than ``num_samples`` documents. Further ones are padding.
    """
    if starts.device.type != "cpu":
        raise ValueError(
            "cu_seqlens must be on the CPU, because every layer checks its rows against it and "
            "must not wait for the device. Keep a copy on the CPU where the batch is collated."
        )
    if starts.ndim != 1 or starts.is_floating_point() or starts.dtype == torch.bool:
        raise ValueError(
            f"cu_seqlens must be integers [documents + 1], not {starts.dtype} {list(starts.shape)}"
        )
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
    return Documents(torch.cat([starts, padding]), int(starts[-1]))


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
