# SPDX-License-Identifier: Apache-2.0
"""The settings of an estimator, and the state of an update under way."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gnsfast.arguments import check_choice
from gnsfast.combinations import DOCUMENTS, GROUPS, METRIC, PIPELINE, refuse

Mark = tuple[int, int] | None


@dataclass(frozen=True)
class Settings:
    """The settings, which stay the same over all updates."""

    source: str
    loss_reduction: str
    grad_scaler: GradScaler | None
    group: "dist.ProcessGroup | None"
    stages: "dist.ProcessGroup | None"
    optimizer: Any = None  # whose metric is measured; None without a metric
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("auto", "local", "global"))
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        if self.local and self.stages is not None:
            raise ValueError("source='local' has no use for pipeline stages: use source='global'")
        refuse(None, self.features())

    def features(self, documents: bool = False, schedule: bool = False) -> list[str]:
        """The features of ``combinations`` in use; the arguments are those of a micro-batch."""
        asked = {
            DOCUMENTS: documents,
            METRIC: self.optimizer is not None,
            GROUPS: bool(self.groups),
            PIPELINE: schedule or self.stages is not None,
        }
        return [feature for feature, is_asked in asked.items() if is_asked]

    def check_block(self, tokens: Any, cu_seqlens: Any, groups: Any, schedule: Any) -> None:
        """Raise for arguments of a micro-batch that do not go together."""
        if schedule is not None and self.local:
            raise ValueError("source='local' has no use for a schedule: use source='global'")
        refuse(None, self.features(cu_seqlens is not None, schedule is not None))
        if groups is not None and tokens is not None and getattr(tokens, "ndim", 0) != 1:
            raise ValueError("with groups tokens must be one count for each sample")
        if cu_seqlens is not None and tokens is None:
            raise ValueError(
                "with cu_seqlens say tokens=..., the tokens of each document that the loss "
                "counts (cu_seqlens.diff() - 1 for next-token losses, 0 for padding), or 1 for "
                "each if the loss is a mean over documents"
            )

    @property
    def local(self) -> bool:
        return self.source == "local"


@dataclass(frozen=True)
class EndOfPass:
    """The state of the gradients after a backward pass: ``mark`` of each, ``witness`` of a few."""

    marks: list[Mark]
    witness: Tensor | None


def ordered_names(names: Any) -> tuple[str, ...]:
    """The names of groups as a tuple. A set is refused: all processes need the same order."""
    if isinstance(names, (str, set, frozenset)) or len(set(names)) < len(tuple(names)):
        raise ValueError(f"groups must be a list of different names, in one order, not {names!r}")
    return tuple(names)
