# SPDX-License-Identifier: Apache-2.0
"""Bilinear layers."""

from typing import Any

import pytest
import torch
from layers import assert_as_loop, plain, weighted_loss
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

SHAPES = {
    "rows": (4,),
    "tokens": (4, 7),
    "two dimensions of tokens": (4, 3, 2),
    "one sample": (1, 7),
    "no sample": (0, 7),
}


def batch_of(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, 5), torch.randn(*lead, 6), torch.randn(*lead, 3)


def assert_bilinear(layer: nn.Module, batch: Any, B: int, **options: Any) -> None:
    """Outputs and gradients, those of the inputs too, are torch's; norms are the loop's."""
    twin = plain(layer)
    *inputs, r = batch
    ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    weighted_loss(twin, (*theirs, r)).backward()
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = layer(*ours)
        (y * r).sum().backward()
    assert torch.equal(y, twin(*inputs))
    for t, want in zip([*ours, *layer.parameters()], [*theirs, *twin.parameters()]):
        torch.testing.assert_close(t.grad, want.grad, rtol=1e-4, atol=1e-5)
    assert_norms(norms, loop_sqnorms(twin, weighted_loss, batch, B, **options))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: tuple[int, ...], bias: bool) -> None:
    assert_bilinear(gnsfast.Bilinear(5, 6, 3, bias=bias), batch_of(*shape), shape[0])


def test_closed() -> None:
    layer, (x, y, _) = gnsfast.Bilinear(5, 6, 3), batch_of(4)
    assert torch.equal(layer(x, y), plain(layer)(x, y))


def test_sequence_first() -> None:
    layer = gnsfast.Bilinear(5, 6, 3)
    assert_bilinear(layer, batch_of(7, 4), 4, batch_dim=1)


def test_unbatched() -> None:
    layer, (x, y, r) = gnsfast.Bilinear(5, 6, 3), batch_of(1)
    loop = loop_sqnorms(plain(layer), weighted_loss, (x, y, r), 1)
    with gnsfast.per_sample_sqnorms(layer, 1) as norms:
        (layer(x[0], y[0]) * r[0]).sum().backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen(frozen: str) -> None:
    layer = gnsfast.Bilinear(5, 6, 3)
    getattr(layer, frozen).requires_grad_(False)
    assert_bilinear(layer, batch_of(4, 7), 4)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_same_input_twice(bias: bool) -> None:
    """A quadratic form: both of its gradients reach the input."""

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.form = nn.Linear(5, 5), nn.Bilinear(5, 5, 3, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            y: Tensor = self.form(h, h)
            return y.mul_(2.0)  # in place, as on torch's output

    model, batch = Quadratic(), (torch.randn(4, 7, 5), torch.randn(4, 7, 3))
    assert_as_loop(model, batch, 4)
    assert {row.route for row in gnsfast.coverage(model).rows} == {"linear", "bilinear"}


@pytest.mark.parametrize("wanted", [0, 1], ids=["first", "second"])
def test_gradient_of_one_input(wanted: int) -> None:
    layer, (x, y, r) = gnsfast.Bilinear(5, 6, 3), batch_of(4, 7)
    ours, theirs = ([t.clone() for t in (x, y)] for _ in range(2))
    for inputs in (ours, theirs):
        inputs[wanted].requires_grad_()
    (plain(layer)(*theirs) * r).sum().backward()
    with gnsfast.per_sample_sqnorms(layer, 4):
        (layer(*ours) * r).sum().backward()
    torch.testing.assert_close(ours[wanted].grad, theirs[wanted].grad)


def test_compiled() -> None:
    layer, batch = gnsfast.Bilinear(5, 6, 3), batch_of(4, 7)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_as_loop(layer, batch, 4, twin=plain(layer), run=run)


def test_gradients_of_gradients_are_refused() -> None:
    (x, y, _), w = batch_of(4), torch.randn(3, 5, 6, requires_grad=True)
    probe = torch.zeros(1, 4 + 2, requires_grad=True)
    z = gnsfast.functional.bilinear(x, y, w, None, probe)
    (grad,) = torch.autograd.grad(z.square().sum(), [w], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
