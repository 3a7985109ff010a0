# SPDX-License-Identifier: Apache-2.0
"""The protocol of what is measured beside the norms: a metric, dual norms, groups and clusters of
samples.

A new one is a file with a subclass of ``Side``, and a line in ``observer.SIDES``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.settings import Settings
from gnsfast.following import Facts
from gnsfast.parallel import Processes
from gnsfast.probing import ProbeSlab


class Setup(NamedTuple):
    """What a side measures: the model and its probes, for which settings, and where."""

    model: nn.Module
    slab: ProbeSlab
    settings: Settings
    processes: Processes
    device: torch.device

    @property
    def rank(self) -> int:
        """The number of this process among those that are measured together."""
        return dist.get_rank(self.settings.group) if self.processes.world > 1 else 0


class Block(NamedTuple):
    """A pass that begins: its samples, the number of its update, the user's ``groups``, ``ids`` and
    ``clusters`` of the samples; how many passes of the update came ``before`` it, and the ``slots``
    that it has for samples, of which those of packed documents are more.
    """

    num_samples: int
    update: int
    groups: Any = None
    ids: Any = None
    clusters: Any = None
    before: int = 0
    slots: int = 0


class Side:
    """Something that is measured beside the norms, in the order of its methods. What a pass or an
    update leaves is kept as it is, tensors in lists, tuples or None: the arithmetic follows later.
    """

    name = ""
    """That of ``Settings.sides``."""
    width = 0
    """How many numbers it has in an update."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def open(self, block: Block) -> Mapping[str, Facts]:
        """What backward is to measure of each parameter in the next pass."""
        return {}

    def start(self) -> None:
        """Begin to watch the pass, which is open."""

    def stop(self) -> None:
        """The reverse of ``start``, also for a pass that is discarded."""

    def passed(self) -> Any:
        """What the pass has left, after ``stop``."""

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> Any:
        """What an update of ``passes`` has left. ``.grad`` has the factor ``loss_scale``."""

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        """This process's share of the numbers, float64 [width], from what was left: ``left`` of the
        update, and of each of its passes, under the side's name.
        """
        return torch.zeros(0, dtype=torch.float64, device=device)

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        """Its fields of ``NoiseScale``, from its numbers [U, width] in those of the ``Window``."""
        return {}

    def leave_out(self, names: Sequence[str]) -> None:
        """Measure some parameters no more, also in a pass that has just been opened."""

    def state(self, numbers: Tensor) -> dict[str, Any]:
        """What past updates have left, on the CPU, beside the numbers [U, width] of the window."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""


def joined(sides: Sequence[Mapping[str, Facts]]) -> dict[str, Facts]:
    """What several sides ask of each parameter."""
    return {name: facts for side in sides for name, facts in side.items()}


def of_samples(name: str, given: Sequence[Any] | Tensor, num_samples: int) -> list[Any]:
    """Argument ``name`` of a block, which has an entry for each sample, as a list.

    Raises ValueError if there are not as many entries as samples.
    """
    found = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(found) != num_samples:
        raise ValueError(f"{name} has length {len(found)}, but num_samples is {num_samples}")
    return found
