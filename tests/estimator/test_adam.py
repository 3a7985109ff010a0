# SPDX-License-Identifier: Apache-2.0
"""The noise scale under Adam's metric: tr(PΣ) and GᵀPG against the gradients of micro-batches in
float64.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adam_cases import EPS, Tied, Updates, adam, metric_of, unit_norms
from made import Made
from noise_cases import I, N, check, draw, every_draw, learn, make, through_a_file
from test_estimator import NoWaiting
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gnsfast
from gnsfast.estimator import adam_metric


def expected(model: nn.Module, updates: Updates, metric: dict[str, Tensor]) -> tuple[float, float]:
    """tr(PΣ) and GᵀPG of the micro-batches of each update, averaged over updates."""
    loss = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])
    found = []
    for batches in updates:
        norms, K, n = unit_norms(model, loss, batches, metric), len(batches), len(batches[0][0])
        trace = n * (norms[:-1].sum() - K * norms[-1]) / (K - 1)
        found.append((trace, norms[-1] - trace / (K * n)))
    trace, grad_sqnorm = torch.tensor(found).mean(0).tolist()
    return trace, grad_sqnorm


def warm(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 3
) -> torch.optim.Optimizer:
    """An optimizer that has made a few steps."""
    optimizer = optimizer or adam(model)
    for x, y in draw(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def run(
    model: nn.Module,
    gns: gnsfast.GradientNoiseScale,
    updates: Updates,
    scaler: torch.amp.GradScaler | None = None,
) -> gnsfast.AdamNoiseScale:
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(len(x), scale=1 / len(batches)):
                    loss = F.cross_entropy(model(x), y) / len(batches)
                    (loss if scaler is None else scaler.scale(loss)).backward()
        model.zero_grad()
    found = gns.compute().adam
    assert found is not None or gns._settings.optimizer is None
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("units", "lengths"),
    [([1, 1], None), ([2, 1], None), ([1, 2, 1], None), ([2, 1], [3, 1, 2]), ([1, 2], [1, 1, 4])],
)
def test_unbiased_over_all_draws(units: list[int], lengths: list[int] | None) -> None:
    """The mean of tr(PΣ) and GᵀPG over every draw of samples from a population of two or three,
    micro-batches of unequal numbers of samples, and of tokens, included, is that of the population.
    """
    n = sum(units)
    torch.manual_seed(0)
    x_M, r_M = torch.randn(2, 3 if n < 4 else 2, 3, dtype=torch.float64).unbind()
    g_M = torch.einsum("mo,mi->moi", r_M, x_M)
    model = nn.Linear(3, 3, bias=False).double()
    optimizer = adam(model)
    model.weight.grad = torch.rand(3, 3).double()
    optimizer.step()
    model.zero_grad()
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer, window=100)
    counts = every_draw(gns, model, x_M, r_M, units, lengths)
    found, [P] = gns.compute().adam, metric_of(model, optimizer).values()
    assert found is not None
    mean = g_M.mean(0)
    trace = (P * (g_M - mean).square()).sum((1, 2)).mean()
    weight = counts.square().sum() / n / counts.mean() ** 2
    check(found, ((trace * weight).item(), (P * mean.square()).sum().item()), 1e-9)


@pytest.mark.parametrize(
    ("unit", "microbatches", "options"),
    [
        ("sample", 2, {}),
        ("sample", 3, {"amsgrad": True}),
        ("micro_batch", 2, {"foreach": True}),
        ("sample", 4, {"fused": True}),
        ("micro_batch", 3, {"capturable": False}),
    ],
)
def test_against_micro_batches(unit: str, microbatches: int, options: dict[str, Any]) -> None:
    """Frozen weights, a frozen P, whatever steps; the Euclidean number stays what it was."""
    model, updates = make(), [draw(microbatches) for _ in range(6)]
    optimizer = warm(model, adam(model, **options))
    gns = gnsfast.GradientNoiseScale(model, unit=unit, metric="adam", optimizer=optimizer)
    found = run(model, gns, updates)
    metric = metric_of(model, optimizer)
    check(found, expected(model, updates, metric))
    plain = gnsfast.GradientNoiseScale(model, unit=unit)
    run(model, plain, updates)
    assert gns.compute().noise_scale == plain.compute().noise_scale
    assert found.updates == 6 and found.lower < found.noise_scale < found.upper
    assert f"under Adam's metric: {ratio(found)}, 6 updates" in str(gns.compute()).splitlines()


def ratio(found: gnsfast.ModuleNoiseScale) -> str:
    return gnsfast.ModuleNoiseScale.__str__(found)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool) -> None:
    model, updates = make(), [draw(2) for _ in range(6)]
    optimizer = warm(model)
    truth = expected(model, updates, metric_of(model, optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler, metric="adam", optimizer=optimizer)
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(N, scale=0.5):
                    scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
            if unscale:
                scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()  # no step: weights and P stay
        optimizer.zero_grad()
    assert gns.compute().adam is not None
    check(gns.compute().adam, truth)


def test_a_tie_is_read_once() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Tied(), nn.Flatten())
    updates: Updates = [
        [(torch.randint(0, 7, (N, 3)), (torch.rand(N) < 0.1).long()) for _ in range(2)]
        for _ in range(5)
    ]
    optimizer = adam(model)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    train(model, gns, optimizer, updates[:2])
    gns.reset()
    check(run(model, gns, updates), expected(model, updates, metric_of(model, optimizer)))


def test_a_constant_metric_is_the_euclidean_one() -> None:
    model, updates = make(), [draw(3) for _ in range(6)]
    optimizer = warm(model, torch.optim.Adam(model.parameters()))
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(0.04)
    unit = "micro_batch"
    gns = gnsfast.GradientNoiseScale(model, unit=unit, metric="adam", optimizer=optimizer)
    adams, whole = run(model, gns, updates), gns.compute()
    for name in ("noise_scale", "lower", "upper"):
        assert getattr(adams, name) == pytest.approx(getattr(whole, name), rel=1e-6)


def train(
    model: nn.Module,
    gns: gnsfast.GradientNoiseScale,
    optimizer: torch.optim.Optimizer,
    updates: Updates,
) -> None:
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(len(x), scale=1 / len(batches)):
                    (F.cross_entropy(model(x), y) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_and_its_first_update() -> None:
    """P is that of before each step, and the first update has none; nothing else changes."""
    model, plain, updates = make(), make(), [draw(2) for _ in range(7)]
    optimizer, other = adam(model), adam(plain)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    without = gnsfast.GradientNoiseScale(plain)
    truths = []
    for batches in updates:
        if metric := metric_of(model, optimizer):
            truths.append(expected(model, [batches], metric))
        train(model, gns, optimizer, [batches])
        train(plain, without, other, [batches])
    result = gns.compute()
    assert (result.updates, result.skipped) == (7, 0)
    assert result.adam is not None and result.adam.updates == 6
    trace, grad_sqnorm = torch.tensor(truths).mean(0).tolist()
    check(result.adam, (trace, grad_sqnorm))
    assert without.compute().adam is None
    assert result.noise_scale == pytest.approx(without.compute().noise_scale, rel=1e-4)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_before_a_first_measurement() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=adam(model))
    assert gns.compute().adam is None
    found = run(model, gns, [draw(2)])
    assert math.isnan(found.noise_scale) and found.updates == 0
    assert "Adam's metric: noise scale not measured yet" in str(gns.compute())


def test_a_parameter_that_comes_later() -> None:
    """Without a gradient so far it has no v: it counts as zero until it has a gradient, which makes
    one update without a measurement.
    """
    model = nn.ModuleDict({"a": nn.Linear(I, 3), "b": nn.Linear(I, 3)})
    optimizer = adam(model)
    x, _ = draw(1)[0]
    table = gnsfast.learn(model, x, run=lambda x: model["a"](x) + model["b"](x))
    gns = gnsfast.GradientNoiseScale(model, table, metric="adam", optimizer=optimizer)
    counts = []
    for used in ("a", "a", "ab", "ab"):
        with gns.update():
            for x, y in draw(2):
                with gns.microbatch(N, scale=0.5):
                    (F.cross_entropy(sum(model[name](x) for name in used), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(gns.compute().adam.updates)
    assert counts == [0, 1, 1, 2]


def test_killed_and_resumed() -> None:
    updates = [draw(2) for _ in range(8)]
    results = []
    for stop in (8, 4):
        model = make()
        optimizer = adam(model)
        gns = gnsfast.GradientNoiseScale(model, window=4, metric="adam", optimizer=optimizer)
        train(model, gns, optimizer, updates[:stop])
        if stop < 8:
            states = through_a_file([t.state_dict() for t in (model, optimizer, gns)])
            model = make()
            optimizer = adam(model)
            gns = gnsfast.GradientNoiseScale(model, window=4, metric="adam", optimizer=optimizer)
            for t, state in zip((model, optimizer, gns), states):
                t.load_state_dict(state)
            train(model, gns, optimizer, updates[stop:])
        results.append(gns)
    assert results[0].compute() == results[1].compute()
    assert torch.equal(results[0].state_dict()["ring"], results[1].state_dict()["ring"])
    with pytest.raises(ValueError, match="metric='adam', but this estimator has metric=None"):
        gnsfast.GradientNoiseScale(make(), window=4).load_state_dict(results[0].state_dict())


def test_other_functions() -> None:
    """Attention and convolutions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv1d(2, 4, 3), nn.MultiheadAttention(4, 2)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x.view(-1, 2, 3)).permute(2, 0, 1)
            y: Tensor = self.head(self.attention(h, h, h, need_weights=False)[0][0])
            return y

    torch.manual_seed(1)
    model, updates = Model(), [draw(2) for _ in range(5)]
    optimizer = warm(model)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    found = run(model, gns, updates)
    check(found, expected(model, updates, metric_of(model, optimizer)))


