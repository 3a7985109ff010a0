# SPDX-License-Identifier: Apache-2.0
"""What works in plain torch works while a block is open, with the right norms."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from repeated_models import B, D, T, check, square
from torch import Tensor, nn

import gnsfast


def residual(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    y += x
    return F.leaky_relu_(y)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(D, D), (B, T, D)),
        (nn.Linear(D, D), (B, D)),
        (nn.LayerNorm(D), (B, T, D)),
        (nn.RMSNorm(D), (B, T, D)),
        (nn.Conv1d(D, D, 3, padding=1), (B, D, T)),
        (nn.Conv2d(D, D, 3, padding=1), (B, D, T, T)),
        (nn.GroupNorm(2, D), (B, D, T)),
        (nn.PReLU(D), (B, D, T)),
    ],
)
def test_in_place_operations_on_outputs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(Made(residual, layer=layer), torch.randn(shape), square)


def scaled() -> nn.Module:
    """A scalar parameter, and an input that passes through."""
    return Made(lambda m, x: (m.scale * x, x), scale=torch.tensor(0.7), inner=nn.Linear(D, D))


@pytest.mark.parametrize("first", [0, 1])
def test_outputs_that_some_passes_use(first: int) -> None:
    """Autograd calls the hooks of a parameter with None, where a module has several outputs. A
    gradient that lies in ``.grad`` since an earlier pass did not arrive in this one.
    """
    model = nn.Sequential(nn.Linear(D, D), scaled())
    for outputs in (slice(first, 2), slice(0, 2), slice(1, 2), slice(0, 2)):
        x, loss = torch.randn(B, D), lambda m, x, used=outputs: sum(map(_squares, m(x)[used]))
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            loss(model, x).backward()
        loop = loop_sqnorms(model, loss, x, B)
        assert_norms(norms, {n: loop[n] for n in norms})
        assert (norms["1.scale"] == 0).all() == (outputs.start == 1)


def _squares(t: Tensor) -> Tensor:
    return t.square().sum()


@pytest.mark.parametrize("norm", [nn.LayerNorm(D), nn.RMSNorm(D)])
def test_sequence_first_norm_of_heads(norm: nn.Module) -> None:
    """[T, B, heads, D]: the input gradient comes back in its own order."""
    heads = lambda m, x: m.norm(m.q(x).unflatten(-1, (3, D))) * torch.arange(1, D + 1) ** 0.5
    model = Made(heads, q=nn.Linear(D, 3 * D), norm=norm).double()
    x, target = torch.randn(T, B, D).double(), torch.randn(T, B, 3, D).double()
    loss = lambda m, batch: (m(batch[0]) * batch[1]).square().sum()
    check(model, (x, target), loss, batch_dim=1)


def test_replay_leaves_buffers_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(D))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.gain * x

    model = Counting()
    with gnsfast.per_sample_sqnorms(model, B):
        square(model, torch.randn(B, D)).backward()
    assert model.steps == 1
    assert gnsfast.verify(model, square, torch.randn(B, D), loss_reduction="sum").ok
    assert model.steps == 1


def test_masked_outputs_of_a_replay() -> None:
    """Minus infinity equals itself; a mask's -1e9 does not excuse other outputs."""

    class Masked(nn.Module):
        def __init__(self, fill: float, p: float = 0.0) -> None:
            super().__init__()
            self.gain, self.fill, self.p = nn.Parameter(torch.ones(D)), fill, p

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(D, dtype=torch.bool)
            mask[3:] = True
            return (self.gain * F.dropout(x, self.p)).masked_fill(mask, self.fill)

    loss = lambda m, x: m(x).softmax(-1).square().sum()
    check(Masked(-torch.inf), torch.randn(B, D), loss)


def test_replayed_input_written_to_later() -> None:
    """Torch's own check of saved tensors speaks."""
    model = nn.PReLU(D)
    x = torch.randn(B, D)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with gnsfast.per_sample_sqnorms(model, B):
            y = model(x)
            x.mul_(2)
            y.sum().backward()


def test_frozen_weight_keeps_no_input() -> None:
    layer = gnsfast.Linear(D, D)
    layer.weight.requires_grad_(False)
    x = torch.randn(B, D)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        y = layer(x)
        x.zero_()
        y.sum().backward()
    torch.testing.assert_close(norms["bias"], torch.full((B,), float(D)))


def test_tokens_that_cancel() -> None:
    """Inputs almost alike and gradients that sum to zero: the Gram sum loses all its digits."""
    for offset in (100.0, 1e4):
        layer = nn.Linear(64, 64)
        x, dy = offset + torch.randn(B, T, 64), torch.randn(B, T, 64)
        batch = x, dy - dy.mean(1, keepdim=True)
        loss = lambda m, batch: (m(batch[0]) * batch[1]).sum()
        truth = loop_sqnorms(layer, loss, batch, B)["weight"]
        plain = torch.stack([(g.T @ a).square().sum() for a, g in zip(*batch)])
        model = copy.deepcopy(layer)
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            loss(model, batch).backward()
        error = lambda ours: ((ours.double() - truth).abs() / truth).max()  # noqa: B023
        assert error(norms["weight"]) < max(2 * error(plain), 1e-5)


def test_double_under_autocast() -> None:
    """torch leaves float64 alone."""
    model, x = gnsfast.Linear(D, D).double(), torch.randn(B, D).double()
    with torch.autocast("cpu"), gnsfast.per_sample_sqnorms(model, B):
        y = model(x)
        y.sum().backward()
    assert y.dtype == torch.float64 and torch.equal(y, F.linear(x, model.weight, model.bias))


@pytest.mark.parametrize("features", [(0, 3)])
def test_empty_layers(features: tuple[int, int]) -> None:
    layer = gnsfast.Linear(*features)
    with gnsfast.per_sample_sqnorms(layer, B) as norms:
        layer(torch.randn(B, T, features[0])).sum().backward()
    assert torch.equal(norms["weight"], torch.zeros(B))


def test_unused_tied_embedding() -> None:
    tokens, head = nn.Embedding(11, D), nn.Linear(D, 11, bias=False)
    head.weight = tokens.weight
    model = Made(lambda m, ids: m.head(m.tokens(ids).detach()), tokens=tokens, head=head)
    check(model, torch.randint(0, 11, (B, T)), square)


def test_integers_of_numpy() -> None:
    model = gnsfast.Linear(D, D)
    with gnsfast.per_sample_sqnorms(model, np.int64(B)) as norms:
        square(model, torch.randn(B, D)).backward()
    assert len(norms["weight"]) == B


class Bank(nn.Module):
    """A module that is falsy while it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


def test_a_layer_that_is_replaced_inside_of_a_falsy_module() -> None:
    model = nn.Sequential(Bank(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(model, 3) as norms:
            model(x).square().sum().backward()
        assert (norms["0.up.weight"] > 0).all()
        model[0].up = nn.Linear(4, 4)


def test_a_compiled_submodule() -> None:
    """``torch.compile`` of a part gives a module that has no length, and no truth value."""
    block = Made(lambda m, x: torch.tanh(m.up(x)), up=nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(block, backend="eager"))
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        model(torch.randn(3, 4)).square().sum().backward()
    assert all((norm_B > 0).all() for norm_B in norms.values())
