# SPDX-License-Identifier: Apache-2.0
"""Models of one layer each, for layers that need another input or output than [B, T, D]."""

import torch
from made import Made
from torch import nn

T, D, V = 4, 8, 7


def scale() -> nn.Module:
    return Made(lambda m, x: (x * m.scale).sin(), scale=torch.ones(D))


def gains() -> nn.Module:
    """Two gains, one a number, of which each sample has copies."""
    of = lambda m, x: (m.gain * x + m.gains[0] * x.exp() * m.gains[1].exp()).sin()
    return Made(of, gain=torch.ones(1), gains=torch.randn(2, D))


def form() -> nn.Module:
    return Made(lambda m, x: m.form(x, x.sin()), form=nn.Bilinear(D, D, 5))


def bags() -> nn.Module:
    """One bag a sample, of which each token sees the sum."""
    of = lambda m, ids: m.bags(ids)[:, None].expand(-1, T, -1)
    return Made(of, bags=nn.EmbeddingBag(V, D, mode="sum"))


def conv() -> nn.Module:
    return Made(lambda m, x: m.conv(x.mT).mT, conv=nn.Conv1d(D, 5, 3, padding=1))
