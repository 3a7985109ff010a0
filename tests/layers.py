# SPDX-License-Identifier: Apache-2.0
"""One layer against its torch twin and against the float64 loop."""

import copy
from typing import Any

import pytest
import torch
from made import Made
from oracle import assert_norms, loop_sqnorms, sample_of
from torch import Tensor, nn

import gnsfast


def weighted_loss(layer: nn.Module, batch: Any) -> Tensor:
    """A sum over samples in which every output has a weight of its own."""
    *inputs, r = batch
    return (layer(*inputs) * r).sum()


def assert_as_loop(
    model: nn.Module,
    batch: Any,
    B: int,
    loss: Any = weighted_loss,
    *,
    twin: nn.Module | None = None,
    run: Any = None,
    table: gnsfast.Table | None = None,
) -> None:
    """The norms of a backward pass are those of the loop, which takes ``twin``, or the model; the
    pass calls ``run``, or the model, and executes ``table``, if there is one.
    """
    loop = loop_sqnorms(model if twin is None else twin, loss, batch, B)
    with gnsfast.per_sample_sqnorms(model, B, table=table) as norms:
        loss(model if run is None else run, batch).backward()
    assert_norms(norms, loop)


def plain(layer: nn.Module) -> nn.Module:
    """The torch layer with the same parameters."""
    base = next(c for c in type(layer).__mro__ if c.__module__.startswith("torch.nn"))
    twin = copy.deepcopy(layer)
    twin.__class__ = base
    return twin


def scattered(layer: nn.Module) -> nn.Module:
    """Gains that are not all one, and running statistics that are not those of a new layer."""
    with torch.no_grad():
        for name, t in [*layer.named_parameters(), *layer.named_buffers()]:
            if t.is_floating_point():
                t.add_(torch.rand_like(t) if name == "running_var" else torch.randn_like(t))
    return layer


def assert_layer(
    layer: nn.Module,
    x: Tensor,
    B: int,
    *,
    batch_dim: int = 0,
    rtol: float = 1e-5,
    table: gnsfast.Table | None = None,
) -> None:
    """Closed: torch's bits. Open: torch's gradients, and the loop's norms for every sample."""
    twin = plain(layer)
    assert torch.equal(layer(x), twin(x))

    leaf, twin_leaf = (x.detach().requires_grad_(x.is_floating_point()) for _ in range(2))
    r = torch.randn_like(twin(x))
    weighted_loss(twin, (twin_leaf, r)).backward()
    with gnsfast.per_sample_sqnorms(layer, B, table=table) as norms:
        weighted_loss(layer, (leaf, r)).backward()
    if leaf.requires_grad:
        torch.testing.assert_close(leaf.grad, twin_leaf.grad)
    for p, q in zip(layer.parameters(), twin.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert p.grad.dtype == p.dtype
            torch.testing.assert_close(
                p.grad, q.grad, rtol=1e-5, atol=1e-5 * q.grad.abs().max().item()
            )
    assert_norms(norms, loop_sqnorms(twin, weighted_loss, (x, r), B, batch_dim=batch_dim), rtol)


def error_against_loop(norms: Any, loop: dict[str, Tensor]) -> float:
    """The worst sample's relative error over all parameters."""
    return max(((norms[n].double() - loop[n]).abs() / loop[n]).max().item() for n in norms)


def loop_errors_at_dtype(layer: nn.Module, batch: Any, B: int, loop: dict[str, Tensor]) -> float:
    """The worst relative error of the one-sample loop itself when run at the layer's own dtype."""
    worst = 0.0
    for b in range(B):
        loss = weighted_loss(layer, sample_of(batch, b))
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        for (n, _), g in zip(layer.named_parameters(), grads):
            error = (g.double().square().sum() - loop[n][b]).abs() / loop[n][b]
            worst = max(worst, error.item())
    return worst


def assert_half(layer: nn.Module, *inputs: Tensor) -> None:
    """Torch's bits, gradients in the parameters' dtype, and norms with at most twice the error of
    the one-sample loop in plain torch at the same dtype.
    """
    twin, B = plain(layer), len(inputs[0])
    batch = (*inputs, torch.randn_like(twin(*inputs)))
    loop = loop_sqnorms(twin, weighted_loss, batch, B)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = layer(*inputs)
        (y * batch[-1]).sum().backward()
    assert torch.equal(y, twin(*inputs))
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())
    assert error_against_loop(norms, loop) <= 2 * loop_errors_at_dtype(twin, batch, B, loop)


def assert_autocast(layer: nn.Module, *inputs: Tensor, rtol: float = 2e-2) -> None:
    """The bits of torch's autocast and float32 gradients, with backward in it and after it."""
    twin, B = plain(layer), len(inputs[0])
    batch = (*inputs, torch.randn_like(twin(*inputs), dtype=torch.float32))
    loop = loop_sqnorms(twin, weighted_loss, batch, B)
    for inside in (True, False):
        with gnsfast.per_sample_sqnorms(layer, B) as norms:
            with torch.autocast("cpu", torch.bfloat16):
                y, want = layer(*inputs), twin(*inputs)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                (y * batch[-1]).sum().backward()
        assert torch.equal(y, want) and y.dtype == want.dtype
        grads = [p.grad for p in layer.parameters()]
        assert all(g is not None and g.dtype == torch.float32 for g in grads)
        assert_norms(norms, loop, rtol)
        layer.zero_grad()


def assert_unbatched(layer: nn.Module, x: Tensor) -> None:
    """An input without a dimension of samples is one sample, and no other number of them."""
    loop = loop_sqnorms(plain(layer), lambda m, b: m(b[0]).square().sum(), x[None], 1)
    with gnsfast.per_sample_sqnorms(layer, 1) as norms:
        y = layer(x)
        y.square().sum().backward()
    assert torch.equal(y, plain(layer)(x))
    assert_norms(norms, loop)
    with pytest.raises(gnsfast.SampleShapeError, match="the block has 3 samples"):
        with gnsfast.per_sample_sqnorms(layer, 3):
            layer(x)


def of_frames(layer: nn.Module) -> nn.Module:
    """A layer that gets the frames of all samples as one batch, as the images of videos."""
    of = lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return Made(of, layer=layer)


def assert_folded(layer: nn.Module, x: Tensor) -> None:
    """Three consecutive rows of ``x`` are one sample."""
    model, B = of_frames(plain(layer)), len(x) // 3
    x = x.unflatten(0, (B, 3))
    batch = x, torch.randn_like(model(x))
    assert_as_loop(model, batch, B)


class Tied(nn.Module):
    """A tied language model of one block, biases and both norms."""

    def __init__(self, V: int = 23, D: int = 16) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.RMSNorm(D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm_1(x))))
        return self.norm_2(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def in_a_block(layer: nn.Module, x: Tensor, B: int) -> Tensor:
    with gnsfast.per_sample_sqnorms(layer, B):
        y: Tensor = layer(x)
        y.sum().backward()
    return y
