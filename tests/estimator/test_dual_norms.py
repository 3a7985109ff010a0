# SPDX-License-Identifier: Apache-2.0
"""Noise scales in the dual norms of sign and spectral descent: what leaves them unchanged."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dual_norm_cases import assert_numbers, expected, sample_grads
from noise_cases import draw, in_updates, make, through_a_file
from torch import Tensor, nn

import gnsfast

UPDATES = 12
BOTH = ["sign", "spectral"]


def run(
    model: nn.Module,
    gns: gnsfast.GradientNoiseScale,
    data: list[tuple[Tensor, Tensor]],
    scaler: torch.amp.GradScaler | None = None,
    **given: Any,
) -> gnsfast.NoiseScale:
    """Updates of four micro-batches."""
    reduction = gns._settings.loss_reduction
    for x, y in data:
        with gns.update():
            for own, labels in zip(x.chunk(4), y.chunk(4)):
                scale = len(own) / len(x) if reduction == "mean" else 1.0
                with gns.microbatch(len(own), scale=scale, **{k: v(own) for k, v in given.items()}):
                    loss = F.cross_entropy(model(own), labels, reduction=reduction) * scale
                    (loss if scaler is None else scaler.scale(loss)).backward()
        model.zero_grad()
    return gns.compute()


def test_scaler_and_overflow() -> None:
    """A scaler's factor drops out; an update that overflows teaches nothing."""
    results = []
    for scaled in (False, True):
        torch.manual_seed(3)
        model, data = make(), draw(UPDATES)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        gns = gnsfast.GradientNoiseScale(model, metric=BOTH, grad_scaler=scaler, window=20)
        run(model, gns, data[:6], scaler)
        if scaled:
            x, y = data[0]
            run(model, gns, [(torch.full_like(x, torch.inf), y)], scaler)
        results.append(run(model, gns, data[6:], scaler))
    plain, scaled_ = results
    assert scaled_.skipped == 1
    for name in BOTH:
        a, b = getattr(plain, name), getattr(scaled_, name)
        assert a.updates == b.updates == UPDATES - 1
        assert b.noise == pytest.approx(a.noise, rel=1e-5)
        assert b.noise_scale == pytest.approx(a.noise_scale, rel=1e-4)


def test_scale_and_reduction_drop_out() -> None:
    """A loss that is a sum, and token weights, give the noise scale of the mean."""
    torch.manual_seed(4)
    data = draw(UPDATES)
    results = []
    for reduction in ("mean", "sum"):
        model = make()
        gns = gnsfast.GradientNoiseScale(model, metric=BOTH, loss_reduction=reduction)
        results.append(run(model, gns, data, tokens=lambda own: torch.full((len(own),), 1)))
    for name in BOTH:
        a, b = (getattr(r, name) for r in results)
        assert b.noise_scale == pytest.approx(a.noise_scale, rel=1e-4)


def test_resume() -> None:
    """Saved in the middle and loaded into a new estimator: the same bits."""
    torch.manual_seed(5)
    model, data = make(), draw(UPDATES)
    metrics: Any = {"metric": BOTH, "window": 8}
    whole = run(model, gnsfast.GradientNoiseScale(model, **metrics), data)
    first = gnsfast.GradientNoiseScale(model, **metrics)
    run(model, first, data[:7])
    second = gnsfast.GradientNoiseScale(model, **metrics)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert run(model, second, data[7:]) == whole
    with pytest.raises(ValueError, match="dual"):
        gnsfast.GradientNoiseScale(model, metric="sign", window=8).load_state_dict(
            first.state_dict()
        )


def test_every() -> None:
    """Updates in between are plain: nothing is added, no mean moves."""
    model, data = make(), draw(UPDATES)
    gns = gnsfast.GradientNoiseScale(model, metric="sign", every=3)
    found = run(model, gns, data)
    assert found.updates == 4 and found.sign is not None and found.sign.updates == 3


def test_together_with_adam() -> None:
    torch.manual_seed(6)
    model, data = make(), draw(UPDATES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    gns = gnsfast.GradientNoiseScale(model, metric=["adam", "sign"], optimizer=optimizer)
    found = run(model, gns, data)
    assert found.adam is not None and found.adam.updates == UPDATES
    loss = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="sum")
    units = []
    for x, y in data:
        own = [sample_grads(model, loss, part, 2) for part in zip(x.chunk(4), y.chunk(4))]
        units.append({name: torch.stack([u[name].mean(0) for u in own]) for name in own[0]})
    assert_numbers(found.sign, expected("sign", units, 64), 1e-4, 2)


def test_a_pass_for_other_gradients() -> None:
    """It adds nothing to the sums."""
    found = []
    for others in (False, True):
        torch.manual_seed(3)
        model, data = make(), draw(UPDATES)
        gns = gnsfast.GradientNoiseScale(model, metric=BOTH)
        for passes in in_updates(data, 2):
            with gns.update():
                for x, y in passes:
                    with gns.microbatch(8):
                        loss = F.cross_entropy(model(x.requires_grad_()), y)
                        if others:
                            torch.autograd.grad(3 * loss, x, retain_graph=True)
                        loss.backward()
            model.zero_grad()
        found.append(gns.compute())
    assert found[0].sign == found[1].sign and found[0].spectral == found[1].spectral


def test_refusals() -> None:
    model = make()
    with pytest.raises(ValueError, match="metric must be .*sign.*, not 'lion'"):
        gnsfast.GradientNoiseScale(model, metric="lion")
    with pytest.raises(ValueError, match="metric='sign' needs the gradient of the whole update"):
        gnsfast.GradientNoiseScale(model, metric="sign", source="local")
    with pytest.raises(ValueError, match="optimizer=... is used only with metric='adam' and"):
        gnsfast.GradientNoiseScale(
            model, metric="sign", optimizer=torch.optim.AdamW(model.parameters())
        )
