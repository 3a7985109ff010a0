# SPDX-License-Identifier: Apache-2.0
"""Joins the units and probe rows of all pipeline stages, and the share that they cover."""

from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.parallel import gathered
from gnsfast.probing import ProbeSlab


class Part(NamedTuple):
    """One stage: its units, which are the parameters that have norms, the number of its trainable
    elements, and its other trainable parameters, with their numbers of elements.
    """

    units: list[str]
    trainable: int
    left_out: dict[str, int]


class Stages:
    """The units and probe rows of all pipeline stages, one stage after the other.

    If two stages have the same name (``0.weight``), all names get a prefix, such as ``stage0``.
    """

    def __init__(
        self, model: nn.Module, slab: ProbeSlab, group: "dist.ProcessGroup | None"
    ) -> None:
        trainable = {
            name: 0 if nn.parameter.is_lazy(p) else p.numel()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        left_out = {n: count for n, count in trainable.items() if n not in slab.parameters}
        found = [Part([*slab.parameters], sum(trainable.values()), left_out)]
        self.rank = 0
        if group is not None:
            found, self.rank = gathered(found[0], group), dist.get_rank(group)
        names = [{*part.units, *part.left_out} for part in found]
        if len(set().union(*names)) < sum(map(len, names)):
            found = [_renamed(k, part) for k, part in enumerate(found)]
        before = found[: self.rank]
        self._first = sum(len(part.units) for part in before)
        self.units = list(chain(*(part.units for part in found)))
        self._trainable = sum(part.trainable for part in found)
        self._left_out = {name: n for part in found for name, n in part.left_out.items()}

    def fields(self) -> dict[str, Any]:
        """The fields of ``NoiseScale`` that say which of the trainable elements it covers."""
        covered = 1.0 - sum(self._left_out.values()) / max(1, self._trainable)
        return {"covered": covered, "left_out": tuple(self._left_out)}

    def of_units(self, t: Tensor) -> Tensor:
        """Pad this stage's [..., K] with zeros to the units of all stages."""
        return F.pad(t, (self._first, len(self.units) - self._first - t.shape[-1]))

    def own_units(self, t: Tensor, count: int) -> Tensor:
        """The ``count`` units of this stage in [..., K], the units of all stages."""
        return t.narrow(-1, self._first, count)


def _renamed(stage: int, part: Part) -> Part:
    return Part(
        [f"stage{stage}.{name}" for name in part.units],
        part.trainable,
        {f"stage{stage}.{name}": count for name, count in part.left_out.items()},
    )
