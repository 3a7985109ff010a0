# SPDX-License-Identifier: Apache-2.0
"""The factor from a noise scale to a critical batch size, which a JSON file can hold, and what
identifies the run that it was measured in, so that it is not used in another.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnsfast.arguments import check_choice, check_format
from gnsfast.noise_scale import METRICS
from gnsfast.parallel import parameters_at_rest

KIND, FORMAT = "critical batch factor", 1


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
        """From ``asdict``; all is unknown without a record."""
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


@dataclass(frozen=True)
class CriticalBatchFactor:
    """The critical batch size (CBS) divided by the noise scale, both measured at one checkpoint.

    Args:
        value: the ratio; ``lower`` to ``upper`` is its interval, and ``upper`` may be infinite.
        metric: of the noise scale: ``"euclidean"``, ``"adam"``, ``"sign"`` or ``"spectral"``
            (``NoiseScale.under``). A factor never multiplies a noise scale of another metric.
        source: one line that says where it was measured.
        run: the run that it was measured in, as far as that is known. A run that differs refuses
            it: ``for_other_run()`` lifts that.
        tokens: trained before each checkpoint that it was measured at.

    Raises:
        ValueError: for a value that is not positive and finite, or lies outside its interval.

    >>> from gnsfast.critical_batch import CriticalBatchFactor
    >>> CriticalBatchFactor(8.0, 5.6, 11.3, "euclidean", "160M model at 2.1B tokens").value * 30
    240.0
    """

    value: float
    lower: float
    upper: float
    metric: str
    source: str
    run: RunIdentity = RunIdentity()
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        positive = math.isfinite(self.value) and self.value > 0
        if not (positive and 0 <= self.lower <= self.value <= self.upper):
            raise ValueError(
                f"a factor must be positive, finite and inside its interval, not {self.value!r} "
                f"with the interval {self.lower!r} to {self.upper!r}"
            )

    def check_run(self, run: RunIdentity) -> None:
        """Raise ValueError where ``run`` differs from the run that this was measured in. What is
        unknown of one of them is not compared.
        """
        if other := self.run.differences(run):
            raise ValueError(
                f"The factor was measured in another run, with {', '.join(other)} ({self.source}). "
                "Measure it in this run (gnsfast branch --factor), or say that you want it: "
                "factor=CriticalBatchFactor.load(...).for_other_run()"
            )

    def for_other_run(self) -> "CriticalBatchFactor":
        """The same factor for a run that differs; ``source`` says which run it is of."""
        return replace(self, run=RunIdentity(), source=f"{self.source}; of another run: {self.run}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, with null for an infinite ``upper``."""
        fields = {k: None if v == math.inf else v for k, v in asdict(self).items()}
        text = json.dumps({"kind": KIND, "format": FORMAT, **fields}, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "CriticalBatchFactor":
        """Read what ``save`` wrote.

        Raises:
            ValueError: for a file of another kind or format.
        """
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path} is not JSON: {e}") from e
        check_format(path, found, KIND, FORMAT)
        try:
            value, lower, upper = (found[k] for k in ("value", "lower", "upper"))
            ends = float(value), float(lower), math.inf if upper is None else float(upper)
            run = RunIdentity.from_record(found["run"])
            tokens = tuple(int(t) for t in found["tokens"])
            text = str(found["metric"]), str(found["source"])
            return CriticalBatchFactor(*ends, *text, run, tokens)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{path} is damaged: {e}") from e
