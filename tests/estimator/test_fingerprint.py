# SPDX-License-Identifier: Apache-2.0
"""A large model, of whose gradients an update looks at a few: each one has its turn."""

from collections.abc import Callable

import pytest
import torch
import unseen
from torch import Tensor, nn

import gnsfast
from gnsfast.estimator.fingerprint import FEW, IN_TURN, WHOLE

N, LAYERS, ODD = 4, 40, 20
TURNS = -(-(LAYERS - FEW) // IN_TURN)


class Deep(nn.Module):
    """A kernel of its own takes the weight of layer ``ODD`` if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)

    def forward(self, x: Tensor, by_kernel: bool = False) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = unseen.linear(x, layer.weight) if by_kernel and k == ODD else layer(x)
        return x


def block(model: nn.Module, gns: gnsfast.GradientNoiseScale, by_kernel: bool = False) -> None:
    with gns.microbatch(N):
        model(torch.randn(N, 3), by_kernel).square().sum(1).mean().backward()


def begun(passes: int) -> tuple[Deep, gnsfast.GradientNoiseScale]:
    """The first updates, which look at all gradients, are over."""
    model = Deep()
    gns = gnsfast.GradientNoiseScale(model, source="global")
    for _ in range(WHOLE):
        for _ in range(passes):
            block(model, gns)
        gns.update()
        model.zero_grad()
    return model, gns


def test_each_gradient_has_its_turn() -> None:
    model = Deep()
    parameters = dict(model.named_parameters())
    prints = gnsfast.GradientNoiseScale(model)._start().prints
    looks = []
    for _ in range(WHOLE + TURNS):
        prints.open(first=True)
        looks.append({*prints.named})
    assert all(look == {*parameters} for look in looks[:WHOLE])
    assert all(len(look) <= FEW + IN_TURN for look in looks[WHOLE:])
    assert set().union(*looks[WHOLE:]) == {*parameters}
    prints.again()
    prints.open(first=True)
    assert {*prints.named} == {*parameters}


@pytest.mark.parametrize("layer", [0, 17, LAYERS - 1])
def test_a_gradient_that_is_never_zeroed_is_found_in_its_turn(layer: int) -> None:
    """As where an optimizer's ``zero_grad`` does not know the parameter."""
    model, gns = begun(1)
    name = f"layers.{layer}.weight"
    with pytest.raises(gnsfast.ObservationError, match=rf"{name} still has .*\n?.*zero_grad"):
        for _ in range(TURNS + 1):
            block(model, gns)
            gns.update()
            for other, p in model.named_parameters():
                if other != name:
                    p.grad = None


def halve(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def drop(p: nn.Parameter) -> None:
    p.grad = None


@pytest.mark.parametrize("change", [halve, drop])
def test_a_gradient_that_is_changed_after_each_pass_is_found_in_its_turn(
    change: Callable[[nn.Parameter], None],
) -> None:
    """It is one of many, between two micro-batches, in every update."""
    model, gns = begun(2)
    with pytest.raises(gnsfast.ObservationError, match="between two micro-batches"):
        for _ in range(TURNS + 1):
            block(model, gns)
            change(model.layers[23].weight)  # type: ignore[arg-type]
            block(model, gns)
            gns.update()
            model.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_no_probe_saw_is_looked_at_from_then_on(set_to_none: bool) -> None:
    model, gns = begun(1)
    gns.compute()
    for _ in range(2):  # in neither of them it has its turn
        block(model, gns, by_kernel=True)
        gns.update()
        model.zero_grad(set_to_none)
    with pytest.raises(gnsfast.ObservationError, match=r"layers\.20\.weight got a gradient"):
        gns.compute()
