# SPDX-License-Identifier: Apache-2.0
"""Models of one layer each, for layers that need another input or output than [B, T, D]."""

import torch
from torch import Tensor, nn

T, D, V = 4, 8, 7


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


class Gains(nn.Module):
    """Two gains, one a number, of which each sample has copies."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.gains = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(2, D))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x + self.gains[0] * x.exp() * self.gains[1].exp()).sin()


class Form(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(D, D, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x.sin())


class Bags(nn.Module):
    """One bag a sample, of which each token sees the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(V, D, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bags(ids)[:, None].expand(-1, T, -1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT
