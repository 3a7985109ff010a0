# SPDX-License-Identifier: Apache-2.0
"""Finds the noise scales that fit an optimizer, and whether an estimator needs the optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gnsfast.following import unwrapped
from gnsfast.tensors import is_dtensor


def fitting_metrics(model: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """The metrics to measure beside the Euclidean one if ``optimizer`` trains ``model``.

    They are ``"spectral"`` for ``torch.optim.Muon`` and ``"sign"`` for any other optimizer, with
    ``"adam"`` for an Adam or AdamW that has stepped. A metric is left out if no parameter
    supports it, and so are all if parameters are sharded.
    """
    wanted: tuple[str, ...] = ("sign",)
    if isinstance(optimizer, torch.optim.Muon):
        wanted = ("spectral",)
    elif isinstance(optimizer, torch.optim.Adam) and optimizer.state:
        wanted = ("adam", "sign")
    parameters = [p for p in unwrapped(model).parameters() if p.requires_grad]
    matrices = any(p.ndim == 2 for p in parameters)
    if not parameters or any(map(is_dtensor, parameters)):
        return ()
    return wanted if matrices or "spectral" not in wanted else ()


def optimizer_for(metric: str | Sequence[str] | None, optimizer: Any) -> Any:
    """``optimizer`` if a ``GradientNoiseScale`` with ``metric`` needs it, else None.

    ``"adam"`` needs its second moments. ``"spectral"`` takes a ``torch.optim.Muon`` and measures
    the matrices that it trains. With any other optimizer it measures all matrices.
    """
    metrics = [metric] if isinstance(metric, str) else metric or ()
    muon = "spectral" in metrics and isinstance(optimizer, torch.optim.Muon)
    return optimizer if "adam" in metrics or muon else None
