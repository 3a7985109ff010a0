# SPDX-License-Identifier: Apache-2.0
"""Modules with code of their own: bare parameters, functions without a kernel, or reasons."""

from typing import Any

import pytest
import torch
from layers import assert_as_loop, weighted_loss
from made import Made
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast


class Scale(nn.Module):
    """LayerScale: a bare parameter, and a child with a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(5)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.inner(x))


def takes_part() -> nn.Module:
    """Of a part with several outputs, that takes a keyword argument."""

    def outputs(m: Any, x: Tensor, *, shift: float) -> dict[str, Any]:
        return {"y": m.gain * x + shift, "unused": m.gain.sum(), "shift": shift}

    inner = Made(outputs, gain=torch.randn(5))
    return Made(lambda m, x: m.inner(x, shift=0.5)["y"], inner=inner)


def test_dictionary_output_and_keyword_argument() -> None:
    model, batch = takes_part(), (torch.randn(4, 9, 5), torch.randn(4, 9, 5))
    assert_as_loop(model, batch, 4)


def test_autocast() -> None:
    """The audit allows for torch's gradients, which are rounded to half precision."""
    model = nn.Sequential(nn.Conv1d(4, 16, 1), nn.ConvTranspose1d(16, 3, 4, stride=2))
    batch = torch.randn(8, 4, 20), torch.randn(8, 3, 42)
    loop = loop_sqnorms(model, weighted_loss, batch, 8)
    gns = gnsfast.GradientNoiseScale(model, loss_reduction="sum")
    for block in (gns.update(8), gnsfast.per_sample_sqnorms(model, 8)):
        with block as norms:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(batch[0])
            (y * batch[1]).sum().backward()
    assert_norms(norms, loop, rtol=2e-2)
    assert gns.compute().updates == 1


calls = [0]


class Counting(Scale):
    """State that no module holds: every call gives another result."""

    def forward(self, x: Tensor) -> Tensor:
        calls[0] += 1
        return calls[0] * super().forward(x)


def test_samples_that_are_not_apart_are_named() -> None:
    model = nn.Sequential(Counting())
    with pytest.raises(gnsfast.ObservationError, match=r"0\.gain: .*sample"):
        with gnsfast.per_sample_sqnorms(model, 4):
            model(torch.randn(4, 9, 5)).sum().backward()


def test_square_argument_is_not_taken_for_samples() -> None:
    """A [T, T] mask with T = B that is the module's own."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(5))
            self.register_buffer("mask", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.mask @ (self.gain * x)

    model, batch = Masked(), (torch.randn(4, 4, 5), torch.randn(4, 4, 5))
    assert_as_loop(model, batch, 4)
