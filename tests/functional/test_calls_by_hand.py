# SPDX-License-Identifier: Apache-2.0
"""``functional.Calls``: one layer called several times, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gnsfast import functional
from gnsfast.functional import Calls, Plan

B, D = 3, 8


@pytest.mark.parametrize("starts", [[[0, 2, 6, 6], [0, 1, 1, 9]], [[0, 3, 3, 5]]], ids=str)
@pytest.mark.parametrize("layer", ["linear", "embedding", "layer_norm", "rms_norm"])
def test_documents_of_other_lengths(layer: str, starts: list[list[int]]) -> None:
    """Calls by hand: each has documents of its own lengths, also empty ones."""
    calls = Calls()
    w = (1 + torch.randn(D, D) if layer in ("linear", "embedding") else torch.rand(D)).double()
    probe = torch.zeros(1, B + 2, requires_grad=True)
    call: Any = getattr(functional, layer)
    total = torch.zeros((), dtype=torch.float64)
    singles = torch.zeros(B, *w.shape, dtype=torch.float64)
    w.requires_grad_()
    for own in map(torch.tensor, starts):
        N = int(own[-1])
        x = torch.randint(0, D, (N,)) if layer == "embedding" else torch.randn(N, D).double()
        r = torch.randn(N, D).double()
        plan = Plan(starts=own, calls=calls)
        shape = [(D,)] if layer == "layer_norm" else []
        bias = [None] if layer in ("linear", "layer_norm") else []
        y = call(x, *shape, w, *bias, probe, plan)
        total = total + ((y[0] if layer == "embedding" else y).sin() * r).sum()
        torch_call = getattr(torch.nn.functional, layer)
        options = {"eps": torch.finfo(torch.float64).eps} if layer == "rms_norm" else {}
        for b in range(B):
            rows = slice(*own[b : b + 2].tolist())
            args = [x[rows], w] if not shape and not options else [x[rows], (D,), w]
            alone = (torch_call(*args, **options).sin() * r[rows]).sum()
            singles[b] += torch.autograd.grad(alone, w)[0] if x[rows].numel() else 0.0
    total.backward()
    torch.testing.assert_close(w.grad, singles.sum(0))
    want = torch.cat([singles, w.grad[None]]).flatten(1).square().sum(1)
    torch.testing.assert_close(probe.grad[0, :-1].double(), want, rtol=1e-6, atol=0.0)
    assert probe.grad[0, -1] == 1.0


@pytest.mark.parametrize("layer", ["linear", "embedding", "layer_norm", "rms_norm"])
def test_a_first_call_under_no_grad(layer: str) -> None:
    """It has no gradient; those after it have."""
    w = torch.randn(D, D) if layer in ("linear", "embedding") else torch.rand(D)
    x = torch.randint(0, D, (B, 5)) if layer == "embedding" else torch.randn(B, 5, D)
    shape, bias = [(D,)] * (layer == "layer_norm"), [None] * (layer in ("linear", "layer_norm"))
    probe, plan = torch.zeros(1, B + 2, requires_grad=True), Plan(calls=Calls())
    call: Any = getattr(functional, layer)
    w.requires_grad_()

    def run(plan: Plan) -> Tensor:
        y: Any = call(x, *shape, w, *bias, probe, plan)
        return y[0] if layer == "embedding" else y

    with torch.no_grad():
        run(plan)
    y = run(plan) + run(plan)
    (y.sin() * y.detach()).sum().backward()
    assert probe.grad is not None and w.grad is not None
    assert probe.grad[0, -1] == 1.0
    torch.testing.assert_close(probe.grad[0, B], w.grad.square().sum())
