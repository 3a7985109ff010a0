# SPDX-License-Identifier: Apache-2.0
"""What the layers share: rows into samples, the size of a probe, autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Link = tuple[Tensor, Tensor, Tensor]
"""An earlier use of a tied embedding: its ids [B, S] and its two link outputs, both [B, S, D]."""


def samples_first(x: Tensor, B: int, batch_dim: int) -> Tensor:
    """``x`` as [B, T, features]; rows are folded into their samples where there are more rows than
    samples.
    """
    if batch_dim == 1 and x.ndim > 2:
        x = x.transpose(0, 1)
    T = x.shape[:-1].numel() // B if B else 0
    return x.reshape(B, T, x.shape[-1])


def num_samples(probe: Tensor) -> int:
    """B of a probe [P, B + 2]."""
    return probe.shape[1] - 2


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a matrix product on this device; None while it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Backward computes in the dtypes that forward chose, inside or outside of the user's autocast
    block.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
