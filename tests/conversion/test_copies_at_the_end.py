# SPDX-License-Identifier: Apache-2.0
"""Copies of parameters where little shows whose they are: after the last module, in place, and in
passes that are computed again.
"""

from typing import Any

import pytest
import torch
from examples_of_models import B, D, T, said, squares
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast


class Gives(nn.Module):
    """A model that gives its loss, whose rows ``order`` moves before they meet a bare gain."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.up, self.gain, self.order = nn.Linear(D, D), nn.Parameter(torch.ones(D)), order

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.order(self.up(x_BTD)) * self.gain
        return (y * torch.linspace(0.5, 1.5, D)).square().sum()


ORDERS: dict[str, Any] = {
    "as they are": lambda x: x,
    "sequence first": lambda x: x.transpose(0, 1).reshape(-1, D),
    "turned": lambda x: x.flip(0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_that_gives_its_loss(order: str) -> None:
    """After the last module only the loss shows whose row a copy meets."""
    model, x = Gives(ORDERS[order]), torch.randn(B, T, D)
    gnsfast.convert(model, example=torch.randn(B, T, D))
    assert said(model, "gain").static == (order == "as they are")
    loop = loop_sqnorms(model, lambda m, batch: m(batch), x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        model(x).backward()
    assert_norms(norms, loop, names=set(norms))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(D, D), nn.Parameter(torch.tensor(0.8))

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.up(x_BTD)
        y *= self.gain
        return y


def test_a_number_times_half_precision_in_place() -> None:
    """A second product in the same memory would multiply twice."""
    x = torch.randn(B, T, D)
    model = gnsfast.convert(InPlace(), example=x)
    with pytest.raises(gnsfast.ObservationError, match="writes to a tensor of another dtype"):
        with gnsfast.per_sample_sqnorms(model, B), torch.autocast("cpu", torch.bfloat16):
            model(x)


def test_the_last_gain_of_a_checkpoint() -> None:
    """A recomputation ends with an exception of torch's own, which goes through the copies."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gain = nn.Linear(D, D), nn.Parameter(torch.randn(D))

        def forward(self, x_BTD: Tensor) -> Tensor:
            y: Tensor = self.up(x_BTD) * self.gain
            return y

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x_BTD: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.block, x_BTD, use_reentrant=False)
            return y

    x = torch.randn(B, T, D)
    model = gnsfast.convert(Checkpointed(), example=x)
    loop = loop_sqnorms(model, squares, x, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        squares(model, x).backward()
    assert_norms(norms, loop)
