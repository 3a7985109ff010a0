# SPDX-License-Identifier: Apache-2.0
"""Measures clusters of samples, such as the rollouts of a prompt, beside single samples.

The squared norms of the clusters' summed gradients come from the pass that gives those of the
samples: each cluster is a group of samples (``functional.Groups``), whose operators are called once
for each cluster, so that no product is computed twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from reprlib import repr
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.arguments import integer
from gnsfast.errors import ObservationError
from gnsfast.estimator.exchange import Window
from gnsfast.estimator.records import Pass, Update
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Block, Setup, Side, of_samples
from gnsfast.following import Facts
from gnsfast.noise_scale import CLUSTER_NUMBERS, NoiseScale, loss_factors, summarize_clusters
from gnsfast.parallel import gathered

APART = (
    "samples of cluster {} are in {}, but a cluster must be in one micro-batch of an update, on "
    "one process: what its parts have in common is taken for the gradient. Put each cluster into "
    "one micro-batch, or measure each micro-batch by itself: GradientNoiseScale(model, "
    "source='local')."
)


class ClusterRows(NamedTuple):
    """What a pass left: the cluster of each sample, their number, the columns of samples, and the
    rows from ``ProbeSlab.groups``.
    """

    cluster_B: Tensor
    clusters: int
    slots: int
    rows: list[Tensor]


class ClusterMeasure(Side):
    """The measurement of clusters, over all parameters that have norms."""

    name = "clusters"
    width = CLUSTER_NUMBERS

    @staticmethod
    def is_asked(settings: Settings) -> bool:
        return settings.clusters

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._ids: set[Any] = set()  # of the update under way
        # A micro-batch that is measured by itself may have a part of a cluster.
        self._is_local = setup.settings.local
        self._has_compared = self._is_local or setup.processes.world == 1
        self._members: list[list[int]] = []
        self._slots = 0
        self._facts: dict[torch.device, Facts] = {}
        self._cluster_B = torch.zeros(0, dtype=torch.int64)

    def open(self, block: Block) -> Mapping[str, Facts]:
        """Raises ValueError if clusters do not divide the samples, or do not say whose is each."""
        found = members_of(block.clusters, block.num_samples)
        if not block.before:
            self._ids = set()
        if not self._is_local and not isinstance(block.clusters, Integral):
            for name in found:
                if name in self._ids:
                    raise ValueError(APART.format(repr(name), "two micro-batches of an update"))
            self._ids.update(found)
        members = [*found.values()]
        leaves = self.setup.slab.followed.leaves
        if members != self._members or block.slots != self._slots:
            self._members, self._slots = members, block.slots
            self._cluster_B = torch.zeros(block.num_samples, dtype=torch.int64)
            for k, own in enumerate(members):
                self._cluster_B[own] = k
            groups = block.groups_of([*map(torch.tensor, members)])
            devices = {leaf.parameter.device for leaf in leaves}
            self._facts = {device: Facts(groups=groups.to(device)) for device in devices}
        return {leaf.name: self._facts[leaf.parameter.device] for leaf in leaves}

    def passed(self) -> ClusterRows:
        return ClusterRows(
            self._cluster_B, len(self._members), self._slots, self.setup.slab.groups()
        )

    def finish(self, passes: list[Pass], by_probe: bool, loss_scale: Tensor | None) -> None:
        if self._has_compared:
            return
        self._has_compared = True
        seen: set[Any] = set()
        for ids in gathered(self._ids, self.setup.settings.group):
            if both := seen & ids:
                raise ObservationError(
                    APART.format(repr(both.pop()), "the batches of two processes")
                )
            seen |= ids

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        return torch.stack([self._of_pass(each, device) for each in update.passes]).sum(0)

    def _of_pass(self, each: Pass, device: torch.device) -> Tensor:
        """This process's share of a micro-batch's numbers."""
        cluster_B, clusters, slots, rows = each.left[self.name]
        columns = slice(slots + 2, slots + 2 + clusters)
        k = torch.stack([t[:, columns].sum(dtype=torch.float64).to(device) for t in rows]).sum()
        lengths_B = torch.ones(len(cluster_B), dtype=torch.float64, device=device)
        if isinstance(each.tokens, Tensor):
            lengths_B = each.tokens.to(device, torch.float64)
        a: Any = each.scale
        if self.setup.settings.loss_reduction == "mean":
            a = a / lengths_B.sum()
        weights = lengths_B.new_zeros(clusters).index_add_(0, cluster_B.to(device), a * lengths_B)
        k = loss_factors.without_scale(k, each.loss_scale)
        return torch.stack([k, weights.square().sum(), (weights > 0).sum().double()])

    def added(
        self, result: NoiseScale, numbers: Tensor, window: Window, decay: float | None
    ) -> NoiseScale:
        norms, local = (window.p.sum(1), window.whole), self.setup.settings.local
        found = summarize_clusters(*norms, numbers, window.scalars, local, decay)
        return replace(result, clusters=found)


def members_of(clusters: Any, num_samples: int) -> dict[Any, list[int]]:
    """The samples of each cluster, from their size or from the cluster of each sample."""
    if isinstance(clusters, Integral):
        size = integer("clusters", clusters, least=2)
        if num_samples % size:
            raise ValueError(
                f"clusters={size} says that every {size} consecutive samples are a cluster, and "
                f"num_samples is {num_samples}. Where clusters have other sizes, give the cluster "
                "of each sample: clusters=torch.tensor([...])."
            )
        clusters = [k // size for k in range(num_samples)]
    if isinstance(clusters, (set, frozenset, Mapping, str)) or getattr(clusters, "ndim", 1) != 1:
        raise ValueError(
            "clusters must be the number of consecutive samples in a cluster, or a list or a "
            f"tensor with the cluster of each sample, not {clusters!r}"
        )
    found: dict[Any, list[int]] = {}
    for b, name in enumerate(of_samples("clusters", clusters, num_samples)):
        found.setdefault(name, []).append(b)
    return found
