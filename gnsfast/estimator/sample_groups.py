# SPDX-License-Identifier: Apache-2.0
"""p and q of groups of samples (data domains), micro-batch by micro-batch.

The summed gradient of a group's samples is known inside of one micro-batch alone, so that each
measures by itself, as ``source="local"`` does for all samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.estimator.adam_metric import taking
from gnsfast.estimator.settings import Settings
from gnsfast.functional import Groups
from gnsfast.layers import Probed
from gnsfast.noise_scale import NoiseScale, loss_factors, summarize_group
from gnsfast.parallel import Processes, gathered
from gnsfast.probing import ProbeSlab

WIDTH = 2 + loss_factors.SCALARS
"""Numbers of a group in an update: p, q and the scalars of its samples' weights."""


class GroupRows:
    """A second probe for each of some modules, [P, G], row views of one tensor per device."""

    def __init__(self, modules: Mapping[str, Probed], count: int) -> None:
        self.modules = modules
        at: dict[str, tuple[torch.device, slice]] = {}
        sizes: dict[torch.device, int] = {}
        for path, module in modules.items():
            own = module.probed_parameters()
            device = next(iter(own.values())).device
            first = sizes.get(device, 0)
            sizes[device] = first + len(own)
            at[path] = device, slice(first, sizes[device])
        self.grad = {d: torch.zeros(n, count, device=d) for d, n in sizes.items()}
        self.probes: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        for path, (device, rows) in at.items():
            probe = torch.zeros_like(self.grad[device][rows]).requires_grad_()
            self._views[path] = self.grad[device][rows]
            self.probes[path] = probe

    def open(self, members: Sequence[Tensor]) -> None:
        """Let the next pass fill the rows; ``members``: the samples of each group."""
        here = {}
        for device, grad in self.grad.items():
            grad.zero_()
            here[device] = tuple(index.to(device, non_blocking=True) for index in members)
        for path, module in self.modules.items():
            probe = self.probes[path]
            probe.grad = self._views[path]  # a refused create_graph=True has put another there
            module._groups = Groups(probe, here[probe.device])

    def sums(self, device: torch.device) -> Tensor:
        """[G] float64: the squared norms of the groups' summed gradients, over all rows."""
        parts = [g.sum(0, dtype=torch.float64).to(device) for g in self.grad.values()]
        return torch.stack(parts).sum(0)


class GroupMeasure:
    """What updates say of each group, over the parameters whose layers take groups."""

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        slab: ProbeSlab,
        processes: Processes,
        device: torch.device,
    ) -> None:
        names = self.names = settings.groups
        self._device = device
        if names and processes.tensor > 1:
            raise NotImplementedError("groups have no noise scale in a tensor parallel model")
        together = gathered(names, settings.group) if names and processes.world > 1 else []
        if len(set(together)) > 1:
            raise ValueError(
                "processes name other groups, or the same in another order: give "
                "GradientNoiseScale(groups=[...]) the same list on each"
            )
        self._index = {name: k for k, name in enumerate(names)}
        self._modules = {
            path: m
            for path, m in (taking(model, slab).items() if names else ())
            if m._tie is None  # the links of a tie are not those of groups
        }
        self.left_out = tuple(
            name
            for name, rows in slab.rows.items()
            if not {path for path, _, _ in rows} <= self._modules.keys()
        )
        if names and not self._modules:
            raise ValueError(
                "no layer of the model has norms of groups (Linear, Embedding, LayerNorm, RMSNorm "
                "and their like do, where no weight is tied): leave groups out"
            )
        self._rows: GroupRows | None = None
        self._members: list[Tensor] = []
        self._sums = torch.zeros(len(names), WIDTH, dtype=torch.float64, device=device)

    @property
    def width(self) -> int:
        """Numbers of an update."""
        return len(self.names) * WIDTH

    @property
    def probes(self) -> list[Tensor]:
        """Those of the open micro-batch."""
        return [] if self._rows is None else [*self._rows.probes.values()]

    def members_of(self, of_samples: Any, num_samples: int) -> list[Tensor]:
        """The samples of each group, from each sample's group.

        Raises:
            ValueError: where samples have no group, another number of them, or an unknown one.
        """
        if (of_samples is None) != (not self.names):
            raise ValueError(
                "groups are given to GradientNoiseScale(groups=[...]), their names, and to each "
                "gns.microbatch(n, groups=...), one for each sample: give both or neither"
            )
        if of_samples is None:
            return []
        if isinstance(of_samples, Tensor) and of_samples.ndim != 1:
            raise ValueError(
                f"groups must be one for each sample, not of shape {list(of_samples.shape)}"
            )
        told = of_samples.tolist() if isinstance(of_samples, Tensor) else list(of_samples)
        if len(told) != num_samples:
            raise ValueError(f"groups names {len(told)} samples, num_samples is {num_samples}")
        if odd := [g for g in told if g not in self._index]:
            raise ValueError(f"group {odd[0]!r} is none of {', '.join(map(repr, self.names))}")
        of_B = torch.tensor([self._index[g] for g in told])
        return [(of_B == k).nonzero()[:, 0] for k in range(len(self.names))]

    def open(self, members: list[Tensor]) -> None:
        """Let the next pass say what each group's samples sum to."""
        self._members = members
        if members:
            self._rows = self._rows or GroupRows(self._modules, len(self.names))
            self._rows.open(members)

    def add(
        self,
        slab: ProbeSlab,
        num_samples: int,
        tokens: int | Tensor | None,
        scale: float | Tensor,
        loss_reduction: str,
        without_scale: Callable[[Tensor], Tensor],
    ) -> None:
        """Take what the pass left."""
        if not self._members:
            return
        assert self._rows is not None
        assert tokens is None or isinstance(tokens, Tensor)
        p_B = torch.zeros(num_samples, dtype=torch.float64, device=self._device)
        for path in self._modules:
            p_B += slab.module_sqnorms(path).to(self._device, non_blocking=True)
        q_G = self._rows.sums(self._device)
        a: float | Tensor = scale
        if loss_reduction == "mean":
            total = num_samples if tokens is None else tokens.to(self._device).double().sum()
            a = scale / total
        for k, index in enumerate(self._members):
            if not len(index):
                continue
            own = None if tokens is None else tokens[index.to(tokens.device)]
            said = loss_factors.microbatch_scalars(len(index), own, a, "sum", True, self._device)
            said = torch.where(said[0] > 0, said, 0.0)  # without tokens there is no sample
            p = p_B[index.to(self._device, non_blocking=True)].sum()
            self._sums[k] += torch.cat([without_scale(torch.stack([p, q_G[k]])), said])

    def start(self, first: bool) -> None:
        """Begin a micro-batch; the ``first`` of an update finds what a refused one has left."""
        if first:
            self.discard()

    def finish(self) -> list[Tensor]:
        """This process's share of the update's numbers."""
        found, self._sums = self._sums, torch.zeros_like(self._sums)
        return [found.flatten()]

    def discard(self) -> None:
        """Forget the update under way."""
        self._sums = torch.zeros_like(self._sums)

    def added(self, result: NoiseScale, told: Tensor, decay: float | None) -> NoiseScale:
        """The result with what the window [U, width] says of each group."""
        if not self.names:
            return result
        parts = told.unflatten(1, (len(self.names), WIDTH)).unbind(1)
        groups = {
            name: summarize_group(part, self.left_out, decay)
            for name, part in zip(self.names, parts)
        }
        return replace(result, per_group=groups)
