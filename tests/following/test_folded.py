# SPDX-License-Identifier: Apache-2.0
"""Attention over a batch with a dimension of it folded in, [B * C, T, d], as of channels of a time
series or of the frames of a video: torch runs its output projection on rows [T * B * C, d].
"""

import copy
from typing import Any

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

D = 8


class Folded(nn.Module):
    """Attention over time, of each channel of [B, C, T, D]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(0, 1)
        if isinstance(self.layer, nn.MultiheadAttention):
            y: Tensor = self.layer(h, h, h, need_weights=False)[0]
        else:
            y = self.layer(h)
        return y.view_as(x)


class Axial(nn.Module):
    """Attention over the places of each frame of [B, T, S, D], then over time at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Folded(nn.MultiheadAttention(D, 2, batch_first=True))
        self.time = Folded(nn.MultiheadAttention(D, 2, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.space(x)
        return y + self.time(y.transpose(1, 2)).transpose(1, 2)


MODELS: dict[str, Any] = {
    "attention": lambda: Folded(nn.MultiheadAttention(D, 2, batch_first=True)),
    "no bias": lambda: Folded(nn.MultiheadAttention(D, 2, batch_first=True, bias=False)),
    "added keys": lambda: Folded(
        nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True, dropout=0.0)
    ),
    "layer": lambda: Folded(
        nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    ),
    "axial": Axial,
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, r = batch
    out: Tensor = (model(x) * r).square().sum()
    return out


def batch(B: int, C: int = 3, T: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(B, C, T, D), torch.randn(B, C, T, D)


def assert_right(model: nn.Module, data: tuple[Tensor, Tensor], **options: Any) -> None:
    plain = copy.deepcopy(model)
    B = len(data[0])
    with gnsfast.per_sample_sqnorms(model, B, audit="always", **options) as norms:
        loss(model, data).backward()
    loss(plain, data).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
        p.grad = None
    assert_norms(norms, loop_sqnorms(plain, loss, data, B))


@pytest.mark.parametrize("B", [1, 2, 5])
@pytest.mark.parametrize("gradients", ["fused", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_folded(name: str, gradients: str, B: int) -> None:
    assert_right(MODELS[name](), batch(B), gradients=gradients)


def test_other_sizes() -> None:
    """A longer series is as in the table. More channels are not: rows of other samples would be
    taken for those of one, so an error says which batch to learn from too.
    """
    model = MODELS["attention"]()
    first = batch(4)
    table = gnsfast.learn(model, first[0])
    assert table.covered_fraction == 1
    assert_right(model, batch(4, T=9), table=table)
    wider = batch(4, C=6, T=3)
    with pytest.raises(gnsfast.ObservationError, match="out_proj.*is not as in the table"):
        assert_right(model, wider, table=table)
    model.zero_grad()
    assert_right(model, wider, table=table | gnsfast.learn(model, wider[0]))
