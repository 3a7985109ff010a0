# SPDX-License-Identifier: Apache-2.0
"""Parameters that a model uses by itself: gains, tokens, positions and tables."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import B, D, T, assert_right, squares
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Vision(nn.Module):
    """A class token, positions and distilled gains, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, T + 3, D))
        self.register = nn.Parameter(torch.randn(D))
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, D)
        self.gamma = nn.Parameter(torch.full((D,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        x = torch.cat([self.register.expand(len(x), 1, D), x], 1)
        x = x + self.gamma * torch.tanh(self.up(self.norm(x)))
        return torch.cat([self.token.repeat(len(x), 2, 1), x], 1)


class Streams(nn.Module):
    """nanochat's coefficients of the residual stream, which blocks use too."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.skips = nn.Parameter(torch.zeros(2))
        self.softcap = nn.Parameter(torch.tensor(3.0))
        self.layers = nn.ModuleList([mixed(), mixed()])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for i, layer in enumerate(self.layers):
            x = self.lambdas[i] * x + self.skips[i] * first
            x = layer(x, torch.sigmoid(self.lambdas[2:])[i])
        for gain in self.lambdas:
            x = x * gain.to(x.dtype)
        x *= self.lambdas.mean()
        return self.drop(torch.tanh(x / self.softcap) * self.softcap)


def mixed() -> nn.Module:
    return Made(lambda m, x, gain: x + gain * m.up(x).relu(), up=nn.Linear(D, D))


@pytest.mark.parametrize("make", [Vision, Streams])
def test_bare_parameters(make: Any) -> None:
    model, x = make().double().eval(), torch.randn(B, T, D, dtype=torch.float64)
    want = squares(model, x)
    with gnsfast.per_sample_sqnorms(model, B):
        assert torch.equal(squares(model, x), want)
        squares(model, x).backward()
    assert gnsfast.coverage(model).covered_fraction == 1
    assert_right(model, x)
    assert_right(model, torch.randn(T, B, D, dtype=torch.float64), num_samples=T)


class NormAct(nn.BatchNorm2d):
    """timm's batch norm, with an activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        train = self.training
        own = self.running_mean, self.running_var, self.weight, self.bias
        return F.relu(F.batch_norm(x, *own, train, self.momentum, self.eps))


class GroupAct(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


@pytest.mark.parametrize("make", [lambda: NormAct(D), lambda: GroupAct(1, D)])
@pytest.mark.parametrize("frozen", [False, True])
def test_norms_of_channels_with_an_activation(make: Any, frozen: bool) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, D, 3), make()).eval(), torch.randn(B, 3, 6, 7)
    model[1].weight.requires_grad_(not frozen)
    want = model(x)
    for image in (x, x.to(memory_format=torch.channels_last)):
        with gnsfast.per_sample_sqnorms(model, B):
            y = model(image)
            y.sum().backward()
        torch.testing.assert_close(y, want)
        assert_right(model, image)


class Windows(nn.Module):
    """Swin's table of biases, of which each window of each sample gets the same rows."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(D, D), nn.Parameter(torch.randn(5, D))
        self.index, self.interleaved = torch.tensor([0, 4, 1]), interleaved

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.interleaved:
            x = x.unflatten(1, (-1, 3)).transpose(0, 1).flatten(0, 1)
            y = x * self.table[self.index].unsqueeze(0)
            return y.unflatten(0, (T // 3, -1)).transpose(0, 1).flatten(1, 2)
        x_NTD = x.unflatten(1, (-1, 3)).flatten(0, 1)
        y = x_NTD * self.table[self.index.view(-1)].unsqueeze(0)
        bias = self.table[:3, :3].mT.unsqueeze(0)[:, None]
        y = y + F.scaled_dot_product_attention(*(t[:, None] for t in (y, y, y)), bias)[:, 0]
        return y.view(x.shape)


@pytest.mark.parametrize("interleaved", [False, True])
def test_windows(interleaved: bool) -> None:
    assert_right(Windows(interleaved), torch.randn(B, T, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_beside_half_precision(dtype: torch.dtype) -> None:
    """torch gives the samples' dtype, and multiplies by the unrounded number."""
    of, gain = lambda m, x: m.gain * x + (1 - m.gain) * x.exp(), torch.tensor(1.003)
    model, x = Made(of, gain=gain), torch.randn(B, T, D).to(dtype).requires_grad_()
    want = model(x)
    (dx,) = torch.autograd.grad(want.float().square().sum(), x)
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        y = model(x)
        y.float().square().sum().backward()
    assert y.dtype == dtype and torch.equal(y, want)
    torch.testing.assert_close(x.grad, dx, rtol=2e-2, atol=2e-2)
    loop = loop_sqnorms(model, lambda m, x: m(x).square().sum(), x.detach(), B)
    torch.testing.assert_close(norms["gain"].double(), loop["gain"], rtol=3e-2, atol=0.0)


ORDERS: dict[str, Any] = {
    "as they are": lambda x: x,
    "sequence first": lambda x: x.transpose(0, 1).reshape(-1, D),
    "turned": lambda x: x.flip(0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_that_gives_its_loss(order: str) -> None:
    """Whose rows ``order`` moves before they meet a bare gain. Only ``run`` proves it."""

    def scaled(m: Any, x_BTD: Tensor) -> Tensor:
        y: Tensor = ORDERS[order](m.up(x_BTD)) * m.gain * torch.linspace(0.5, 1.5, D)
        return y

    gives = lambda m, x_BTD: scaled(m, x_BTD).square().sum()  # noqa: E731
    model, x = Made(gives, up=nn.Linear(D, D), gain=torch.ones(D)), torch.randn(B, T, D)
    with pytest.raises(gnsfast.ObservationError, match="no result of the model belongs"):
        with gnsfast.per_sample_sqnorms(model, B):
            model(x).backward()

    def run(x: Tensor) -> Tensor:
        y = scaled(model, x)
        return y.unflatten(0, (T, -1)).transpose(0, 1) if order == "sequence first" else y

    table = gnsfast.learn(model, x, run=run)
    if order == "turned":
        assert not table.proofs
        return
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        model(x).backward()
    assert_norms(norms, loop_sqnorms(model, lambda m, batch: m(batch), x, B))


def test_a_number_times_half_precision_in_place() -> None:
    def in_place(m: Any, x_BTD: Tensor) -> Tensor:
        y = m.up(x_BTD)
        y *= m.gain
        return y

    model, x = Made(in_place, up=nn.Linear(D, D), gain=torch.tensor(0.8)), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            y = model(x)
            y.float().square().sum().backward()
    assert torch.equal(y, want)
    loop = loop_sqnorms(model, lambda m, x: m(x).square().sum(), x, B)
    for name in norms:
        torch.testing.assert_close(norms[name].double(), loop[name], rtol=5e-2, atol=0.0)
