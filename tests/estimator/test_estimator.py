# SPDX-License-Identifier: Apache-2.0
"""``GradientNoiseScale`` against per-sample gradients, whatever scales, splits and stops it."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import N, check, draw, learn, make, one_update, through_a_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import gnsfast

ObservationError = gnsfast.ObservationError


def expected(model: nn.Module, updates: list[list[tuple[Tensor, Tensor]]]) -> tuple[float, float]:
    """tr Σ and |G|² from every single sample's gradient, in float64, averaged over updates."""
    model = copy.deepcopy(model).double()
    found = []
    for batches in updates:
        grads = [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        F.cross_entropy(model(x[None].double()), y[None]), list(model.parameters())
                    )
                ]
            )
            for xs, ys in batches
            for x, y in zip(xs, ys)
        ]
        g = torch.stack(grads)
        trace = g.var(0).sum()
        found.append((trace, g.mean(0).square().sum() - trace / len(g)))
    trace, grad_sqnorm = torch.tensor(found).mean(0).tolist()
    return trace, grad_sqnorm


def run(
    model: nn.Module,
    gns: gnsfast.GradientNoiseScale,
    updates: list[list[tuple[Tensor, Tensor]]],
    *,
    scale: float | None = None,
    factor: float = 1.0,
    reduction: str = "mean",
) -> gnsfast.NoiseScale:
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(len(x), scale=scale):
                    (factor * F.cross_entropy(model(x), y, reduction=reduction)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad()
    return gns.compute()


@pytest.mark.parametrize("source", ["update", "local"])
def test_one_microbatch(source: str) -> None:
    model, updates = make(), [draw(1) for _ in range(5)]
    gns = gnsfast.GradientNoiseScale(model, source=source)
    result = run(model, gns, updates)
    check(result, expected(model, updates))
    assert (result.updates, result.skipped, result.samples) == (5, 0, 5 * N)
    assert set(result.per_module) == {"0", "2", "3"}
    parts = result.per_module.values()
    assert sum(m.trace for m in parts) == pytest.approx(result.trace)
    assert sum(m.grad_sqnorm for m in parts) == pytest.approx(result.grad_sqnorm)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulation_is_one_large_batch(reduction: str) -> None:
    model, updates = make(), [draw(4) for _ in range(5)]
    gns = gnsfast.GradientNoiseScale(model, loss_reduction=reduction)
    factor = 1 / 4 if reduction == "mean" else 0.3
    result = run(model, gns, updates, scale=factor, factor=factor, reduction=reduction)
    check(result, expected(model, updates))


def test_the_ratio_needs_no_scale() -> None:
    """An unnamed common factor changes tr Σ and |G|², not the noise scale."""
    model, updates = make(), [draw(4) for _ in range(5)]
    result = run(model, gnsfast.GradientNoiseScale(model), updates, factor=0.25)
    trace, grad_sqnorm = expected(model, updates)
    assert result.noise_scale == pytest.approx(trace / grad_sqnorm, rel=1e-5)
    assert result.trace == pytest.approx(trace / 16, rel=1e-5)


def test_microbatches_of_unequal_size() -> None:
    """A sum loss keeps all samples equal; one sample alone is as good as any number."""
    model = make()
    updates = [[*draw(1, 5), *draw(1, 1), *draw(1, 2)] for _ in range(5)]
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    check(run(model, gns, updates, reduction="sum"), expected(model, updates))


def test_local_measures_each_microbatch_by_itself() -> None:
    model, updates = make(), [draw(4) for _ in range(5)]
    result = run(model, gnsfast.GradientNoiseScale(model, source="local"), updates)
    check(result, expected(model, [[batch] for batches in updates for batch in batches]))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_grad_scaler(unscale: bool, microbatches: int) -> None:
    """Its factor goes out of p and q, whether ``unscale_`` comes after the block or at its end; a
    skipped step is skipped.
    """
    model, updates = make(), [draw(microbatches) for _ in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    gns = gnsfast.GradientNoiseScale(model, source="update", grad_scaler=scaler)
    for k, batches in enumerate(updates):
        with gns.update():
            for x, y in batches:
                with gns.microbatch(N, scale=1 / microbatches):
                    loss = F.cross_entropy(model(x), y) / microbatches
                    scaler.scale(loss * math.inf if k == 3 else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    result = gns.compute()
    check(result, expected(model, [u for k, u in enumerate(updates) if k != 3]))
    assert (result.updates, result.skipped) == (5, 1)


def test_every_and_window() -> None:
    """Unmeasured updates are plain torch; the window holds the newest measured ones."""
    model, updates = make(), [draw(1) for _ in range(12)]
    gns = gnsfast.GradientNoiseScale(model, every=2, window=3)
    probes = []
    for batches in updates:
        ((x, y),) = batches
        with one_update(gns, N):
            probes.append(type(model[0].weight) is not nn.Parameter)
            F.cross_entropy(model(x), y).backward()
    assert probes == [True, False] * 6
    check(gns.compute(), expected(model, updates[6::2]))


def test_wrapped_window_is_oldest_first() -> None:
    """With decay the order counts: updates that left the window leave no trace."""
    updates, found = [draw(1) for _ in range(5)], []
    for own in (updates, updates[2:]):
        model = make()
        found.append(run(model, gnsfast.GradientNoiseScale(model, window=3, decay=0.5), own))
    assert found[0] == found[1]


def lengths_model() -> nn.Module:
    return nn.Linear(64, 1, bias=False)


@pytest.mark.second
@pytest.mark.parametrize("each", [False, True])
def test_token_mean_with_unequal_lengths(each: bool) -> None:
    """Lognormal lengths: tr Σ and |G|² within 5 % of the truth, by total and by sample.

    A sample of L tokens has the gradient L · (G + a + b / √L): noise of the sample and of tokens.
    """
    model, n = lengths_model(), 16
    gns = gnsfast.GradientNoiseScale(model, window=3000)
    G, own, token = 0.2, 0.5, 2.0
    lengths_KB = (3.5 + 0.6 * torch.randn(3000, n)).exp().ceil()
    for lengths in lengths_KB:
        noise = own * torch.randn(n, 64) + token * torch.randn(n, 64) / lengths[:, None].sqrt()
        with one_update(gns, n, tokens=lengths if each else int(lengths.sum())):
            # The weight's gradient is the input, summed over samples.
            (model(lengths[:, None] * (G + noise)).sum() / lengths.sum()).backward()
    L = lengths_KB.double()
    # n times the noise of a batch's token mean: E[L² v(L)] / E[L]², v(L) = 64 (own² + token² / L).
    trace = 64 * (own**2 * L.square().mean() + token**2 * L.mean()) / L.mean() ** 2
    result = gns.compute()
    assert result.trace == pytest.approx(trace.item(), rel=0.05)
    assert result.grad_sqnorm == pytest.approx(64 * G**2, rel=0.05)


def test_equal_lengths_change_nothing() -> None:
    model, updates = make(), [draw(2) for _ in range(5)]
    gns = gnsfast.GradientNoiseScale(model)
    for batches in updates:
        with gns.update():
            for x, y in batches:
                with gns.microbatch(N, tokens=7 * N, scale=0.5):
                    (0.5 * F.cross_entropy(model(x), y)).backward()
        model.zero_grad()
    check(gns.compute(), expected(model, updates))


def test_killed_and_resumed() -> None:
    """Bit-identical statistics through ``torch.save``, with the window wrapped around."""
    updates = [draw(2) for _ in range(10)]
    whole, first = make(), make()
    a = gnsfast.GradientNoiseScale(whole, window=4, every=2)
    b = gnsfast.GradientNoiseScale(first, window=4, every=2)
    run(whole, a, updates)
    run(first, b, updates[:5])
    again = make()
    c = gnsfast.GradientNoiseScale(again, window=4, every=2)
    c.load_state_dict(through_a_file(b.state_dict()))
    run(again, c, updates[5:])
    assert a.compute() == c.compute()
    for key, value in a.state_dict().items():
        other = c.state_dict()[key]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


def test_compiled_model() -> None:
    """One graph over changing updates, with the probes' addresses kept."""
    model, updates = make(), [draw(2) for _ in range(6)]
    reference = expected(model, updates)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    gns = gnsfast.GradientNoiseScale(model)
    result = run(compiled, gns, updates, scale=0.5, factor=0.5)
    check(result, reference)
    assert counter.frame_count == 1


def test_weights_that_move() -> None:
    """Training goes on below the estimator: the probes do not change a step."""
    data = draw(20)
    plain, probed = make(), make()
    results = []
    for model, measure in ((plain, False), (probed, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        gns = gnsfast.GradientNoiseScale(model, every=1 if measure else 100)
        for x, y in data:
            with gns.update(N):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(gns.compute())
    assert results[1].updates == 20
    for a, b in zip(plain.parameters(), probed.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would wait for a GPU's results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source", ["update", "local"])
def test_nothing_waits_for_the_device(source: str) -> None:
    model = make()
    scaler = torch.amp.GradScaler("cpu")
    gns = gnsfast.GradientNoiseScale(model, source=source, grad_scaler=scaler)
    learn(model)
    with NoWaiting():
        for batches in draw(2), draw(2), draw(1):  # batch number 8 is looked at again
            with gns.update():
                for x, y in batches:
                    with gns.microbatch(N, tokens=torch.full((N,), 3)):
                        scaler.scale(F.cross_entropy(model(x), y)).backward()
            model.zero_grad()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        gns.compute()


def test_float64() -> None:
    model, updates = make().double(), [draw(1) for _ in range(3)]
    gns = gnsfast.GradientNoiseScale(model, source="update")
    run(model, gns, [[(x.double(), y)] for [(x, y)] in updates])
    check(gns.compute(), expected(model, [[(x.double(), y)] for [(x, y)] in updates]))


def test_before_any_measurement() -> None:
    result = gnsfast.GradientNoiseScale(make()).compute()
    assert math.isnan(result.noise_scale) and not result.resolved
    assert (result.lower, result.upper, result.updates) == (0.0, math.inf, 0)
    assert "not measured yet" in str(result)


def test_printed() -> None:
    scale = gnsfast.ModuleNoiseScale(1234.56, 1000.0, 1500.0, 1.0, 1.0)
    assert str(scale) == "noise scale 1,235 samples (95 %: 1,000 to 1,500)"
    scale = gnsfast.ModuleNoiseScale(math.inf, 1000.0, math.inf, 1.0, -1.0)
    assert str(scale) == "noise scale at least 1,000 samples (95 %)"
