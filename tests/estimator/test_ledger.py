# SPDX-License-Identifier: Apache-2.0
"""Updates whose arithmetic waits: the numbers are the same whenever it is done."""

import gc
import weakref
from typing import Any

import pytest
import torch
from noise_cases import one_update
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import gnsfast
from gnsfast.estimator import ledger
from gnsfast.noise_scale import loss_factors


def run(asked_every: int, updates: int, passes: int = 1, window: int = 64) -> gnsfast.NoiseScale:
    """Train; ask for the noise scale in between, each so many updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gns = gnsfast.GradientNoiseScale(model, window=window)
    for k in range(1, updates + 1):
        with gns.update():
            for _ in range(passes):
                with gns.microbatch(4, scale=1 / passes):
                    (model(torch.randn(4, 5)).square().sum(1).mean() / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        if k % asked_every == 0:
            gns.compute()
    return gns.compute()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("window", [3, 64])
def test_the_moment_does_not_matter(
    passes: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for after each update, now and then, or only at the end, when most updates have gone
    out of the window.
    """
    monkeypatch.setattr(ledger, "MOST", 10)
    each = run(1, 25, passes, window)
    assert each.updates == min(window, 25)
    assert run(7, 25, passes, window) == each == run(100, 25, passes, window)


def mixed(asked_every: int) -> gnsfast.NoiseScale:
    """Updates of all kinds in turn: of one pass and of two, unscaled, of other batch sizes, with
    tokens for each sample; under a gradient scaler whose factor changes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
    for k in range(1, 16):
        tokens = torch.tensor([3, 2, 4, 1]) if k % 5 == 0 else None
        n = 3 + k % 3 if tokens is None else 4
        with gns.update():
            for _ in range(1 + k % 2):
                with gns.microbatch(n, tokens=tokens):
                    weight = 1 / n if tokens is None else tokens[:, None] / 10
                    scaler.scale((model(torch.randn(n, 5)).square() * weight).sum()).backward()
            if k % 3 == 0:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if k % asked_every == 0:
            gns.compute()
    return gns.compute()


def test_updates_of_all_kinds_are_computed_together() -> None:
    one_by_one, together = mixed(1), mixed(100)
    assert one_by_one.updates == 15 and together == one_by_one
    assert together.per_module == one_by_one.per_module


class Late:
    """A device that is through with its copies after the third question."""

    asked = 0

    def query(self) -> bool:
        Late.asked += 1
        return Late.asked > 3

    def synchronize(self) -> None:
        Late.asked = 4


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates pile up while a copy is under way, and none is lost or counted twice."""
    want = run(100, 25)
    real = ledger.Transfer.__init__

    def slow(self: ledger.Transfer, what: object) -> None:
        real(self, what)
        Late.asked = 0
        self._copies.append(([], torch.zeros(0), Late()))

    monkeypatch.setattr(ledger, "MOST", 4)
    monkeypatch.setattr(ledger.Transfer, "__init__", slow)
    assert run(100, 25) == want


def test_flags_of_old_updates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward pass long ago is an error still, though the window has passed it."""
    monkeypatch.setattr(ledger, "MOST", 2)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer)
    gns = gnsfast.GradientNoiseScale(model, window=2)
    for twice in [True] + [False] * 9:
        with one_update(gns, 4):
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
    with pytest.raises(gnsfast.ObservationError, match="2 times"):
        gns.compute()


def test_changed_parameters_are_refused_until_reset() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    gns = gnsfast.GradientNoiseScale(model)

    def step() -> None:
        with one_update(gns, 6):
            model(torch.randn(6, 5)).square().mean().backward()

    step()
    model[0].weight = nn.Parameter(torch.randn(4, 5))
    for _ in range(3):
        with pytest.raises(gnsfast.ObservationError, match="Call gns.reset"):
            step()
    gns.reset()
    step()
    assert gns.compute().updates == 1


def test_an_interrupted_compute_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(100, 10)
    real, calls = ledger.Ledger.settle, 0
    scalars = loss_factors.microbatch_scalars

    def stops(*facts: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return scalars(*facts)

    def interrupted(self: ledger.Ledger) -> None:
        monkeypatch.setattr(ledger.Ledger, "settle", real)
        with monkeypatch.context() as inside:
            inside.setattr(loss_factors, "microbatch_scalars", stops)
            with pytest.raises(KeyboardInterrupt):
                self.settle()
        self.settle()

    monkeypatch.setattr(ledger.Ledger, "settle", interrupted)
    assert run(100, 10) == want and calls == 5


@pytest.mark.second
def test_estimators_and_models_are_freed() -> None:
    """Also the slabs of batch sizes that are long gone."""
    model = nn.Linear(4, 3)
    gns = gnsfast.GradientNoiseScale(model)
    slabs = weakref.WeakSet()
    for B in range(2, 22):
        with one_update(gns, B):
            model(torch.randn(B, 4)).square().mean().backward()
            slabs.add(gns._start().slab)
    gns.compute()
    gc.collect()
    assert len(slabs) <= 9, "eight are kept, and that of the arithmetic"
    weight = weakref.ref(model.weight)
    del model, gns
    gc.collect()
    assert weight() is None


def test_a_state_saved_under_inference_mode() -> None:
    """As Lightning does, before the first step."""
    model = nn.Linear(5, 4)
    gns = gnsfast.GradientNoiseScale(model)
    with torch.inference_mode():
        gns.state_dict()
    with gns.update(6):
        model(torch.randn(6, 5)).square().mean().backward()
    assert gns.compute().updates == 1
