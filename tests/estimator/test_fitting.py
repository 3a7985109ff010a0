# SPDX-License-Identifier: Apache-2.0
"""Which noise scales fit an optimizer and a model, and when an estimator takes the optimizer."""

from typing import Any

import pytest
import torch
from adam_cases import Tied
from torch import nn

from gnsfast.estimator import GradientNoiseScale, fitting_metrics, optimizer_for


def stepped(kind: Any, model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    own = [p for p in model.parameters() if kind is not torch.optim.Muon or p.ndim == 2]
    optimizer: torch.optim.Optimizer = kind(own, lr=0.0)
    for _ in range(steps):
        for p in own:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return optimizer


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten())


@pytest.mark.parametrize(
    "make, kind, steps, fit",
    [
        (lambda: nn.Linear(3, 2), torch.optim.Adam, 1, ("adam", "sign")),
        (lambda: nn.Linear(3, 2), torch.optim.AdamW, 1, ("adam", "sign")),
        (lambda: nn.Linear(3, 2), torch.optim.AdamW, 0, ("sign",)),
        (lambda: nn.Linear(3, 2), torch.optim.RMSprop, 1, ("sign",)),
        (lambda: nn.Linear(3, 2), torch.optim.Muon, 1, ("spectral",)),
        (conv, torch.optim.AdamW, 1, ("adam", "sign")),
        (lambda: nn.Bilinear(3, 2, 2), torch.optim.AdamW, 1, ("adam", "sign")),
        (Tied, torch.optim.Muon, 1, ("spectral",)),
        (lambda: nn.LayerNorm(4), torch.optim.SGD, 1, ("sign",)),
    ],
)
def test_fitting_metrics(make: Any, kind: Any, steps: int, fit: tuple[str, ...]) -> None:
    """And the estimator measures what fits."""
    model = make()
    optimizer = stepped(kind, model, steps)
    assert fitting_metrics(model, optimizer) == fit
    GradientNoiseScale(model, metric=fit, optimizer=optimizer_for(fit, optimizer)).state_dict()


def test_optimizer_for() -> None:
    model = nn.Linear(3, 2, bias=False)
    adam, muon = stepped(torch.optim.AdamW, model), stepped(torch.optim.Muon, model)
    for given in ("adam", ["sign", "adam"], ("adam", "spectral")):
        assert optimizer_for(given, adam) is adam
    for given in (None, (), "sign", "adamw", "spectral", ["sign", "spectral"]):
        assert optimizer_for(given, adam) is None
    for given in ("spectral", ["sign", "spectral"]):
        assert optimizer_for(given, muon) is muon
    for given in (None, "sign", ["sign"]):
        assert optimizer_for(given, muon) is None
