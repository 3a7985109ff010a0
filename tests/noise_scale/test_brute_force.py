# SPDX-License-Identifier: Apache-2.0
"""The noise scale from single samples, the estimate's judge."""

import pytest
import torch
from torch import Tensor, nn

import gnsfast


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_equals_the_covariance_of_all_gradients() -> None:
    model, x = nn.Linear(4, 2), 1 + torch.randn(70, 1, 4)
    found = gnsfast.brute_force_noise_scale(model, loss_of, x, blocks=7)
    g = torch.stack(
        [
            torch.cat(
                [p.flatten() for p in torch.autograd.grad(loss_of(model, s), model.parameters())]
            ).double()
            for s in x
        ]
    )
    trace = g.var(0).sum().item()
    grad_sqnorm = g.mean(0).square().sum().item() - trace / len(g)
    # Pseudo-values correct the rest of the bias of U-statistics in blocks: exact for blocks of one.
    assert found.trace == pytest.approx(trace, rel=0.02)
    assert found.grad_sqnorm == pytest.approx(grad_sqnorm, rel=0.02)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.second
def test_interval_covers_a_known_noise_scale() -> None:
    """Gradients of a linear loss are the inputs: tr Σ = 100, |G|² = 4; 100 seeds."""
    hits = 0
    model = nn.Linear(100, 1, bias=False)
    for _ in range(100):
        x = 0.2 + torch.randn(320, 1, 100)
        found = gnsfast.brute_force_noise_scale(model, lambda m, s: m(s).sum(), x, blocks=16)
        hits += found.lower <= 25 <= found.upper
    assert hits >= 90


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="63 samples for 32 blocks"):
        gnsfast.brute_force_noise_scale(nn.Linear(2, 1), loss_of, torch.randn(63, 1, 2))
