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
    rows = x.shape[:-1].numel()
    T = rows // B if B else 0
    if T * B != rows:
        raise ValueError(f"{rows} rows of an input of shape {list(x.shape)} are not {B} samples")
    return x.reshape(B, T, x.shape[-1])


def samples_back(t: Tensor, shape: torch.Size, batch_dim: int) -> Tensor:
    """The reverse of ``samples_first``: [B, T, features] in the shape that the rows came in."""
    if batch_dim == 1 and len(shape) > 2:
        return t.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return t.reshape(shape)


def num_samples(probe: Tensor) -> int:
    """B of a probe [P, B + 2]."""
    return probe.shape[1] - 2


def check_probe(probe: Tensor, parameters: int) -> None:
    """A probe of another shape would be filled with something else than it says."""
    if probe.ndim != 2 or probe.shape[0] != parameters or probe.dtype != torch.float32:
        raise ValueError(
            f"probe must be float32 [{parameters}, B + 2], a row for each trainable parameter, not "
            f"{probe.dtype} {list(probe.shape)}: after a parameter was frozen, unfrozen or "
            "parametrized, call gnsfast.convert(model) again, outside of an open block"
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a matrix product of ``x``; None while it is off, and for
    float64, which it leaves alone.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Backward computes in the dtypes that forward chose, inside or outside of the user's autocast
    block.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
