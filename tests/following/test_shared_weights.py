# SPDX-License-Identifier: Apache-2.0
"""Weights that several modules share: their uses are joined."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, D = 4, 3, 5


def shared(first: nn.Module, second: nn.Module, joint: Callable[..., Tensor]) -> nn.Module:
    """Two modules with one weight, and a layer behind them."""
    second.weight = first.weight
    run = lambda m, x: m.last(joint(m.first, m.second, x))  # noqa: E731
    return Made(run, first=first, second=second, last=nn.Linear(D, 3))


def in_turn(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = second(first(x).tanh())
    return out


def dropped(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return in_turn(first, second, F.dropout(x, 0.5))


def beside(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = first(x) * second(x.sin())
    return out


def by_hand(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = second(x) + x @ first.weight + first.bias
    return out


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(D, D), in_turn, (B, D)),
    "linear of tokens": (lambda: nn.Linear(D, D), in_turn, (B, T, D)),
    "linear, beside each other": (lambda: nn.Linear(D, D), beside, (B, D)),
    "linear, once transposed": (lambda: nn.Linear(D, D), by_hand, (B, T, D)),
    "convolution": (lambda: nn.Conv1d(T, T, 1), in_turn, (B, T, D)),
    "gain": (lambda: nn.LayerNorm(D), in_turn, (B, T, D)),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_weights(name: str, compiled: bool) -> None:
    make, joint, shape = SHARED[name]
    model, x = shared(make(), make(), joint), torch.randn(shape)
    loop = loop_sqnorms(model, squares, x, B)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
            squares(run, x).backward()
        assert_norms(norms, loop)
    assert gnsfast.coverage(model).covered_fraction == 1


def test_shared_weights_behind_dropout() -> None:
    """Each use has random numbers of its own."""
    model, x = shared(nn.Linear(D, D), nn.Linear(D, D), dropped), torch.randn(B, D)
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        state = torch.get_rng_state()
        squares(model, x).backward()
    torch.set_rng_state(state)
    values = dict(model.named_parameters())
    y = model(x).square().sum(1)
    for b in range(B):
        own = torch.autograd.grad(y[b], [*values.values()], retain_graph=True)
        for name, g in zip(values, own):
            torch.testing.assert_close(norms[name][b], g.square().sum())
