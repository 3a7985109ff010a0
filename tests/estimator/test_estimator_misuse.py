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
        self.gns = gnsfast.GradientNoiseScale(self.model, grad_scaler=self.scaler)

    def measure(self, factor: float = 1.0, penalty: bool = False, passes: int = 1) -> None:
        with self.gns.update():
            for x, y in draw(passes):
                with self.gns.microbatch(N):
                    loss = factor * F.cross_entropy(self.model(x), y)
                    if penalty:
                        loss = loss + unseen.penalty(self.model[0].weight)
                    self.scaler.scale(loss).backward()


@pytest.mark.parametrize("passes", [1, 2])
def test_the_scaler_may_change_its_factor_after_the_block(passes: int) -> None:
    """Numbers that wait hold the factor of their own update."""
    results = []
    for factors in ([32.0, 64.0, 8.0], [64.0, 64.0, 64.0]):
        torch.manual_seed(3)
        s = Scaled()
        for factor in factors:
            s.measure(passes=passes)
            s.scaler.step(s.optimizer)
            s.scaler.update(new_scale=factor)
            s.optimizer.zero_grad()
        results.append(s.gns.compute())
    assert results[0].updates == 3
    assert results[0].noise_scale == pytest.approx(results[1].noise_scale, rel=1e-6)


def test_one_of_two_optimizers_unscaled() -> None:
    s = Scaled()
    extra = nn.Parameter(torch.zeros(1))
    extra.grad = torch.ones(1)
    with pytest.raises(ObservationError, match="of one optimizer, but not of another"):
        with s.gns.update():
            for x, y in draw(2):
                with s.gns.microbatch(N):
                    s.scaler.scale(F.cross_entropy(s.model(x), y)).backward()
            s.scaler.unscale_(torch.optim.SGD([extra], lr=0.0))
            s.scaler._per_optimizer_states[id(s.optimizer)]  # known to the scaler, not unscaled


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


@pytest.mark.parametrize("source, passes", [("update", 1), ("local", 2), ("update", 2)])
def test_hook_on_a_gradient(source: str, passes: int) -> None:
    model = make()
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    gns = gnsfast.GradientNoiseScale(model, source=source)
    if source == "local" or passes == 1:
        measured(gns, model, passes)
        assert gns.compute().updates == 1
        return
    with pytest.raises(ObservationError, match=r"0\.weight has a gradient hook"):
        measured(gns, model, passes)


@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_inside_of_the_block(passes: int) -> None:
    """Of one pass nothing is read. Of several |G|² is then that of the clipped gradient, which no
    check can tell from noise that cancels: the page on misuse says so.
    """
    model = make()
    results = []
    for clip in (False, True):
        torch.manual_seed(3)
        gns = gnsfast.GradientNoiseScale(model)
        with gns.update():
            for x, y in draw(passes):
                with gns.microbatch(N):
                    F.cross_entropy(model(x), y).backward()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad()
        results.append(gns._window()[0].whole[1].item())
    factor = 1.0 if passes == 1 else (1e-3 / norm.item()) ** 2
    assert results[1] == pytest.approx(factor * results[0], rel=0.01)


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
    """A batch that the user throws away, before its backward pass or after it."""
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    for step in range(4):
        [(x, y)] = draw(1)
        with gns.update(N):
            loss = F.cross_entropy(model(x), y)
            if step == 1:
                gns.discard()
                continue
            loss.backward()
            if step == 2:
                gns.discard()
        model.zero_grad()
    assert gns.compute().updates == 2


def test_graph_of_gradients_spoils_one_update_alone() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    [(x, y)] = draw(1)
    with pytest.raises(ObservationError, match="create_graph"):
        with gns.update(N):
            F.cross_entropy(model(x), y).backward(create_graph=True)
    model.zero_grad()
    measured(gns, model)
    assert gns.compute().updates == 1


def test_refused_state_keeps_the_measurements() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model)
    measured(gns, model)
    with pytest.raises(ValueError, match="window"):
        gns.load_state_dict(gnsfast.GradientNoiseScale(model, window=8).state_dict())
    assert gns.compute().updates == 1


def test_replaced_parameters() -> None:
    model = make()
    gns = gnsfast.GradientNoiseScale(model, source="update")
    measured(gns, model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ObservationError, match="replaced since"):
        measured(gns, model)


def test_unused_module_is_no_error() -> None:
    gate = lambda m, x, second: m.b(x) if second else m.a(x)
    model, x = Made(gate, a=nn.Linear(I, 3), b=nn.Linear(I, 3)), torch.randn(N, I)
    table = gnsfast.learn(model, (x, False)) | gnsfast.learn(model, (x, True))
    gns = gnsfast.GradientNoiseScale(model, table)
    for k in range(6):
        with gns.update():
            for second in (False, k % 2 == 0):
                with gns.microbatch(N):
                    model(torch.randn(N, I), second).square().sum(1).mean().backward()
        model.zero_grad()
    assert gns.compute().updates == 6
