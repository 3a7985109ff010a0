# SPDX-License-Identifier: Apache-2.0
"""Linear layers that compute in float8: torchao's, and the same pattern without it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples_of_models import said, squares
from oracle import assert_norms
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gnsfast

B, T, I, O = 4, 6, 32, 16


def scaled(t: Tensor, *_: Any) -> Tensor:
    """A cast by the largest number of the whole batch."""
    scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().max()
    return (t * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale


class Product(torch.autograd.Function):
    """It keeps the operands of its weight gradient, for the judge."""

    operands: tuple[Tensor, Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return scaled(x) @ scaled(w).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        x_NI, dy_NO = (scaled(t.flatten(0, 1)) for t in (x, dy))
        Product.operands = x_NI, dy_NO
        return scaled(dy) @ scaled(w), dy_NO.T @ x_NI


class Float8Linear(nn.Linear):
    config = SimpleNamespace(
        cast_config_grad_output_for_grad_weight=None, cast_config_input_for_grad_weight=None
    )

    def forward(self, input: Tensor) -> Tensor:
        return Product.apply(input, self.weight) + self.bias


Float8Linear.__module__ = float8.WHERE


def model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, I), nn.Tanh(), layer, nn.Tanh(), nn.Linear(O, 3))


def sqnorms_of(x_NI: Tensor, dy_NO: Tensor) -> Tensor:
    x_BTI, dy_BTO = x_NI.double().view(B, T, -1), dy_NO.double().view(B, T, -1)
    return torch.bmm(dy_BTO.mT, x_BTI).square().sum((1, 2))


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("example", [True, False])
def test_own(example: bool, batch_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are those of what each sample adds to the layer's gradient."""
    monkeypatch.setattr(float8, "cast", scaled)
    model = model_with(Float8Linear(I, O))
    x = torch.randn(B, T, 8) * torch.tensor([0.1, 1.0, 3.0, 10.0]).view(B, 1, 1)
    x = x.transpose(0, batch_dim)
    squares(model, x).backward()
    want = [p.grad for p in model.parameters()]
    x_NI, dy_NO = (
        t.unflatten(0, x.shape[:2]).transpose(0, batch_dim).flatten(0, 1) for t in Product.operands
    )
    model.zero_grad()
    gnsfast.configure(model, example=x if example else None, batch_dim=batch_dim)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    loop = {"2.weight": sqnorms_of(x_NI, dy_NO)}
    assert_norms({"2.weight": norms["2.weight"]}, loop)
    for p, grad in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-6)
    assert len(norms) == 6


def test_samples_of_an_example_do_not_meet_in_the_scale() -> None:
    x, layer = torch.randn(B, T, I), Float8Linear(I, O)
    assert not torch.allclose(layer(x)[:1], layer(x[:1]), rtol=1e-3)
    gnsfast.configure(layer, example=x)
    assert said(layer, "weight").reason.startswith("replayed: the backward pass runs one")


def test_rows_of_all_samples_are_refused() -> None:
    model = nn.Sequential(Float8Linear(I, O))
    with pytest.raises(gnsfast.ObservationError, match="0 .Float8Linear.*dimension of 4 samples"):
        with gnsfast.per_sample_sqnorms(model, B):
            model(torch.randn(B * T, I)).sum().backward()


@pytest.mark.parametrize("frozen", ["weight", "bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao(
    recipe: str, dtype: torch.dtype, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge takes the operands that torchao's last product had."""
    ao = pytest.importorskip("torchao.float8")
    config = ao.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True)
    model = ao.convert_to_float8_training(nn.Sequential(nn.Linear(I, O)).to(dtype), config=config)
    for name, p in model.named_parameters():
        p.requires_grad_(name != f"0.{frozen}")
    size = torch.tensor([1e-4, 1e-2, 1, 1], dtype=dtype)  # the first is coarse in the scale of all
    x = (torch.randn(B, T, I, dtype=dtype) * size.view(B, 1, 1)).requires_grad_()
    products, mm = [], torch.mm
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b: products.append((a, b)) or mm(a, b))
        squares(model, x).backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    dy_ON, x_NI = products[-1]
    loop = {"0.weight": sqnorms_of(x_NI, dy_ON.T)}
    y = model(x.detach()).detach().requires_grad_()
    (dy,) = torch.autograd.grad(squares(nn.Identity(), y), y)
    loop["0.bias"] = dy.double().sum(1).square().sum(1)
    model.zero_grad()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    assert_norms(norms, {name: loop[name] for name in want})
    assert all(torch.equal(p.grad, want[n]) for n, p in model.named_parameters() if n in want)
