# SPDX-License-Identifier: Apache-2.0
"""A pass makes its tensors where the others are: on a machine without a GPU, whatever it makes
without naming a device would go unnoticed.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_documents import LENGTHS, Packed, draw, packed_loss
from test_gpu import LAYERS
from torch import nn

import gnsfast

FACTORIES = "arange as_tensor empty eye full linspace ones rand randn scalar_tensor tensor zeros"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of gnsfast that have made a tensor without naming a device."""
    lines: list[str] = []

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            module = caller.f_globals["__name__"]
            if module.startswith("gnsfast.") and kwargs.get("device") is None:
                lines.append(f"{module}:{caller.f_lineno}")
            return make(*args, **kwargs)

        return run

    for name in FACTORIES.split():
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    return lines


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_layers(make: Callable[[], tuple[nn.Module, torch.Tensor]], nowhere: list[str]) -> None:
    layer, x = make()
    with gnsfast.per_sample_sqnorms(layer, 3):
        layer(x).square().sum().backward()
    assert not nowhere


def test_documents(nowhere: list[str]) -> None:
    """A weight that is an embedding twice and the head: the pass with the most kinds of terms."""
    model, batch = Packed(tied=True), draw()
    starts = gnsfast.cu_seqlens(batch[1])
    with gnsfast.per_sample_sqnorms(model, len(LENGTHS), cu_seqlens=starts):
        packed_loss(model, batch).backward()
    assert not nowhere
