# SPDX-License-Identifier: Apache-2.0
"""Measures clusters of samples, such as the rollouts of a prompt, beside single samples.

The squared norms of the clusters' summed gradients come from the pass that gives those of the
samples: each cluster is a group of samples (``functional.Groups``), whose operators are called once
for each cluster, so that no product is computed twice.
"""

from collections.abc import Mapping
from numbers import Integral
from reprlib import repr
from typing import Any

import torch
from torch import Tensor

from gnsfast.arguments import integer
from gnsfast.errors import ObservationError
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.sample_groups import GroupedSamples
from gnsfast.estimator.side import Block, Setup, of_samples
from gnsfast.following import Facts
from gnsfast.noise_scale import CLUSTER_NUMBERS, summarize_clusters
from gnsfast.parallel import gathered

APART = (
    "samples of cluster {} are in {}, but a cluster must be in one micro-batch of an update, on "
    "one process: what its parts have in common is taken for the gradient. Put each cluster into "
    "one micro-batch, or measure each micro-batch by itself: GradientNoiseScale(model, "
    "source='local')."
)


class ClusterMeasure(GroupedSamples):
    """The measurement of clusters, over all parameters that have norms."""

    name = "clusters"
    width = CLUSTER_NUMBERS

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._ids: set[Any] = set()  # of the update under way
        # A micro-batch that is measured by itself may have a part of a cluster.
        self._is_local = setup.settings.local
        self._has_compared = self._is_local or setup.processes.world == 1

    def open(self, block: Block) -> Mapping[str, Facts]:
        """Raises ValueError if clusters do not divide the samples, or do not say whose is each."""
        cluster_B = clusters_of(block.clusters, block.num_samples)
        index = {name: k for k, name in enumerate(dict.fromkeys(cluster_B))}
        if not block.before:
            self._ids = set()
        if not self._is_local and not isinstance(block.clusters, Integral):
            for name in index:
                if name in self._ids:
                    raise ValueError(APART.format(repr(name), "two micro-batches of an update"))
            self._ids.update(index)
        return self._ask([index[name] for name in cluster_B], len(index), block)

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> None:
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
        local = self.setup.settings.local
        found = torch.cat([self.of_groups(each, device, by_itself=local) for each in update.passes])
        _, k, _, _, clusters, _, w, *_ = found.sum(0)
        return torch.stack([k, w, clusters])

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        local = self.setup.settings.local
        found = summarize_clusters(*window.whole, numbers, window.scalars, local, decay)
        return {"clusters": found}


def clusters_of(clusters: Any, num_samples: int) -> list[Any]:
    """The cluster of each sample, perhaps from the size of all clusters."""
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
    return of_samples("clusters", clusters, num_samples)
