# SPDX-License-Identifier: Apache-2.0
"""Updates whose arithmetic waits: the numbers are the same whenever it is done."""

import gc
import weakref
from typing import Any

import pytest
import torch
import unseen
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
        for _ in range(passes):
            with gns.microbatch(4, scale=1 / passes):
                (model(torch.randn(4, 5)).square().sum(1).mean() / passes).backward()
        gns.update()
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
    """Updates of all kinds in turn: of one pass and of two, with a norm, of other batch sizes, with
    tokens for each sample; under a gradient scaler whose factor changes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
    for k in range(1, 16):
        tokens = torch.tensor([3, 2, 4, 1]) if k % 5 == 0 else None
        norms, n = torch.zeros(()), 3 + k % 3 if tokens is None else 4
        for _ in range(1 + k % 2):
            with gns.microbatch(n, tokens=tokens):
                weight = 1 / n if tokens is None else tokens[:, None] / 10
                scaler.scale((model(torch.randn(n, 5)).square() * weight).sum()).backward()
            norms = torch.stack([p.grad.double().norm() for p in model.parameters()])
        gns.update(grad_norm=norms.norm() if k % 3 == 0 else None)
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


def test_parameters_are_audited_in_turns() -> None:
    """A weight that a kernel takes too is found, at the latest after all others."""
    layers = [nn.Linear(3, 3, bias=False) for _ in range(80)]
    for layer in layers:  # or gradients vanish
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers)
    gns = gnsfast.GradientNoiseScale(model)
    x = torch.randn(4, 3)
    for passes in range(1, 4):
        with one_update(gns, 4):
            (model(x) + unseen.linear(x, model[70].weight)).square().sum(1).mean().backward()
        if passes < 3:
            gns.compute()
    with pytest.raises(gnsfast.ObservationError, match=r"70.weight: .*the part that was measured"):
        gns.compute()


class Both(nn.Module):
    """A kernel of its own takes its head's weight too, but not in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(4, 4), nn.Linear(4, 2, bias=False)
        with gnsfast.per_sample_sqnorms(self, 5):
            self(torch.randn(5, 4), both=False).sum().backward()
        self.zero_grad()

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y: Tensor = self.h(self.a(x))
        return y + unseen.linear(x, self.h.weight) if both else y


def test_a_pass_that_overflows_is_no_audit() -> None:
    """Half precision begins so: the scaler skips the first step."""
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = GradScaler("cpu", init_scale=1e30, backoff_factor=1e-27)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
    for _ in range(6):
        with gns.microbatch(5):
            scaler.scale(1e10 * model(torch.randn(5, 4)).square().mean()).backward()
        gns.update()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match=r"h\.weight: .*the part that was measured"):
        gns.compute()


def test_a_pass_that_is_dropped_is_no_audit() -> None:
    """By discard() between two blocks; nor is a pass without a gradient of the parameter."""
    model = Both()
    gns = gnsfast.GradientNoiseScale(model)
    for k in range(6):
        with gns.microbatch(5):
            model.a(torch.randn(5, 4)).sum().backward() if k == 1 else model(
                torch.randn(5, 4)
            ).square().mean().backward()
        gns.discard() if k == 0 else gns.update()
        model.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match=r"h\.weight: .*the part that was measured"):
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


def test_halved_gradients_of_half_precision_are_seen() -> None:
    """Their norm is taken in float32: in float16 it overflows."""
    model = nn.Linear(64, 64).half()
    gns = gnsfast.GradientNoiseScale(model, source="global")
    with gns.microbatch(8):
        (1e4 * model(torch.randn(8, 64).half()).sum(1).mean()).backward()
    for p in model.parameters():
        p.grad.data.mul_(0.5)
    gns.update()
    with pytest.raises(gnsfast.ObservationError, match="changed after the backward"):
        gns.compute()


def test_a_state_saved_under_inference_mode() -> None:
    """As Lightning does, before the first step."""
    model = nn.Linear(5, 4)
    gns = gnsfast.GradientNoiseScale(model)
    with torch.inference_mode():
        gns.state_dict()
    with gns.microbatch(6):
        model(torch.randn(6, 5)).square().mean().backward()
    gns.update()
    assert gns.compute().updates == 1
