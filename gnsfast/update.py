# SPDX-License-Identifier: Apache-2.0
"""What an update under way is made of."""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

Mark = tuple[int, int] | None


@dataclass(frozen=True)
class Settings:
    """What stays the same over all updates."""

    source: str
    loss_reduction: str
    grad_scaler: GradScaler | None
    group: "dist.ProcessGroup | None"
    stages: "dist.ProcessGroup | None"

    @property
    def local(self) -> bool:
        return self.source == "local"


@dataclass(frozen=True)
class EndOfPass:
    """The gradients as a backward pass left them: their versions, and the norm of a few."""

    marks: list[Mark]
    witness: Tensor | None


@dataclass
class Pending:
    """The micro-batches of the update under way."""

    sums: Tensor
    calls: Tensor
    scalars: Tensor
    end: EndOfPass
    stale: Tensor
    lengths: bool
    microbatches: int = 0
    touched: list[int] = field(default_factory=list)
    lost: list[Tensor] = field(default_factory=list)
