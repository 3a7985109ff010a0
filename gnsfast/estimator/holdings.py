# SPDX-License-Identifier: Apache-2.0
"""The part that a process keeps of a parameter and of two sums over samples: that of the second
moments, and that of every second gradient, which has the parameter's shape.

Backward sees the whole parameter, also under FSDP2, and adds the samples of this process to whole
sums. These are then summed over processes, and each process keeps its part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.parallel import Processes
from gnsfast.tensors import accumulate_dtype, is_dtensor, local_part

Shape = Sequence[int]


class Whole:
    """Every process keeps the whole parameter, as under DistributedDataParallel.

    Args:
        p: the parameter.
        shape: the shape of its second moments.
        on, group: the processes.
    """

    by_pass = False
    """Whether sums are summed over processes after each pass, and not once for an update."""

    def __init__(self, p: nn.Parameter, shape: Shape, on: Processes, group: Any) -> None:
        self._p: Any = p
        self.shape, self._several, self._group = tuple(shape), on.world > 1, group
        self.share = 1 / on.world
        """The share of this process in numbers that it computes for the whole parameter."""
        self.forget()

    def forget(self) -> None:
        """Forget all sums."""
        self._sums: list[Tensor | None] = [None, None]
        self._kept: dict[int, Tensor] = {}

    def begun(self, which: int) -> Tensor:
        """A sum to add to. It takes no memory before the first backward pass adds to it."""
        found = self._sums[which]
        if found is None:
            found = self._sums[which] = self.zeros(self._p.shape if which else self.shape)
        return found

    def zeros(self, shape: Shape) -> Tensor:
        """Zeros of the accumulation dtype."""
        p = self._p
        return torch.zeros(tuple(shape), dtype=accumulate_dtype(p.dtype), device=p.device)

    def keep(self) -> None:
        """Sum over processes, and add the result to what is kept of earlier passes."""
        for which in (0, 1):
            part, self._sums[which] = self.added(self.begun(which)), None
            if part is not None:
                before = self._kept.get(which)
                self._kept[which] = part if before is None else before.add_(part)

    def take(self) -> list[Tensor]:
        """Hand over what this process keeps of both sums and of ``.grad``, which may be nothing."""
        found, self._kept = [*self._kept.values()], {}
        grad = self.grad()
        return found if grad is None else [*found, grad]

    def added(self, t: Tensor) -> Tensor | None:
        """What this process keeps of the sum of ``t`` over processes, or None. It changes ``t``."""
        if self._several:
            dist.all_reduce(t, group=self._group)
        return t

    def grad(self) -> Tensor | None:
        """What this process keeps of ``.grad``, or zeros if there is none."""
        p = self._p
        grad: Tensor = torch.zeros_like(p) if p.grad is None else p.grad.detach()
        return grad.to_dense() if grad.is_sparse else grad

    def total(self, sums: Tensor) -> Tensor:
        """The sums over all coordinates, from the sums over the coordinates of each process."""
        return sums

    def part(self, whole: Tensor) -> Tensor | None:
        """What this process keeps of a tensor that every process has."""
        return whole

    def whole(self, part: Tensor | None) -> Tensor:
        """The reverse of ``part``. All processes must call it together."""
        assert part is not None
        return part


class Shard(Whole):
    """Every process keeps its own rows, as FSDP2 shards them. A process may have none."""

    by_pass = True

    def __init__(self, p: nn.Parameter, shape: Shape, on: Processes, group: Any) -> None:
        super().__init__(p, shape, on, group)
        self._copies = on.copies(p)

    def added(self, t: Tensor) -> Tensor | None:
        from torch.distributed.tensor import DTensor, Partial

        p = self._p
        terms = DTensor.from_local(t, p.device_mesh, [Partial()] * p.device_mesh.ndim)
        # Replicas of a shard add up what each has of it, not the whole.
        spread = [Partial() if of.is_replicate() else of for of in p.placements]
        shares = terms.redistribute(placements=spread)
        return shares.redistribute(placements=p.placements).to_local()

    def grad(self) -> Tensor | None:
        grad: Tensor = local_part(super().grad())
        return grad

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
    """Process ``owner`` keeps the whole parameter, which FSDP2 shards but is needed as a whole."""

    by_pass = True

    def __init__(
        self, p: nn.Parameter, shape: Shape, on: Processes, group: Any, owner: int
    ) -> None:
        super().__init__(p, shape, on, group)
        self._owner = owner
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
        part = self.zeros(self.shape) if part is None else part
        if self._several:
            dist.broadcast(part, group_src=self._owner, group=self._group)
        return part


Held = dict[str, Whole]


def held(p_and_shapes: Mapping[str, tuple[nn.Parameter, Shape]], on: Processes, group: Any) -> Held:
    """How each parameter is kept if its coordinates are independent."""
    return {
        name: (Shard if is_dtensor(p) else Whole)(p, shape, on, group)
        for name, (p, shape) in p_and_shapes.items()
    }


def held_by_matrix(
    p_and_shapes: Mapping[str, tuple[nn.Parameter, Shape]], on: Processes, group: Any
) -> Held:
    """How each matrix is kept if all of it is needed. Matrices that FSDP2 shards are distributed
    over processes, so that decompositions take all processes the same time.
    """
    found: Held = {}
    load = [0] * on.world
    for name, (p, shape) in p_and_shapes.items():
        if is_dtensor(p):
            owner = load.index(min(load))
            load[owner] += p.numel() * min(p.shape)
            found[name] = Owned(p, shape, on, group, owner)
        else:
            found[name] = Whole(p, shape, on, group)
    return found


def begun(of: Sequence[Whole | None], which: int) -> list[Tensor | None]:
    """A sum to add to for each of several parameters, or None for a parameter that needs none."""
    return [None if each is None else each.begun(which) for each in of]
