# SPDX-License-Identifier: Apache-2.0
"""What Adam's metric cannot be measured with is refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import N, draw, make
from torch import Tensor, nn

import gnsfast


def measured(model: nn.Module, optimizer: Any, **options: Any) -> gnsfast.GradientNoiseScale:
    return gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer, **options)


def passes(model: nn.Module, gns: gnsfast.GradientNoiseScale, count: int = 1) -> None:
    """An update of so many passes."""
    with gns.update():
        for x, y in draw(count):
            with gns.microbatch(N):
                F.cross_entropy(model(x), y).backward()
    model.zero_grad()


def warm(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    [(x, y)] = draw(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_settings() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="metric must be 'adam', 'sign' or 'spectral', not 'sgd'"):
        gnsfast.GradientNoiseScale(model, metric="sgd", optimizer=optimizer)
    for options, why in (
        ({"metric": "adam"}, "needs the optimizer"),
        ({"optimizer": optimizer}, "Name the metric too"),
    ):
        with pytest.raises(ValueError, match=why):
            gnsfast.GradientNoiseScale(model, **options)
    with pytest.raises(ValueError, match="metric='adam' needs the gradient of the whole update"):
        measured(model, optimizer, source="local")


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RAdam, torch.optim.Adagrad])
def test_another_optimizer(cls: Any) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"0.weight is trained by {cls.__name__}"):
        passes(model, measured(model, cls(model.parameters(), lr=0.1)))


def test_a_parameter_that_the_optimizer_has_not() -> None:
    model = make()
    optimizer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(ValueError, match="0.weight is not among the optimizer's parameters"):
        passes(model, measured(model, optimizer))


class Quantized(Tensor):
    """A tensor that is something else inside."""


SECOND_MOMENTS = {
    "8 bits": (lambda v: v.to(torch.uint8), r"a Tensor of torch.uint8 \[10, 6\]"),
    "a subclass": (lambda v: v.as_subclass(Quantized), "a Quantized of torch.float32"),
    "a part": (lambda v: v[:5], r"\[5, 6\]"),
    "nothing": (lambda v: None, "has no exp_avg_sq and step"),
}


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_other_second_moments(name: str) -> None:
    """Named, and the next pass is as good as any."""
    change, match = SECOND_MOMENTS[name]
    model = make()
    optimizer = warm(model)
    state = optimizer.state[model[0].weight]
    kept, state["exp_avg_sq"] = state["exp_avg_sq"], change(state["exp_avg_sq"])
    gns = measured(model, optimizer)
    with pytest.raises(ValueError, match=f"of 0.weight .*{match}"):
        passes(model, gns)
    state["exp_avg_sq"] = kept
    model.zero_grad()
    passes(model, gns, 2)
    assert gns.compute().adam.updates == 1


def test_second_moments_spread_over_processes() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.consolidate_state_dict = lambda: None  # as ZeroRedundancyOptimizer has it
    with pytest.raises(ValueError, match="spreads the second moments"):
        passes(model, measured(model, optimizer))


def test_a_single_pass() -> None:
    """There is nothing to compare its gradient with."""
    model = make()
    gns = measured(model, warm(model))
    passes(model, gns)
    assert gns.compute().adam.updates == 0
    with pytest.raises(gnsfast.ObservationError, match="metric='adam' compares .* 1 pass on 1 pro"):
        passes(model, gns)
