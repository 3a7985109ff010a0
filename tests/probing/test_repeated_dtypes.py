# SPDX-License-Identifier: Apache-2.0
"""Parameters that a model uses several times, at half precision and under autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made import Made
from oracle import assert_norms, loop_sqnorms
from repeated_models import Again, B, D, T, Universal, V, square
from tiny_models import scattered
from torch import Tensor, nn

import gnsfast


def assert_as_near(
    norms: gnsfast.SampleNorms, model: nn.Module, x: Tensor, loss_of: Callable[..., Tensor]
) -> None:
    """No further from the loop in float64 than twice the plain loop of the same ``loss_of``."""
    want = torch.stack(list(loop_sqnorms(model, square, x, B).values())).sum(0)
    own = torch.zeros(B, dtype=torch.float64)
    for b in range(B):
        grads = torch.autograd.grad(loss_of(model, x[b : b + 1]), list(model.parameters()))
        own[b] = sum(g.double().square().sum() for g in grads)
    error = ((norms.total().double() - want).abs() / want).max()
    assert error <= 2 * ((own - want).abs() / want).max()


def test_bfloat16() -> None:
    model, x = Again(nn.Linear(D, D)).bfloat16(), torch.randn(B, 40, D).bfloat16()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        square(model, x).backward()
    assert_as_near(norms, model, x, square)
    assert model.layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("outside", [False, True], ids=["backward inside", "backward outside"])
def test_autocast(outside: bool) -> None:
    def cast(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x).float()
        return y.square().sum()

    model, ids = Universal(), torch.randint(0, V, (B, T))
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        value = cast(model, ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            value.backward()
    assert_as_near(norms, model, ids, cast)


def test_backward_under_autocast_of_a_forward_without_it() -> None:
    model, x = scattered(Again(nn.LayerNorm(D))), torch.randn(B, T, D)
    loop = loop_sqnorms(model, square, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        value = square(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            value.backward()
    assert_norms(norms, loop)


def test_calls_of_two_dtypes() -> None:
    """One call under autocast, one outside of it."""

    def mixed(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = m.layer(x).to(x.dtype)
        return m.layer(torch.tanh(y))

    model, x = Made(mixed, layer=nn.Linear(D, D)), torch.randn(B, T, D)
    loop = loop_sqnorms(model, square, x, B)
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        square(model, x).backward()
    assert_norms(norms, loop, rtol=3e-2)
