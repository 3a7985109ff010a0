# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of groups of samples (data domains), micro-batch by micro-batch.

The summed gradient of a group is known only within one micro-batch. Each micro-batch is therefore
measured by itself, as ``source="local"`` does for all samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.side import Block, Setup, Side, of_samples
from gnsfast.following import Facts
from gnsfast.functional import Groups
from gnsfast.noise_scale import loss_factors, summarize_group
from gnsfast.parallel import gathered

WIDTH = 2 + loss_factors.SCALARS
"""How many numbers a group has in an update: p, q and the scalars of its samples' weights."""


class GroupRows(NamedTuple):
    """What a pass left: the group of each column of samples, which is one more than there are
    ``groups`` for a column without a sample, and the rows from ``ProbeSlab.each``.
    """

    group_S: Tensor
    groups: int
    rows: list[Tensor]


class GroupedSamples(Side):
    """Samples in groups, whose summed gradients a pass measures, over all parameters that have
    norms.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._block: Any = None
        self._left = GroupRows(torch.zeros(0, dtype=torch.int64), 0, [])
        self._facts: dict[torch.device, Facts] = {}

    def _ask(self, group_B: list[int], groups: int, block: Block) -> Mapping[str, Facts]:
        """Measure the groups of the samples, numbered from 0."""
        leaves = self.setup.slab.followed.leaves
        if self._block != (group_B, groups, block.slots):
            self._block = group_B, groups, block.slots
            group_S = torch.tensor(group_B + [groups] * (block.slots - len(group_B)))
            self._left = GroupRows(group_S, groups, [])
            asked = Groups(group_S.argsort(stable=True), group_S.bincount(minlength=groups))
            devices = {leaf.parameter.device for leaf in leaves}
            self._facts = {device: Facts(groups=asked.to(device)) for device in devices}
        return {leaf.name: self._facts[leaf.parameter.device] for leaf in leaves}

    def passed(self) -> GroupRows:
        return self._left._replace(rows=self.setup.slab.each())

    def of_groups(self, each: Pass, device: torch.device, by_itself: bool) -> Tensor:
        """This process's share of a micro-batch's numbers of each group, [G, WIDTH]. ``by_itself``
        says that what other micro-batches divide their losses by does not matter.
        """
        group_S, G, rows = each.left[self.name]
        S, tokens = len(group_S), each.tokens
        sums = torch.stack([t.sum(0, dtype=torch.float64).to(device) for t in rows]).sum(0)
        lengths_S = torch.zeros(S, dtype=torch.float64, device=device)
        lengths_S[: each.num_samples] = 1.0 if tokens is None else torch.as_tensor(tokens)
        is_mean = self.setup.settings.loss_reduction == "mean"
        a: Any = each.scale / lengths_S.sum() if is_mean else each.scale
        of_samples = torch.stack([sums[:S], (lengths_S > 0).double(), lengths_S, lengths_S**2])
        index = group_S.to(device, non_blocking=True)
        found = of_samples.new_zeros(4, G + 1).index_add_(1, index, of_samples)
        p, n, total, squares = found[:, :G]
        parts = loss_factors.scalars_of(n, total, squares, 0.0, a, local=True)
        scalars_SG = torch.stack([n.new_zeros(G) + part for part in parts])
        scalars_SG = torch.where(n > 0, scalars_SG, 0.0)  # a group of padding has no sample
        norms_2G = torch.stack([p, sums[S + 2 : S + 2 + G]])
        norms_2G = loss_factors.without_scale(norms_2G, each.loss_scale)
        if not by_itself:
            return torch.cat([norms_2G, scalars_SG]).T
        return torch.cat(loss_factors.per_token(norms_2G.T, scalars_SG.T), 1)


class GroupMeasure(GroupedSamples):
    """The measurement of each group by itself."""

    name = "groups"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        names = self._groups = setup.settings.groups
        if setup.processes.world > 1 and len({*gathered(names, setup.settings.group)}) > 1:
            raise ValueError(
                "The processes name different groups, or name them in another order. Give "
                "GradientNoiseScale(groups=[...]) the same list on each."
            )
        self.width = len(names) * WIDTH
        self._index = {name: k for k, name in enumerate(names)}

    def open(self, block: Block) -> Mapping[str, Facts]:
        """Raises ValueError if groups are unknown, or their number is not that of the samples."""
        given: Sequence[Any] | Tensor = block.groups
        if isinstance(given, Tensor) and given.ndim != 1:
            raise ValueError(
                f"groups must hold one group for each sample, but has shape {list(given.shape)}"
            )
        groups = of_samples("groups", given, block.num_samples)
        if odd := [g for g in groups if g not in self._index]:
            raise ValueError(
                f"group {odd[0]!r} is not one of {', '.join(map(repr, self._groups))}, which "
                "GradientNoiseScale(groups=[...]) named"
            )
        return self._ask([self._index[g] for g in groups], len(self._groups), block)

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        found = [self.of_groups(each, device, by_itself=True) for each in update.passes]
        return torch.stack(found).sum(0).flatten()

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        parts = numbers.unflatten(1, (len(self._groups), WIDTH)).unbind(1)
        groups = {name: summarize_group(part, (), decay) for name, part in zip(self._groups, parts)}
        return {"per_group": groups}
