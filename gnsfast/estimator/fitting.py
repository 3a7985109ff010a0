# SPDX-License-Identifier: Apache-2.0
"""Finds the noise scales that fit an optimizer, and whether an estimator needs the optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gnsfast.combinations import METRIC, SIGN, SPECTRAL
from gnsfast.probing import ProbeSlab, unwrapped


def fitting_metrics(model: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """The metrics to measure beside the Euclidean one if ``optimizer`` trains ``model``.

    They are ``"spectral"`` for ``torch.optim.Muon`` and ``"sign"`` for any other optimizer, with
    ``"adam"`` for an Adam or AdamW that has stepped. A metric is left out if no layer of the model
    supports it.
    """
    wanted = {"sign": SIGN}
    if isinstance(optimizer, torch.optim.Muon):
        wanted = {"spectral": SPECTRAL}
    elif isinstance(optimizer, torch.optim.Adam) and optimizer.state:
        wanted = {"adam": METRIC, "sign": SIGN}
    slab = ProbeSlab(unwrapped(model), num_samples=1)
    return tuple(metric for metric, feature in wanted.items() if slab.taking(feature))


def optimizer_for(metric: str | Sequence[str] | None, optimizer: Any) -> Any:
    """``optimizer`` if a ``GradientNoiseScale`` with ``metric`` needs it, else None.

    ``"adam"`` needs its second moments. ``"spectral"`` takes a ``torch.optim.Muon`` and measures
    the matrices that it trains. With any other optimizer it measures all matrices.
    """
    metrics = [metric] if isinstance(metric, str) else metric or ()
    muon = "spectral" in metrics and isinstance(optimizer, torch.optim.Muon)
    return optimizer if "adam" in metrics or muon else None
