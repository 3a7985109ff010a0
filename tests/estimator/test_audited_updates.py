# SPDX-License-Identifier: Apache-2.0
"""Which updates are audited: the first, and then fewer and fewer, all of their passes."""

from typing import Any

import pytest
import torch
import unseen
from torch import nn
from torch.amp.grad_scaler import GradScaler

import gnsfast
from gnsfast.probing import audit, is_audited

D, N = 3, 4


def test_the_updates() -> None:
    assert [k for k in range(401) if is_audited(k)] == [
        *(0, 1, 2, 4, 8, 16, 32, 64),
        *(200, 300, 400),
    ]


@pytest.mark.parametrize("passes", [1, 3])
def test_few_gradients_are_read(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    reads = []
    norm = audit.norm_on_cpu

    def counted(grad: Any) -> Any:
        reads.append(update)
        return norm(grad)

    monkeypatch.setattr(audit, "norm_on_cpu", counted)
    model = nn.Sequential(nn.Linear(D, D, bias=False))
    gns = gnsfast.GradientNoiseScale(model)
    for update in range(20):
        with gns.update():
            for _ in range(passes):
                with gns.microbatch(N):
                    assert bool(model[0].weight._backward_hooks) is is_audited(update)
                    model(torch.randn(N, D)).square().mean().backward()
        assert not model[0].weight._backward_hooks
        model.zero_grad()
    assert reads == [k for k in range(20) if is_audited(k) for _ in range(passes)]


@pytest.mark.parametrize("since", [0, 2, 30, 60])
def test_a_misuse_that_begins_late(since: int) -> None:
    """In the last micro-batch."""
    model = nn.Linear(D, D, bias=False)
    gns = gnsfast.GradientNoiseScale(model)
    for k in range(65):
        with gns.update():
            for last in (False, True):
                with gns.microbatch(N):
                    x = torch.randn(N, D)
                    y = model(x)
                    if last and k >= since:
                        y = y + unseen.linear(x, model.weight)
                    y.square().mean().backward()
        model.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match="weight: .*the part that was measured"):
        gns.compute()


def test_updates_that_overflow_tell_nothing() -> None:
    """Half precision begins so: the scaler skips the first steps."""
    model = nn.Linear(D, D)
    gnsfast.learn(model, torch.randn(N, D)).tell(gnsfast.following.Followed.of(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = GradScaler("cpu", init_scale=1e30, backoff_factor=1e-27)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
    for _ in range(6):
        with gns.update(N):
            x = torch.randn(N, D)
            y = model(x) + unseen.linear(x, model.weight)
            scaler.scale(1e10 * y.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with pytest.raises(gnsfast.ObservationError, match="weight: .*the part that was measured"):
        gns.compute()
