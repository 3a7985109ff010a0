# SPDX-License-Identifier: Apache-2.0
"""What a process keeps of a parameter, and of sums over samples that have its shape.

Backward sees the whole parameter, also under FSDP2, and leaves this process' sums in its whole
shape. They are then added up over processes into what each of them keeps.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.parallel import Processes
from gnsfast.tensors import accumulate_dtype, is_dtensor


class Whole:
    """Every process keeps all of it, as under DistributedDataParallel."""

    def __init__(self, p: nn.Parameter, processes: Processes, group: Any) -> None:
        self._p: Any = p
        self._several, self._group = processes.world > 1, group
        self.share = 1 / processes.world
        """The share of this process in numbers that it has computed for the whole parameter."""

    def added(self, t: Tensor) -> Tensor | None:
        """What this process keeps of the sum over processes of ``t``, which is used up; None if
        that is nothing.
        """
        if self._several:
            dist.all_reduce(t, group=self._group)
        return t

    def grad(self) -> Tensor | None:
        """What this process keeps of ``.grad``; zeros without one."""
        p = self._p
        grad: Tensor = torch.zeros_like(p) if p.grad is None else p.grad.detach()
        return grad

    def total(self, sums: Tensor) -> Tensor:
        """Sums over all coordinates, from those over the coordinates that each process keeps."""
        return sums

    def part(self, whole: Tensor) -> Tensor | None:
        """What this process keeps of a tensor that every process has."""
        return whole

    def whole(self, part: Tensor | None) -> Tensor:
        """The reverse of ``part``, which all processes call together."""
        assert part is not None
        return part


class Shard(Whole):
    """Every process keeps its rows, as FSDP2 shards them; there may be none."""

    def __init__(self, p: nn.Parameter, processes: Processes, group: Any) -> None:
        super().__init__(p, processes, group)
        self._copies = processes.copies(p)

    def added(self, t: Tensor) -> Tensor | None:
        from torch.distributed.tensor import DTensor, Partial

        p = self._p
        terms = DTensor.from_local(t, p.device_mesh, [Partial()] * p.device_mesh.ndim)
        return terms.redistribute(placements=p.placements).to_local()

    def grad(self) -> Tensor | None:
        grad: Any = super().grad()
        return grad.to_local()  # type: ignore[no-any-return]

    def total(self, sums: Tensor) -> Tensor:
        sums = sums / self._copies
        if self._several:
            dist.all_reduce(sums, group=self._group)
        return sums

    def part(self, whole: Tensor) -> Tensor | None:
        from torch.distributed.tensor import distribute_tensor

        p = self._p
        return distribute_tensor(
            whole.to(p.device), p.device_mesh, p.placements, src_data_rank=None
        ).to_local()

    def whole(self, part: Tensor | None) -> Tensor:
        from torch.distributed.tensor import DTensor

        assert part is not None
        p = self._p
        size: Any = dict(shape=p.shape, stride=p.stride())  # else taken for those of even shards
        return DTensor.from_local(part, p.device_mesh, p.placements, **size).full_tensor()


class Owned(Whole):
    """Process ``owner`` keeps all of it, and second moments of ``shape``."""

    def __init__(
        self, p: nn.Parameter, processes: Processes, group: Any, owner: int, shape: tuple[int, ...]
    ) -> None:
        super().__init__(p, processes, group)
        self._owner, self._shape = owner, shape
        self._mine = not self._several or dist.get_rank(group) == owner
        self.share = float(self._mine)

    def added(self, t: Tensor) -> Tensor | None:
        if self._several:
            dist.reduce(t, group_dst=self._owner, group=self._group)
        return self.part(t)

    def grad(self) -> Tensor | None:
        grad: Any = super().grad()
        return self.part(grad.full_tensor())

    def part(self, whole: Tensor) -> Tensor | None:
        return whole if self._mine else None

    def whole(self, part: Tensor | None) -> Tensor:
        if part is None:
            p = self._p
            part = torch.empty(self._shape, dtype=accumulate_dtype(p.dtype), device=p.device)
        if self._several:
            dist.broadcast(part, group_src=self._owner, group=self._group)
        return part


def held(parameters: Mapping[str, nn.Parameter], on: Processes, group: Any) -> dict[str, Whole]:
    """How each parameter is kept where its coordinates are independent."""
    return {
        name: (Shard if is_dtensor(p) else Whole)(p, on, group) for name, p in parameters.items()
    }


def held_by_matrix(
    matrices: Mapping[str, nn.Parameter], on: Processes, group: Any
) -> dict[str, Whole]:
    """How each matrix is kept where all of it is needed, with second moments of its smaller side.
    Those that FSDP2 shards are spread over processes, so that these take equal times.
    """
    found: dict[str, Whole] = {}
    load = [0] * on.world
    by_cost = sorted(matrices.items(), key=lambda of: of[1].numel() * min(of[1].shape))
    for name, p in reversed(by_cost):
        if not is_dtensor(p):
            found[name] = Whole(p, on, group)
            continue
        owner, side = load.index(min(load)), min(p.shape)
        load[owner] += p.numel() * side
        found[name] = Owned(p, on, group, owner, (side, side))
    return {name: found[name] for name in matrices}
