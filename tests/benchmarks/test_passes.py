# SPDX-License-Identifier: Apache-2.0
"""What each pass by itself costs: the simulation has no bias, and agrees with the formula."""

import pytest
import torch
from torch import Tensor

import gnsfast
from benchmarks.studies import passes


@pytest.mark.parametrize(("count", "samples", "ratio"), [(2, 2, 1.0), (8, 4, 1.0), (64, 2, 0.25)])
def test_drawn(monkeypatch: pytest.MonkeyPatch, count: int, samples: int, ratio: float) -> None:
    monkeypatch.setattr(passes, "UPDATES", 40_000)
    local, update = passes.drawn(count, samples, ratio)
    for found in (local, update):
        assert found.mean() == pytest.approx(1, abs=4 * float(found.std()) / 200)
    expected = passes.expected(count, samples, ratio)
    assert float(local.var() / update.var()) == pytest.approx(expected, rel=0.05)


def spread(source: str, x_UKnI: Tensor) -> tuple[float, float]:
    """Mean and variance of |G|² over updates of a model whose gradient is a sample's mean."""
    model = torch.nn.Linear(x_UKnI.shape[-1], 1, bias=False)
    model.weight.data.zero_()
    gns = gnsfast.GradientNoiseScale(model, source=source, window=1)
    values = []
    for update in x_UKnI:
        with gns.update():
            for x in update:
                with gns.microbatch(len(x), scale=1 / len(update)):
                    (model(x).mean() / len(update)).backward()
        model.zero_grad()
        values.append(gns.compute().grad_sqnorm)
    found = torch.tensor(values)
    return float(found.mean()), float(found.var())


def test_estimator() -> None:
    """gnsfast itself pays the formula's price, with no bias."""
    torch.manual_seed(0)
    U, K, n, I = 400, 8, 4, 20
    truth = I / (K * n)  # of a noise scale of N
    x = torch.randn(U, K, n, I) + (truth / I) ** 0.5
    mean, local = spread("local", x)
    assert mean == pytest.approx(truth, abs=4 * (local / U) ** 0.5)
    assert local / spread("update", x)[1] == pytest.approx(passes.expected(K, n, 1.0), rel=0.3)
