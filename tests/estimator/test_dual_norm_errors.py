# SPDX-License-Identifier: Apache-2.0
"""What dual norms leave behind where something goes wrong, and the remedies that errors name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import N, draw, make
from torch import nn

import gnsfast
from gnsfast.estimator.dual_factors import Factors
from gnsfast.estimator.dual_norms import DualNorm

OPTIMIZER: Any = torch.optim.AdamW


@pytest.mark.parametrize("metric", ["sign", "spectral", "adam", None])
def test_clipping_before_update(metric: str | None) -> None:
    """A given norm is no remedy where it would be refused."""
    model, [(x, y)] = make(), draw(1)
    own = OPTIMIZER(model.parameters()) if metric == "adam" else None
    gns = gnsfast.GradientNoiseScale(model, metric=metric, optimizer=own, source="global")
    for given in (False, True):
        with gns.microbatch(N):
            F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if given and metric is None:
            gns.update(grad_norm=norm)
            continue
        with pytest.raises((gnsfast.ObservationError, ValueError)) as error:
            gns.update(grad_norm=norm if given else None)
        assert given or ("grad_norm=" in str(error.value)) == (metric is None)
        assert given or "Call gns.update() before that" in str(error.value)
        model.zero_grad()


def test_a_pass_that_raises() -> None:
    """In the block, and where opening it fails."""
    model, [(x, _)] = make(), draw(1)
    gns = gnsfast.GradientNoiseScale(model, metric="sign")
    with pytest.raises(ZeroDivisionError):
        with gns.microbatch(N):
            model(x).sum().backward()
            raise ZeroDivisionError
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(gnsfast.ObservationError):
        with gns.microbatch(N):
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
        for own in x.split(2):
            with gns.microbatch(2, scale=0.25):
                (model(own).sum(1).mean() / 4).backward()
        gns.update()
        model.zero_grad()
    sign, spectral = gns.compute().sign, gns.compute().spectral
    for found in (sign, spectral):
        assert found.lower <= found.noise_scale <= found.upper
    assert sign.grad_norm_lower <= 12.5 and sign.grad_norm_upper >= 11.5  # ‖G‖ is 12
