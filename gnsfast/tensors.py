# SPDX-License-Identifier: Apache-2.0
"""Helpers for tensors that every room may use."""

import torch
from torch import Tensor, nn


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients are summed in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def set_columns(t_RC: Tensor, column_RK: Tensor, value_RK: Tensor) -> None:
    """``t_RC.scatter_(1, column_RK, value_RK)``, with ``t_RC`` contiguous. Columns are not checked:
    one beyond the row would write to the next row.

    With deterministic algorithms torch copies the strides of a tensor of several dimensions to the
    GPU and waits for it, which a graph capture forbids. A tensor of one dimension avoids that.
    """
    first_R1 = torch.arange(len(t_RC), device=t_RC.device)[:, None] * t_RC.shape[1]
    t_RC.view(-1).scatter_(0, (first_R1 + column_RK).flatten(), value_RK.flatten())


PLAIN_TYPES = (Tensor, nn.Parameter)


def is_dtensor(t: object) -> bool:
    """Whether ``t`` is a DTensor, without importing torch.distributed to ask."""
    return type(t) not in PLAIN_TYPES and hasattr(t, "placements")


def is_wrapper(t: object) -> bool:
    """Whether a tensor is made of others and has operators of its own: sharded, quantized."""
    return hasattr(type(t), "__tensor_flatten__")
