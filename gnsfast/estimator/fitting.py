# SPDX-License-Identifier: Apache-2.0
"""Which noise scales fit an optimizer, and the optimizer that an estimator needs for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gnsfast.combinations import METRIC, SIGN, SPECTRAL
from gnsfast.probing import ProbeSlab, unwrapped
from gnsfast.tensors import is_dtensor


def fitting_metrics(model: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """The metrics to measure beside the Euclidean one where ``optimizer`` trains ``model``.

    ``"spectral"`` for ``torch.optim.Muon``, else ``"sign"``; also ``"adam"`` for Adam and AdamW
    that have stepped. Those that no layer of the model has norms for are left out, and all where
    parameters are sharded.
    """
    if any(map(is_dtensor, model.parameters())):
        return ()
    wanted = {"sign": SIGN}
    if isinstance(optimizer, torch.optim.Muon):
        wanted = {"spectral": SPECTRAL}
    elif isinstance(optimizer, torch.optim.Adam) and optimizer.state:
        wanted = {"adam": METRIC, "sign": SIGN}
    slab = ProbeSlab(unwrapped(model), num_samples=1)
    return tuple(metric for metric, feature in wanted.items() if slab.taking(feature))


def optimizer_for(metric: str | Sequence[str] | None, optimizer: Any) -> Any:
    """``optimizer`` if a ``GradientNoiseScale`` with ``metric`` takes it, else None.

    ``"adam"`` needs its second moments. ``"spectral"`` takes ``torch.optim.Muon``, and measures the
    matrices that it trains; with another optimizer it measures all of them.
    """
    metrics = [metric] if isinstance(metric, str) else metric or ()
    muon = "spectral" in metrics and isinstance(optimizer, torch.optim.Muon)
    return optimizer if "adam" in metrics or muon else None
