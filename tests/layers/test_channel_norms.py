# SPDX-License-Identifier: Apache-2.0
"""Group norm, instance norm, and batch norm by its running statistics."""

from collections.abc import Callable

import pytest
import torch
from layers import (
    assert_as_loop,
    assert_layer,
    error_against_loop,
    in_a_block,
    loop_errors_at_dtype,
    plain,
    scattered,
    weighted_loss,
)
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast
from gnsfast.functional import Plan

PLAIN = Plan()

C = 6
SPATIAL = {1: (7,), 2: (5, 3), 3: (3, 2, 4)}
Make = Callable[[], nn.Module]


def of_dims(d: int) -> dict[str, Make]:
    instance, batch = (getattr(gnsfast, f"{kind}Norm{d}d") for kind in ("Instance", "Batch"))
    return {
        "one group": lambda: gnsfast.GroupNorm(1, C),
        "groups": lambda: gnsfast.GroupNorm(3, C),
        "groups of one channel": lambda: gnsfast.GroupNorm(C, C, eps=1e-3),
        "instance": lambda: instance(C, affine=True),
        "instance, running means": lambda: instance(C, affine=True, track_running_stats=True),
        "instance, by running means": lambda: instance(
            C, affine=True, track_running_stats=True
        ).eval(),
        "batch": lambda: batch(C, eps=1e-3).eval(),
        "sync batch": lambda: gnsfast.SyncBatchNorm(C).eval(),
    }


LAYERS = [(d, name) for d in SPATIAL for name in of_dims(d)]
NORMS = ["groups", "instance", "batch"]


def make(name: str, d: int = 2) -> nn.Module:
    return scattered(of_dims(d)[name]())


def drawn(B: int, d: int = 2) -> Tensor:
    return torch.randn(B, C, *SPATIAL[d]) + torch.randn(C, *(1,) * d)


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize(("d", "name"), LAYERS)
def test_shapes(d: int, name: str, B: int) -> None:
    assert_layer(make(name, d), drawn(B, d), B)


@pytest.mark.parametrize(("d", "name"), LAYERS)
def test_torchs_bits_and_buffers(d: int, name: str) -> None:
    layer, x = make(name, d), drawn(4, d)
    twin = plain(layer)
    assert torch.equal(in_a_block(layer, x, 4), twin(x))
    for (key, ours), theirs in zip(layer.state_dict().items(), twin.state_dict().values()):
        assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("name", ["groups", "one group"])
def test_no_sample(name: str) -> None:
    assert_layer(make(name), drawn(0), 0)


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("name", ["batch", "groups"])
def test_no_position(name: str, frozen: str) -> None:
    layer = make(name, 1)
    for p in (p for n, p in layer.named_parameters() if n == frozen):
        p.requires_grad_(False)
    assert_layer(layer, torch.randn(4, C), 4)
    x = torch.randn(4, C)
    assert torch.equal(in_a_block(layer, x, 4), plain(layer)(x))


LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.parametrize("frozen", ["", "weight", "bias", "the input"])
@pytest.mark.parametrize("d", LAST)
@pytest.mark.parametrize("name", NORMS)
def test_channels_last(name: str, d: int, frozen: str) -> None:
    """The loop takes contiguous samples: torch's group norm, channels last, on a CPU, crashes in a
    backward pass without an input gradient, so plain torch makes one here.
    """
    layer, x, r = make(name, d), drawn(4, d), drawn(4, d)
    for p in (p for n, p in layer.named_parameters() if n == frozen):
        p.requires_grad_(False)
    twin, ours, theirs = plain(layer), *(x.to(memory_format=LAST[d]) for _ in range(2))
    ours.requires_grad_(frozen != "the input")
    want = twin(theirs.requires_grad_())
    (want.relu() * r).sum().backward()
    with gnsfast.per_sample_sqnorms(layer, 4) as norms:
        y = layer(ours)
        assert y.stride() == want.stride() and torch.equal(y, want)
        (y.relu_() * r).sum().backward()
    loop = loop_sqnorms(plain(layer), lambda m, b: (m(b[0]).relu() * b[1]).sum(), (x, r), 4)
    assert_norms(norms, loop)
    for t, u in ((ours, theirs), (layer.weight, twin.weight), (layer.bias, twin.bias)):
        if t.grad is not None:
            torch.testing.assert_close(t.grad, u.grad, rtol=1e-4, atol=1e-5)


ORDERS = {"contiguous": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "rows last": (2, 3, 1, 0)}


def laid_out(t: Tensor, order: str) -> Tensor:
    """``t`` with its dimensions in another order in memory, also where a size is 1."""
    dims = ORDERS[order]
    return t.permute(dims).contiguous().permute([dims.index(i) for i in range(4)])