def test_compiled_model() -> None:
    model, updates = make(), [draw(2) for _ in range(4)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = adam(model)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    train(compiled, gns, optimizer, updates[:1])
    gns.reset()
    truth = expected(model, updates, metric_of(model, optimizer))
    check(run(compiled, gns, updates), truth)
    assert counter.frame_count == 1


def test_checkpointed_activations() -> None:
    model, updates = make(), [draw(2) for _ in range(4)]
    optimizer = warm(model)
    truth = expected(model, updates, metric_of(model, optimizer))
    first = model[:3]
    head, model[3] = model[3], nn.Identity()
    checkpointed = lambda m, x: checkpoint(m.inner, x, use_reentrant=False)
    again = nn.Sequential(Made(checkpointed, inner=first), head)
    gns = gnsfast.GradientNoiseScale(again, metric="adam", optimizer=optimizer)
    check(run(again, gns, updates), truth)


def test_nothing_waits_for_the_device() -> None:
    model = make()
    optimizer = warm(model)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    learn(model)
    with NoWaiting():
        with gns.update():
            for x, y in draw(4):
                with gns.microbatch(N):
                    F.cross_entropy(model(x), y).backward()


def test_a_long_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is weighed piece by piece, laid out as v or not."""
    monkeypatch.setattr(adam_metric, "WEIGHED", 40)
    g, v, constants = torch.randn(7, 30), torch.rand(30, 7).T, torch.tensor([1.5, EPS])
    want = (g.double().square() / (v.double().sqrt() * 1.5 + EPS)).sum()
    for shape in ((7, 30), (210,), (7, 5, 6)):
        found = adam_metric.metric_sqnorm(g.view(shape), v.reshape(shape), constants)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
