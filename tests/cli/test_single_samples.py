# SPDX-License-Identifier: Apache-2.0
"""The demo's check in other metrics, against the gradients of all its single samples at once."""

import pytest
import torch
from torch import nn

from gnsfast.cli.run import Check
from gnsfast.cli.single_samples import SingleSamples
from gnsfast.noise_scale import DualNoiseScale, ModuleNoiseScale, NoiseScale

ENDS = ModuleNoiseScale(1.0, 1.0, 1.0, 1.0, 1.0)


def test_against_all_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9), eps=1e-3)
    data = torch.randn(31, 1, 4).double() + 1.0
    model(data).square().sum().backward()
    optimizer.step()
    found, rows = SingleSamples(model), []
    names = [name for name, _ in model.named_parameters()]
    with found.watched():
        for x in data:
            rows.append(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]))
    assert not any(p._backward_hooks for p in model.parameters())
    stacked = {n: torch.stack(g) for n, g in zip(names, zip(*rows))}
    sigma = sum(g.var(0).sqrt().sum() for g in stacked.values())
    norm = sum(g.mean(0).abs().sum() for g in stacked.values())
    halves = [{n: g[k::2].mean(0) for n, g in stacked.items()} for k in (0, 1)]
    a, b = halves
    least = sum((a[n].sign() * b[n] + b[n].sign() * a[n]).sum() / 2 for n in names)
    sign = found.estimate("sign", (), optimizer)
    assert sign.lower == pytest.approx(float(sigma / norm) ** 2)
    assert sign.upper == pytest.approx(float(sigma / least) ** 2)
    assert sign.lower < sign.noise_scale < sign.upper

    g = stacked["1.weight"]
    n = g - g.mean(0)
    covariance = (n @ n.mT).sum(0) / 30
    sigma, norm = torch.linalg.eigvalsh(covariance).sqrt().sum(), torch.linalg.svdvals(g.mean(0))
    spectral = found.estimate("spectral", ("0.weight",), optimizer)
    left_out = found.estimate("spectral", ("0.weight", "1.bias"), optimizer)
    assert spectral == left_out
    assert spectral.lower == pytest.approx(float(sigma / norm.sum()) ** 2)

    trace = square = 0.0
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        P = 1 / ((state["exp_avg_sq"] / (1 - 0.9 ** state["step"])).sqrt() + 1e-3)
        trace += (P * stacked[name].var(0)).sum()
        square += (P * (stacked[name].mean(0).square() - stacked[name].var(0) / 31)).sum()
    adam = found.estimate("adam", (), optimizer)
    assert adam.noise_scale == pytest.approx(float(trace / square))


@pytest.mark.parametrize("lower, upper, agrees", [(1, 3, True), (3, 9, True), (5, 9, False)])
def test_agreement(lower: float, upper: float, agrees: bool) -> None:
    """The intervals meet, or they do not."""
    dual = DualNoiseScale(3.0, lower, upper, 1.0, 1.0, 1.0, "sign", 5, (), {})
    scale = NoiseScale(
        **vars(ENDS), drift=False, updates=5, skipped=0, samples=5, per_module={}, sign=dual
    )
    check = Check(scale, ENDS, {"sign": ModuleNoiseScale(2.5, 2.0, 4.0, 1.0, 1.0)})
    assert check.agrees("sign") == agrees
    record = check.record()["others"]["sign"]
    assert record["agrees"] == agrees and record["estimate"]["upper"] == upper
