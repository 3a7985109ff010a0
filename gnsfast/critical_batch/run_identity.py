# SPDX-License-Identifier: Apache-2.0
"""What identifies a training run, so that a number measured in one is not used in another."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from gnsfast.parallel import parameters_at_rest


@dataclass(frozen=True)
class RunIdentity:
    """What a critical batch size depends on. None is unknown: it agrees with anything, and
    ``unknown`` names it.

    Args:
        model: the number of trained parameters and a digest of their shapes. Not its class, which
            wrappers such as a LightningModule change.
        optimizer: its class.
        data: the name of the training data.
        tokens_per_sample: the context.

    >>> from gnsfast.critical_batch import RunIdentity
    >>> model = torch.nn.Linear(5, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> print(RunIdentity.of(model, optimizer, tokens_per_sample=512))
    model of 12 elements (shapes 0e81cbc4), optimizer AdamW, data unknown, 512 tokens per sample
    """

    model: str | None = None
    optimizer: str | None = None
    data: str | None = None
    tokens_per_sample: int | None = None

    @staticmethod
    def of(
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data: str | None = None,
        tokens_per_sample: int | None = None,
    ) -> "RunIdentity":
        """That of a run. The same with DDP, FSDP2, and ``torch.compile`` as without."""
        return RunIdentity(
            None if model is None else _model(model),
            None if optimizer is None else _optimizer(optimizer),
            data,
            tokens_per_sample,
        )

    @staticmethod
    def from_record(record: Mapping[str, Any] | None) -> "RunIdentity":
        """From ``asdict``; all is unknown without a record, as in files of older versions."""
        return RunIdentity(**record) if record else RunIdentity()

    def unknown(self) -> tuple[str, ...]:
        """The names of the fields that are not known."""
        return tuple(name for name, value in asdict(self).items() if value is None)

    def differences(self, other: "RunIdentity") -> list[str]:
        """Each field that both know and that differs, in words."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [
            f"{name.replace('_', ' ')} {own} and not {another}"
            for name, own, another in pairs
            if None not in (own, another) and own != another
        ]

    def __str__(self) -> str:
        named = [f"{k} {getattr(self, k) or 'unknown'}" for k in ("model", "optimizer", "data")]
        length = self.tokens_per_sample
        context = "context unknown" if length is None else f"{length:,} tokens per sample"
        return ", ".join([*named, context])


def _model(model: nn.Module) -> str:
    trained = [p for p in parameters_at_rest(model).values() if p.requires_grad]
    shapes = json.dumps(sorted([*p.shape] for p in trained))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    return f"of {sum(p.numel() for p in trained):,} elements (shapes {digest})"


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner  # Accelerate's
    return type(optimizer).__name__
