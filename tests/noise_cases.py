# SPDX-License-Identifier: Apache-2.0
"""A small model with a noise scale, and data for it."""

import torch
from torch import Tensor, nn

import gnsfast

I, N = 6, 8


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(I, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))


def learn(model: nn.Module) -> None:
    """Show a first batch, which the host waits for."""
    with gnsfast.per_sample_sqnorms(model, N):
        model(torch.randn(N, I)).sum().backward()
    model.zero_grad()


def draw(count: int, n: int = N) -> list[tuple[Tensor, Tensor]]:
    """Mostly of one class, so that |G|² is far from zero."""
    return [(torch.randn(n, I), (torch.rand(n) < 0.1).long()) for _ in range(count)]
