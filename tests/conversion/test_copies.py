# SPDX-License-Identifier: Apache-2.0
"""Parameters that a model uses by itself: each sample gets a copy where an example shows that its
gradient is the sample's.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples_of_models import B, D, T, assert_right, said, squares
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Scalar(nn.Module):
    """A bare parameter on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(D, D), nn.Parameter(torch.ones(1))

    def forward(self, x_BD: Tensor) -> Tensor:
        y: Tensor = self.gain * self.up(x_BD)
        return y


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
        self.layers = nn.ModuleList([Mixed(), Mixed()])
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


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return x + gain * self.up(x).relu()


@pytest.mark.parametrize("make", [Scalar, Vision, Streams])
def test_each_sample_has_copies(make: Any) -> None:
    model, x = make().double(), torch.randn(B, T, D, dtype=torch.float64)
    want = squares(model.eval(), x)
    gnsfast.convert(model, example=x)
    assert gnsfast.coverage(model).covered_fraction == 1
    assert {r.route for r in gnsfast.coverage(model).rows} <= {"copies", "linear", "layer_norm"}
    with gnsfast.per_sample_sqnorms(model, B):
        assert torch.equal(squares(model, x), want)
        squares(model, x).backward()
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
    gnsfast.convert(model, example=x)
    assert said(model, "1.bias").route == "copies"
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


def test_windows_are_folded() -> None:
    model, x = Windows(), torch.randn(B, T, D)
    gnsfast.convert(model, example=x)
    assert said(model, "table").route == "copies"
    assert_right(model, x)
    other = Windows(interleaved=True)
    gnsfast.convert(other, example=x)
    assert not said(other, "table").static
    assert_norms_of_the_covered(other, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_beside_half_precision(dtype: torch.dtype) -> None:
    """torch gives the samples' dtype, and multiplies by the unrounded number."""

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.003))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x + (1 - self.gain) * x.exp()

    model, x = Number(), torch.randn(B, T, D).to(dtype).requires_grad_()
    want = model(x)
    (dx,) = torch.autograd.grad(want.float().square().sum(), x)
    gnsfast.convert(model, example=x.detach())
    assert said(model, "gain").route == "copies"
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        y = model(x)
        y.float().square().sum().backward()
    assert y.dtype == dtype and torch.equal(y, want)
    torch.testing.assert_close(x.grad, dx, rtol=2e-2, atol=2e-2)
    loop = loop_sqnorms(model, lambda m, x: m(x).square().sum(), x.detach(), B)
    torch.testing.assert_close(norms["gain"].double(), loop["gain"], rtol=3e-2, atol=0.0)


def test_calls_share_their_copies() -> None:
    """Autograd adds up the calls before the norm is taken."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scalar()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.inner(x)))

    model, x = Twice(), torch.randn(B, D)
    gnsfast.convert(model, example=x)
    assert said(model, "inner.gain").route == "copies"
    assert_right(model, x)


class Matrix(nn.Module):
    """One parameter whose samples copies can tell, and one in a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.matrix = nn.Parameter(torch.ones(D)), nn.Parameter(torch.randn(D, D))
        self.up = nn.Linear(D, 20 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.gain * x @ self.matrix)


def test_only_some_have_copies() -> None:
    model, x = Matrix(), torch.randn(B, T, D)
    gnsfast.convert(model, example=x)
    assert said(model, "gain").route == "copies"
    row = said(model, "matrix")
    assert not row.static and "replay=['']" in row.reason
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    loop = loop_sqnorms(model, squares, x, B)
    assert_norms(norms, {n: loop[n] for n in loop if n != "matrix"})


class Turned(nn.Module):
    """Dimension 0 has as many entries as there are samples, but they are not the samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.gain, self.how = nn.Linear(D, D), nn.Parameter(torch.ones(D)), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.how == "sorted":
            order = x.detach().sum((1, 2)).argsort()
            y: Tensor = (self.gain * x[order])[order.argsort()]
            return y
        if self.how == "reversed":
            return torch.cat([self.gain * t for t in x.flip(0).split(len(x))]).flip(0)
        if self.how == "shared":
            return x + self.gain * torch.arange(1.0, T + 1, dtype=x.dtype)[:, None]
        if self.how == "in place":
            with torch.no_grad():
                self.gain.mul_(1.0)
            return x * self.gain
        return x + F.linear(x, self.gain.diag())


@pytest.mark.parametrize("how", ["sorted", "reversed", "shared", "in place", "product"])
def test_what_no_copy_can_tell(how: str) -> None:
    model, x = Turned(how), torch.randn(B, T, D)
    gnsfast.convert(model, example=x)
    assert said(model, "gain").route != "copies"
    assert_norms_of_the_covered(model, x)


def assert_norms_of_the_covered(model: nn.Module, x: Tensor) -> None:
    with gnsfast.per_sample_sqnorms(model, len(x)) as norms:
        squares(model, x).backward()
    loop = loop_sqnorms(model, squares, x, len(x))
    assert_norms(norms, {n: loop[n] for n in norms})


class Lengths(nn.Module):
    """Beyond three tokens it adds a table [T, D] that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * self.up(x)
        return x + self.gain * x[0].detach() if x.shape[1] == B else x


def test_another_use_than_the_examples_is_an_error() -> None:
    """In a batch of B tokens the table looks like samples."""
    model = Lengths()
    gnsfast.convert(model, example=torch.randn(B, T, D))
    assert_right(model, torch.randn(B, T, D))
    with pytest.raises(gnsfast.ObservationError, match=r"another way.*exclude=\['gain'\]"):
        with gnsfast.per_sample_sqnorms(model, B):
            squares(model, torch.randn(B, B, D)).backward()


def test_without_an_example_they_are_left_out_by_name() -> None:
    model, x = Streams(), torch.randn(B, T, D)
    model.drop.p = 0.0
    gnsfast.convert(model)
    row = said(model, "lambdas")
    assert not row.static and "convert(model, example=batch)" in row.reason
    assert_norms_of_the_covered(model, x)


def test_exclude_takes_the_names_of_parameters() -> None:
    model, x = Vision(), torch.randn(B, T, D)
    gnsfast.convert(model, example=x, exclude=["pos*", "up.bias"])
    left_out = {r.parameter for r in gnsfast.coverage(model).rows if not r.static}
    assert left_out == {"positions", "up.bias"}
    assert said(model, "up.bias").reason == "excluded by convert"
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    loop = loop_sqnorms(model, squares, x, B)
    assert_norms(norms, {n: loop[n] for n in loop if n not in left_out})


def test_a_model_that_gives_its_loss_names_a_parameter_to_leave_out() -> None:
    """Not its class, which is no path."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return (self.gain * x).square().sum()

    model, x = gnsfast.convert(Loss()), torch.randn(B, D)
    with pytest.raises(gnsfast.ObservationError, match=r"exclude=\['gain'\]"):
        with gnsfast.per_sample_sqnorms(model, B):
            model(x).backward()
    with pytest.raises(ValueError, match="no trainable parameter"):
        gnsfast.per_sample_sqnorms(gnsfast.convert(model, exclude=["gain"]), B)
    gnsfast.convert(model, example=x)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(x).backward()
    assert_norms(norms, loop_sqnorms(model, lambda m, x: m(x), x, B))
