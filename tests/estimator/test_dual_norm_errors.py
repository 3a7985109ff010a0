# SPDX-License-Identifier: Apache-2.0
"""What dual norms leave behind where something goes wrong, and the remedies that errors name."""

from typing import Any

import pytest
import torch
from noise_cases import N, draw, make
from torch import nn

import gnsfast
from gnsfast.estimator.dual_factors import Factors
from gnsfast.estimator.dual_norms import DualNorm

OPTIMIZER: Any = torch.optim.AdamW


def test_a_pass_that_raises() -> None:
    """In the block, and where opening it fails."""
    model, [(x, _)] = make(), draw(1)
    gns = gnsfast.GradientNoiseScale(model, metric="sign")
    with pytest.raises(ZeroDivisionError):
        with gns.update(N):
            model(x).sum().backward()
            raise ZeroDivisionError
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(gnsfast.ObservationError):
        with gns.update(N):
            pass  # no backward pass
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_half_without_a_gradient() -> None:
    """Rows of an embedding that only samples of one half have: the other half's share is zero, not
    the rounding of a difference, whose sign would be taken for a step.
    """
    dual = DualNorm.__new__(DualNorm)
    one = torch.ones(())
    of = Factors(one, one > 0, *[one] * 6, half=one / 2, total=one)
    half = torch.tensor([0.1, 0.1, 0.1])
    grad = torch.tensor([0.1 * (1 + 3e-7), 0.1 * (1 - 3e-7), 0.3])
    second = dual._parts(of, torch.zeros(3), half, grad)[-1]
    assert second.tolist() == pytest.approx([0.0, 0.0, 0.4], abs=0.0, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_parameter_without_variance(seed: int) -> None:
    """The bias of this loss has one gradient in all samples: it is in both bounds of ‖G‖."""
    torch.manual_seed(seed)
    model = nn.Linear(5, 2)
    gns = gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"])
    for x in torch.randn(30, 8, 5) + 1:
        with gns.update():
            for own in x.split(2):
                with gns.microbatch(2, scale=0.25):
                    (model(own).sum(1).mean() / 4).backward()
        model.zero_grad()
    sign, spectral = gns.compute().sign, gns.compute().spectral
    for found in (sign, spectral):
        assert found.lower <= found.noise_scale <= found.upper
    assert sign.grad_norm_lower <= 12.5 and sign.grad_norm_upper >= 11.5  # ‖G‖ is 12