@pytest.mark.parametrize("of_dy", ORDERS)
@pytest.mark.parametrize("of_x", ORDERS)
@pytest.mark.parametrize("name", NORMS)
def test_other_layouts(name: str, of_x: str, of_dy: str) -> None:
    """Contiguous tensors tell what is right for parameters: torch 2.13's batch norm of one row, or
    one column, is wrong on a CPU where input and gradient are laid out otherwise. The input's
    gradient is torch's own.
    """
    layer = make(name)
    for B, *size in ((1, 5, 3), (2, 16, 1), (2, 4, 3)):
        x, r = torch.randn(B, C, *size), torch.randn(B, C, *size)
        loop = loop_sqnorms(plain(layer), weighted_loss, (x, r), B)
        twin = plain(layer)
        twin(x.clone().requires_grad_()).backward(r)
        ours, theirs = (laid_out(x, of_x).requires_grad_() for _ in range(2))
        plain(layer)(theirs).backward(laid_out(r, of_dy))
        with gnsfast.per_sample_sqnorms(layer, B) as norms:
            layer(ours).backward(laid_out(r, of_dy))
        assert_norms(norms, loop)
        torch.testing.assert_close(ours.grad, theirs.grad)
        for p, q in zip(layer.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        layer.zero_grad()


@pytest.mark.parametrize("name", ["groups", "batch"])
def test_channels_last_in_half_precision(name: str) -> None:
    layer, x, r = make(name), drawn(4).bfloat16(), drawn(4).bfloat16()
    last = x.to(memory_format=torch.channels_last)
    for bfloat16 in (False, True):
        if bfloat16:
            layer.bfloat16()
        twin = plain(layer)
        loop = loop_sqnorms(twin, weighted_loss, (x, r), 4)
        with gnsfast.per_sample_sqnorms(layer, 4) as norms:
            with torch.autocast("cpu", torch.bfloat16, enabled=not bfloat16):
                y = layer(last)
                assert torch.equal(y, twin(last)) and y.dtype == twin(last).dtype
            (y * r).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == layer.weight.dtype
        assert error_against_loop(norms, loop) <= 2 * loop_errors_at_dtype(twin, (x, r), 4, loop)
        layer.zero_grad()


@pytest.mark.parametrize("name", NORMS)
def test_strided_input(name: str) -> None:
    assert_layer(make(name), drawn(4).mT, 4)
    assert_layer(make(name), drawn(1).expand(4, -1, -1, -1), 4)


def test_without_bias() -> None:
    assert_layer(scattered(gnsfast.GroupNorm(2, C, bias=False)), drawn(4), 4)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1),
        nn.BatchNorm2d(C),
        nn.ReLU(),
        nn.Conv2d(C, C, 3, groups=2),
        nn.GroupNorm(2, C),
        nn.InstanceNorm2d(C, affine=True),
        nn.Flatten(),
        nn.Linear(C * 9, 4),
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_model(compiled: bool) -> None:
    """Also of another number of samples, for which the compiler makes it a variable, and channels
    last.
    """
    model = scattered(cnn()).eval()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for B, last in ((3, False), (5, False), (5, True)):
        batch = torch.randn(B, 3, 5, 5), torch.randn(B, 4)
        if last:
            batch = batch[0].to(memory_format=torch.channels_last), batch[1]
        assert_as_loop(model, batch, B, run=run)
        assert gnsfast.coverage(model).covered_fraction == 1.0
        model.zero_grad()


class Residual(nn.InstanceNorm2d):
    """A subclass whose own part reaches torch's."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        y: Tensor = input + super()._apply_instance_norm(input)
        return y


class OwnInstance(nn.InstanceNorm2d):
    """Its own part does not reach torch's."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        return nn.functional.instance_norm(input, weight=self.weight, bias=self.bias)


class Own(nn.BatchNorm2d):
    """A forward of its own, as timm's batch norms have; frozen it can be replayed."""

    def forward(self, x: Tensor) -> Tensor:
        shape = 1, -1, 1, 1
        normed = (x - self.running_mean.view(shape)) * self.running_var.view(shape).rsqrt()
        return normed * self.weight.view(shape) + self.bias.view(shape)


@pytest.mark.parametrize(
    "layer", [Residual(C, affine=True), OwnInstance(C, affine=True), Own(C).eval()]
)
def test_subclasses(layer: nn.Module) -> None:
    batch = drawn(4), drawn(4)
    assert_as_loop(layer, batch, 4, twin=scattered(layer))


def by_hand(x: Tensor, w: Tensor, b: Tensor | None, probe: Tensor, plan: Plan = PLAIN) -> Tensor:
    def normalised(t: Tensor) -> Tensor:
        return nn.functional.group_norm(t, 2)

    y = normalised(x) * w.detach().view(-1, 1)
    y = y if b is None else y + b.detach().view(-1, 1)
    return gnsfast.functional.channel_norm(y, x, w, b, probe, plan, normalised=normalised)


def test_gradients_of_gradients_are_refused() -> None:
    w, probe = torch.randn(C, requires_grad=True), torch.zeros(1, 3 + 2, requires_grad=True)
    y = by_hand(torch.randn(3, C, 7), w, None, probe)
    (grad,) = torch.autograd.grad(y.square().sum(), [w], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
