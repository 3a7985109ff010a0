# SPDX-License-Identifier: Apache-2.0
"""Training scripts that do things in another order, and what ``GradientNoiseScale`` says."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import unseen
from made import Made
from noise_cases import I, N, draw, make, measured, one_update
from torch import Tensor, nn

import gnsfast

ObservationError = gnsfast.ObservationError


class Scaled:
    """A model under a GradScaler, measured from ``.grad``."""

    def __init__(self) -> None:
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.gns = gnsfast.GradientNoiseScale(self.model, source="global", grad_scaler=self.scaler)

    def measure(self, factor: float = 1.0, penalty: bool = False) -> None:
        [(x, y)] = draw(1)
        with self.gns.microbatch(N):
            loss = factor * F.cross_entropy(self.model(x), y)
            if penalty:
                loss = loss + unseen.penalty(self.model[0].weight)
            self.scaler.scale(loss).backward()


@pytest.mark.parametrize("late", ["step", "step and update"])
def test_update_after_the_scalers_step(late: str) -> None:
    s = Scaled()
    s.measure()
    s.scaler.step(s.optimizer)
    if late == "step and update":
        s.scaler.update(new_scale=32.0)
        with pytest.raises(ObservationError, match="changed after the backward pass"):
            s.gns.update()
            s.gns.compute()
    else:
        s.gns.update()
        assert s.gns.compute().updates == 1


@pytest.mark.parametrize("known", [False, True])
def test_norm_of_unscaled_gradients_without_the_scaler(known: bool) -> None:
    """Clipping needs unscaled gradients; the probes hold the scaler's factor all the same."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler if known else None)
    for x, y in draw(2):
        with gns.microbatch(N, scale=0.5):
            scaler.scale(0.5 * F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    gns.update(grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    if known:
        assert gns.compute().updates == 1
    else:
        with pytest.raises(ObservationError, match="GradScaler unscaled .* grad_scaler="):
            gns.compute()


def test_one_of_two_optimizers_unscaled() -> None:
    s = Scaled()
    s.measure()
    extra = nn.Parameter(torch.zeros(1))
    extra.grad = torch.ones(1)
    s.scaler.unscale_(torch.optim.SGD([extra], lr=0.0))
    s.scaler._per_optimizer_states[id(s.optimizer)]  # known to the scaler, not unscaled
    with pytest.raises(ObservationError, match="of one optimizer, but not of another"):
        s.gns.update()


def test_audit_goes_on_after_an_overflow() -> None:
    """The first steps under a scaler overflow; the next ones are audited instead."""
    s = Scaled()
    s.measure(factor=math.inf, penalty=True)
    s.gns.update()
    s.gns.compute()
    s.model.zero_grad()
    s.measure(penalty=True)
    s.gns.update()
    with pytest.raises(ObservationError, match=r"0\.weight: .*the part that was measured"):
        s.gns.compute()


def test_audit_of_a_layer_that_joins_later() -> None:
    def joining(m: Any, x: Tensor, layers: str) -> Tensor:
        h = m.a(x)
        y = m.b(h) if "b" in layers else h
        return unseen.linear(y, m.b.weight) if "kernel" in layers else y

    model, x = Made(joining, a=nn.Linear(I, I), b=nn.Linear(I, I)), torch.randn(N, I)
    gns = gnsfast.GradientNoiseScale(model, gnsfast.learn(model, (x, "a, b")))
    with one_update(gns, N):
        model(x, "a").square().mean().backward()
    gns.compute()
    with one_update(gns, N):
        model(x, "a, b, kernel").square().mean().backward()
    with pytest.raises(ObservationError, match=r"b\.weight: .*the part that was measured"):
        gns.compute()


def test_audit_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that was found right comes to be used as a tensor later."""
    monkeypatch.setattr("gnsfast.estimator.estimator.AUDIT_EVERY", 2)
    s = Scaled()
    for step in range(3):
        s.measure(penalty=step > 0)
        s.gns.update()
        s.model.zero_grad()
        if step == 0:
            s.gns.compute()
    with pytest.raises(ObservationError, match=r"0\.weight: .*the part that was measured"):
        s.gns.compute()


def test_norms_of_another_kind() -> None:
    model = make()
    for microbatches in (1, 2):
        gns = gnsfast.GradientNoiseScale(model)
        for x, y in draw(microbatches):
            with gns.microbatch(N):
                F.cross_entropy(model(x), y).backward()
        gns.update(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
        model.zero_grad()
        with pytest.raises(ObservationError, match="grad_norm"):
            gns.compute()
    gns = gnsfast.GradientNoiseScale(model, source="global")
    measured(gns, model)
    with pytest.raises(ValueError, match="too coarse"):
        gns.update(torch.ones((), dtype=torch.bfloat16))


def test_hook_on_a_gradient() -> None:
    model = make()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for source, fine in (("auto", True), ("local", True), ("global", False)):
        gns = gnsfast.GradientNoiseScale(model, source=source)
        measured(gns, model)
        if fine:
            gns.update()
        else:
            with pytest.raises(ObservationError, match=r"0\.weight has a gradient hook"):
                gns.update()
        model.zero_grad()


def test_clipping_inside_of_the_block() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model, source="global")
    [(x, y)] = draw(1)
    with gns.microbatch(N):
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ObservationError, match="clipping"):
        gns.update()


def test_one_sample_alone_and_skipped_updates_change_nothing() -> None:
    model = make()
    results = []
    for odd in ("", "one sample", "overflow"):
        gns = gnsfast.GradientNoiseScale(model)
        torch.manual_seed(3)
        for step in range(9 if odd else 8):
            n = 1 if step == 8 and odd == "one sample" else N
            [(x, y)] = draw(1, n)
            factor = math.nan if step == 8 and odd == "overflow" else 1.0
            with one_update(gns, n, tokens=torch.arange(1, n + 1) * 7):
                (factor * F.cross_entropy(model(x), y)).backward()
        results.append(gns.compute())
    assert [r.skipped for r in results] == [0, 1, 1]
    assert results[0].noise_scale == results[1].noise_scale == results[2].noise_scale
    assert "1 skipped (one sample, or a NaN)" in str(results[1])


def test_discarded_batch() -> None:
    """A batch that the user throws away, inside of its block or after it."""
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    for step in range(4):
        [(x, y)] = draw(1)
        with gns.microbatch(N):
            loss = F.cross_entropy(model(x), y)
            if step == 1:
                gns.discard()
                continue
            loss.backward()
        if step == 2:
            gns.discard()
            model.zero_grad()
            continue
        gns.update()
        model.zero_grad()
    assert gns.compute().updates == 2


def test_graph_of_gradients_spoils_one_pass_alone() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    [(x, y)] = draw(1)
    with pytest.raises(ObservationError, match="create_graph"):
        with gns.microbatch(N):
            F.cross_entropy(model(x), y).backward(create_graph=True)
    model.zero_grad()
    measured(gns, model)
    gns.update()
    assert gns.compute().updates == 1


def test_update_inside_of_the_block() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    with pytest.raises(ObservationError, match=r"inside a gns\.microbatch block"):
        with gns.microbatch(N):
            model(torch.randn(N, I)).sum().backward()
            gns.update()


def test_refused_state_keeps_the_measurements() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    measured(gns, model)
    gns.update()
    with pytest.raises(ValueError, match="window"):
        gns.load_state_dict(gnsfast.GradientNoiseScale(model, window=8).state_dict())
    assert gns.compute().updates == 1


def test_replaced_parameters() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model, source="global")
    measured(gns, model)
    gns.update()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ObservationError, match="replaced since"):
        measured(gns, model)


def test_unused_module_is_no_error() -> None:
    gate = lambda m, x, second: m.b(x) if second else m.a(x)
    model, x = Made(gate, a=nn.Linear(I, 3), b=nn.Linear(I, 3)), torch.randn(N, I)
    table = gnsfast.learn(model, (x, False)) | gnsfast.learn(model, (x, True))
    gns = gnsfast.GradientNoiseScale(model, table)
    for k in range(6):
        for second in (False, k % 2 == 0):
            with gns.microbatch(N):
                model(torch.randn(N, I), second).square().sum(1).mean().backward()
        gns.update()
        model.zero_grad()
    assert gns.compute().updates == 6
