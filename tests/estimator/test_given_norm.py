# SPDX-License-Identifier: Apache-2.0
"""A ``grad_norm`` that is not the 2-norm of the whole gradient, however plausible it is."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_cases import N, draw, make
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gnsfast
from gnsfast.estimator.fingerprint import Fingerprint

Norm = Callable[[nn.Module], Any]
WRONG = "not the 2-norm .* norm_type"


def whole(model: nn.Module) -> Any:
    return clip_grad_norm_(model.parameters(), 1e-2)


def largest(model: nn.Module) -> Any:
    return clip_grad_norm_(model.parameters(), 1e-2, norm_type=math.inf)


def update(model: nn.Module, gns: gnsfast.GradientNoiseScale, passes: int, norm: Norm) -> None:
    for x, y in draw(passes):
        with gns.microbatch(N, scale=1 / passes):
            (F.cross_entropy(model(x), y) / passes).backward()
    gns.update(norm(model))
    model.zero_grad()


def made(**settings: Any) -> tuple[nn.Module, gnsfast.GradientNoiseScale]:
    model = make()
    return model, gnsfast.GradientNoiseScale(model, **settings)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("source", ["auto", "global"])
def test_norms_that_are_too_small(source: str, passes: int) -> None:
    """All of them could be the norm of a gradient in which noise cancels."""
    wrong: list[Norm] = [
        largest,
        lambda model: clip_grad_norm_(model.parameters(), 1e-2, norm_type=3.0),
        lambda model: clip_grad_norm_(model[3].parameters(), 1e-2),  # type: ignore[index]
        lambda model: 0.9 * whole(model),
    ]
    for norm in wrong:
        model, gns = made(source=source)
        update(model, gns, passes, norm)
        with pytest.raises(gnsfast.ObservationError, match=WRONG):
            gns.compute()
    model, gns = made(source=source)
    for _ in range(3):
        update(model, gns, passes, whole)
    assert gns.compute().updates == 3


@pytest.mark.parametrize("unscale", [False, True])
def test_under_a_gradient_scaler(unscale: bool) -> None:
    for norm, right in ((whole, True), (largest, False)):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
        for x, y in draw(2):
            with gns.microbatch(N, scale=0.5):
                scaler.scale(0.5 * F.cross_entropy(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        gns.update(norm(model))
        if right:
            assert gns.compute().updates == 1
            continue
        with pytest.raises(gnsfast.ObservationError, match=WRONG):
            gns.compute()


@pytest.mark.parametrize("late", ["norms", "another kind", "one in three"])
def test_a_wrong_norm_that_begins_late(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    monkeypatch.setattr("gnsfast.estimator.estimator.AUDIT_EVERY", 4)
    model, gns = made()
    for _ in range(4):
        update(model, gns, 2, (lambda model: None) if late == "norms" else whole)
    gns.compute()
    with pytest.raises(gnsfast.ObservationError, match=WRONG):
        for k in range(4):
            wrong = late != "one in three" or k % 3 == 1
            update(model, gns, 2, largest if wrong else (lambda model: None))
            if late == "norms" and k == 0:
                gns.compute()  # nothing was read in the first update that has a norm
        gns.compute()


def test_few_updates_read_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnsfast.estimator.estimator.AUDIT_EVERY", 5)
    reads: list[bool] = []
    read = Fingerprint.read

    def counted(self: Fingerprint) -> Any:
        found = read(self)
        reads.append(found is not None)
        return found

    monkeypatch.setattr(Fingerprint, "read", counted)
    for norm, expected in ((whole, [0, 5, 10]), (lambda model: None, [0])):
        reads.clear()
        model, gns = made()
        for _ in range(12):
            update(model, gns, 3, norm)
        # The first pass of an update needs none, and the others do not know which is the last.
        assert [k // 2 for k, was in enumerate(reads) if was] == [k for k in expected for _ in "ab"]
        gns.compute()
    reads.clear()
    model, gns = made(source="local")
    for _ in range(3):
        update(model, gns, 3, lambda model: None)
    assert not any(reads)
