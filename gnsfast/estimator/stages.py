# SPDX-License-Identifier: Apache-2.0
"""The units and probe rows of all stages of a pipeline."""

from itertools import chain

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gnsfast.parallel import gathered
from gnsfast.probing import Unit

Label = tuple[str, str]


class Stages:
    """The units and probe rows of all pipeline stages, one stage after the other.

    If two stages have the same name (``0.weight``), all names get a prefix, such as ``stage0``.
    """

    def __init__(
        self, units: list[Unit], labels: list[Label], group: "dist.ProcessGroup | None"
    ) -> None:
        self.units, self.labels, self.rank = units, labels, 0
        self._first = self._row = 0
        if group is None:
            return
        found = gathered((units, labels), group)
        names = [{unit.parameter for unit in each} for each, _ in found]
        if len(set().union(*names)) < sum(map(len, names)):
            found = [_renamed(k, *each) for k, each in enumerate(found)]
        self.rank = dist.get_rank(group)
        before = found[: self.rank]
        self._first, self._row = (sum(len(each[i]) for each in before) for i in (0, 1))
        self.units, self.labels = (list(chain(*(each[i] for each in found))) for i in (0, 1))

    def of_units(self, t: Tensor) -> Tensor:
        """This stage's [..., K], padded with zeros to the units of all stages."""
        return F.pad(t, (self._first, len(self.units) - self._first - t.shape[-1]))

    def of_rows(self, t: Tensor) -> Tensor:
        """This stage's [..., R], padded with zeros to the probe rows of all stages."""
        return F.pad(t, (self._row, len(self.labels) - self._row - t.shape[-1]))

    def own_rows(self, t: Tensor, count: int) -> Tensor:
        """This stage's ``count`` of [..., R], the probe rows of all stages."""
        return t.narrow(-1, self._row, count)


def _renamed(stage: int, units: list[Unit], labels: list[Label]) -> tuple[list[Unit], list[Label]]:
    def name(part: str) -> str:
        return f"stage{stage}.{part}" if part else f"stage{stage}"

    return (
        [Unit(name(u.parameter), name(u.module), u.block) for u in units],
        [(name(path), name(p) if p else p) for path, p in labels],
    )
