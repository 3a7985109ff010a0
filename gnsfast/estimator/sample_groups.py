# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of groups of samples (data domains), micro-batch by micro-batch.

The summed gradient of a group is known only within one micro-batch. Each micro-batch is therefore
measured by itself, as ``source="local"`` does for all samples.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.estimator.exchange import Window
from gnsfast.estimator.records import Pass, Update
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Block, Setup, Side, of_samples
from gnsfast.following import Facts
from gnsfast.noise_scale import NoiseScale, loss_factors, summarize_group
from gnsfast.parallel import gathered

WIDTH = 2 + loss_factors.SCALARS
"""How many numbers a group has in an update: p, q and the scalars of its samples' weights."""


class GroupRows(NamedTuple):
    """What a pass left: the samples of each group, the columns of samples, and the rows from
    ``ProbeSlab.groups``.
    """

    members: list[Tensor]
    slots: int
    rows: list[Tensor]


class GroupMeasure(Side):
    """The measurement of each group, over all parameters that have norms."""

    name = "groups"

    @staticmethod
    def is_asked(settings: Settings) -> bool:
        return bool(settings.groups)

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
        self._members: list[Tensor] = []
        self._slots = 0

    def open(self, block: Block) -> Mapping[str, Facts]:
        """Raises ValueError if groups are unknown, or their number is not that of the samples."""
        given = block.groups
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
        group_B = torch.tensor([self._index[g] for g in groups])
        self._members = [(group_B == k).nonzero()[:, 0] for k in range(len(self._groups))]
        self._slots, asked = block.slots, block.groups_of(self._members)
        leaves = self.setup.slab.followed.leaves
        return {leaf.name: Facts(groups=asked.to(leaf.parameter.device)) for leaf in leaves}

    def passed(self) -> GroupRows:
        return GroupRows(self._members, self._slots, self.setup.slab.groups())

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        return torch.stack([self._of_pass(each, device) for each in update.passes]).sum(0)

    def _of_pass(self, each: Pass, device: torch.device) -> Tensor:
        """This process's share of a micro-batch's numbers."""
        found = torch.zeros(len(self._groups), WIDTH, dtype=torch.float64, device=device)
        tokens: Any = each.tokens
        members, slots, rows = each.left[self.name]
        sums = torch.stack([t.sum(0, dtype=torch.float64).to(device) for t in rows]).sum(0)
        p_B, q_G = sums[:slots], sums[slots + 2 :]
        a: float | Tensor = each.scale
        if self.setup.settings.loss_reduction == "mean":
            total = each.num_samples if tokens is None else tokens.to(device).double().sum()
            a = each.scale / total
        for k, index in enumerate(members):
            if not len(index):
                continue
            own = None if tokens is None else tokens[index.to(tokens.device)]
            scalars = loss_factors.microbatch_scalars(len(index), own, a, "sum", True, device)
            scalars = torch.where(scalars[0] > 0, scalars, 0.0)  # a group of padding has no sample
            p = p_B[index.to(device, non_blocking=True)].sum()
            of_group = loss_factors.without_scale(torch.stack([p, q_G[k]]), each.loss_scale)
            found[k] = torch.cat([of_group, scalars])
        return found.flatten()

    def added(
        self, result: NoiseScale, numbers: Tensor, window: Window, decay: float | None
    ) -> NoiseScale:
        parts = numbers.unflatten(1, (len(self._groups), WIDTH)).unbind(1)
        groups = {name: summarize_group(part, (), decay) for name, part in zip(self._groups, parts)}
        return replace(result, per_group=groups)
