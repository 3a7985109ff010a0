# SPDX-License-Identifier: Apache-2.0
"""Updates whose arithmetic waits: the numbers are the same whenever it is done."""

import pytest
import torch
from torch import Tensor, nn

import gnsfast
from gnsfast.estimator import ledger


def run(asked_every: int, updates: int, passes: int = 1, window: int = 64) -> gnsfast.NoiseScale:
    """Train; ask for the noise scale in between, each so many updates."""
    torch.manual_seed(0)
    model = gnsfast.convert(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
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
    """A module called twice long ago is an error still, though the window has passed it."""
    monkeypatch.setattr(ledger, "MOST", 2)
    layer = nn.Linear(5, 5)
    model = gnsfast.convert(nn.Sequential(layer))
    gns = gnsfast.GradientNoiseScale(model, window=2)
    for twice in [True] + [False] * 9:
        with gns.microbatch(4):
            y: Tensor = model(torch.randn(4, 5))
            (model(y) if twice else y).square().mean().backward()
        gns.update()
        model.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match="2 times"):
        gns.compute()


def test_parameters_are_audited_in_turns() -> None:
    """A weight that is used outside of its module is found, at the latest after all others."""
    layers = [nn.Linear(3, 3, bias=False) for _ in range(80)]
    model = gnsfast.convert(nn.Sequential(*layers))
    gns = gnsfast.GradientNoiseScale(model)
    x = torch.randn(4, 3)
    for passes in range(1, 4):
        with gns.microbatch(4):
            (model(x) + x @ model[70].weight.T).square().sum(1).mean().backward()
        gns.update()
        model.zero_grad()
        if passes < 3:
            gns.compute()
    with pytest.raises(gnsfast.ObservationError, match=r"70.weight.*outside"):
        gns.compute()
