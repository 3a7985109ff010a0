# SPDX-License-Identifier: Apache-2.0
"""How a tensor [B, T, N] of random numbers may lie in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda B, T, N, **how: torch.randn(B, T, N, **how),
    "expanded samples": lambda B, T, N, **how: torch.randn(1, T, N, **how).expand(B, T, N),
    "expanded tokens": lambda B, T, N, **how: torch.randn(B, 1, N, **how).expand(B, T, N),
    "tokens first": lambda B, T, N, **how: torch.randn(T, B, N, **how).transpose(0, 1),
    "features first": lambda B, T, N, **how: torch.randn(B, N, T, **how).mT,
    "every second feature": lambda B, T, N, **how: torch.randn(B, T, 2 * N, **how)[..., ::2],
    "packed": lambda B, T, N, **how: torch.randn(B, T, 3 * N, **how)[..., N : 2 * N],
    "part of a tensor": lambda B, T, N, **how: torch.randn(B + 1, T + 3, N + 5, **how)[
        1:, 2:-1, 1:-4
    ],
}
"""``how``: dtype and device."""
