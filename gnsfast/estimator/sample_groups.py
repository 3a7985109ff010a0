# SPDX-License-Identifier: Apache-2.0
"""Measures p and q of groups of samples (data domains), micro-batch by micro-batch.

The summed gradient of a group is known only within one micro-batch. Each micro-batch is therefore
measured by itself, as ``source="local"`` does for all samples.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.combinations import GROUPS, TENSOR_PARALLEL, refuse
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import NoiseScale, loss_factors, summarize_group
from gnsfast.parallel import Processes, gathered
from gnsfast.probing import ProbeSlab

WIDTH = 2 + loss_factors.SCALARS
"""How many numbers a group has in an update: p, q and the scalars of its samples' weights."""


class GroupRows(NamedTuple):
    """What a pass left: the samples of each group, and the rows from ``ProbeSlab.groups``."""

    members: list[Tensor]
    rows: list[Tensor]


class GroupMeasure:
    """The measurement of each group, over all parameters that have norms."""

    def __init__(
        self,
        settings: Settings,
        processes: Processes,
    ) -> None:
        names = self.names = settings.groups
        if names and processes.tensor > 1:
            refuse([GROUPS, TENSOR_PARALLEL])
        together = gathered(names, settings.group) if names and processes.world > 1 else []
        if len(set(together)) > 1:
            raise ValueError(
                "The processes name different groups, or name them in another order. Give "
                "GradientNoiseScale(groups=[...]) the same list on each."
            )
        self._index = {name: k for k, name in enumerate(names)}
        self.left_out: tuple[str, ...] = ()
        self._members: list[Tensor] = []
        self._loss_reduction = settings.loss_reduction

    @property
    def width(self) -> int:
        """How many numbers all groups together have in an update."""
        return len(self.names) * WIDTH

    def open(self, of_samples: Any, num_samples: int) -> list[Tensor]:
        """The samples of each group in the next pass. ``of_samples`` names each sample's group.

        Raises:
            ValueError: if groups are missing or unknown, or their number is not ``num_samples``.
        """
        if (of_samples is None) != (not self.names):
            raise ValueError(
                "Groups need two arguments: GradientNoiseScale(groups=[...]) names them, and "
                "gns.microbatch(n, groups=...) gives one for each sample. Give both or neither."
            )
        self._members = []
        if of_samples is None:
            return []
        if isinstance(of_samples, Tensor) and of_samples.ndim != 1:
            raise ValueError(
                "groups must hold one group for each sample, but has shape "
                f"{list(of_samples.shape)}"
            )
        groups = of_samples.tolist() if isinstance(of_samples, Tensor) else list(of_samples)
        if len(groups) != num_samples:
            raise ValueError(f"groups has length {len(groups)}, but num_samples is {num_samples}")
        if odd := [g for g in groups if g not in self._index]:
            raise ValueError(
                f"group {odd[0]!r} is not one of {', '.join(map(repr, self.names))}, which "
                "GradientNoiseScale(groups=[...]) named"
            )
        group_B = torch.tensor([self._index[g] for g in groups])
        self._members = [(group_B == k).nonzero()[:, 0] for k in range(len(self.names))]
        return self._members

    def rows(self, slab: ProbeSlab) -> GroupRows | None:
        """What the pass left."""
        return GroupRows(self._members, slab.groups()) if self._members else None

    def numbers(self, each: Any, device: torch.device) -> Tensor:
        """This process's share of a micro-batch's numbers, [G, WIDTH]."""
        found = torch.zeros(len(self.names), WIDTH, dtype=torch.float64, device=device)
        if each.groups is None:
            return found
        tokens, (members, rows) = each.tokens, each.groups
        B, G = sum(map(len, members)), len(members)
        sums = torch.stack([t.sum(0, dtype=torch.float64).to(device) for t in rows]).sum(0)
        p_B, q_G = sums[:B], sums[-G:]
        a: float | Tensor = each.scale
        if self._loss_reduction == "mean":
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
        return found

    def added(self, result: NoiseScale, numbers: Tensor, decay: float | None) -> NoiseScale:
        """``result`` with the noise scale of each group, from the window's numbers [U, width]."""
        if not self.names:
            return result
        parts = numbers.unflatten(1, (len(self.names), WIDTH)).unbind(1)
        groups = {
            name: summarize_group(part, self.left_out, decay)
            for name, part in zip(self.names, parts)
        }
        return replace(result, per_group=groups)
