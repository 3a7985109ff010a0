# SPDX-License-Identifier: Apache-2.0
"""The optimizers of ``geometry``: each takes steps of one size in a norm of its own."""

import torch
from torch import nn

from gnsfast.cli.optimizers import MuonAdamW, Signum


def make(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer ``name`` of all parameters of ``model``."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    if name == "signum":
        return Signum(model.parameters(), lr=lr)
    return MuonAdamW(model, lr=lr, adam_lr=3e-3)
