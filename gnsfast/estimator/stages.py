# SPDX-License-Identifier: Apache-2.0
"""Joins the units and probe rows of all pipeline stages, and the share that they cover."""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnsfast.parallel import gathered
from gnsfast.probing import ProbeSlab


class Stages:
    """The units and probe rows of all pipeline stages, one stage after the other. A unit is a
    parameter that has norms, by name.

    If two stages have the same name (``0.weight``), all names get a prefix, such as ``stage0``.
    """

    def __init__(
        self, model: nn.Module, slab: ProbeSlab, group: "dist.ProcessGroup | None"
    ) -> None:
        sizes = {
            name: 0 if nn.parameter.is_lazy(p) else p.numel()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        found = [([*slab.parameters], sizes)]
        self.rank = 0
        if group is not None:
            found, self.rank = gathered(found[0], group), dist.get_rank(group)
        if len({name for _, own in found for name in own}) < sum(len(own) for _, own in found):
            found = [
                ([f"stage{k}.{name}" for name in units], {f"stage{k}.{n}": own[n] for n in own})
                for k, (units, own) in enumerate(found)
            ]
        self._first = sum(len(units) for units, _ in found[: self.rank])
        self.units = [name for units, _ in found for name in units]
        self._sizes = {name: size for _, own in found for name, size in own.items()}

    def fields(self) -> dict[str, Any]:
        """The fields of ``NoiseScale`` that say which of the trainable elements it covers."""
        left_out = {*self._sizes}.difference(self.units)
        missing = sum(self._sizes[name] for name in left_out)
        return {
            "covered": 1.0 - missing / max(1, sum(self._sizes.values())),
            "left_out": tuple(name for name in self._sizes if name in left_out),
        }

    def of_units(self, t: Tensor) -> Tensor:
        """Pad this stage's [..., K] with zeros to the units of all stages."""
        if t.shape[-1] == len(self.units):
            return t
        return F.pad(t, (self._first, len(self.units) - self._first - t.shape[-1]))

    def own_units(self, t: Tensor, count: int) -> Tensor:
        """The ``count`` units of this stage in [..., K], the units of all stages."""
        return t.narrow(-1, self._first, count)
