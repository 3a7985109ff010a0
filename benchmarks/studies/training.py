# SPDX-License-Identifier: Apache-2.0
"""Training of the demo's byte-level model, which the studies share."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import gnsfast
from examples import tiny_gpt

LR = 1e-3


def narrow_run(
    seed: int, steps: int, warm_up: int, draw: Callable[[], tuple[Tensor, Any]], **options: Any
) -> Iterator[tuple[int, gnsfast.GradientNoiseScale]]:
    """Trains a GPT of one layer, of width 32. ``draw`` gives a batch and its ``ids``; each step is
    yielded with the noise scale, measured but not taken yet.
    """
    torch.manual_seed(seed)
    model = tiny_gpt.TinyGPT(width=32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    gns = gnsfast.GradientNoiseScale(model, **options)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / warm_up)
        windows, ids = draw()
        with gns.update(len(windows), ids=ids):
            tiny_gpt.loss_of(model, windows).backward()
        yield step, gns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def span(value: float, lower: float, upper: float) -> str:
    return f"{value:.3g} ({lower:.3g} to {upper:.3g})"
