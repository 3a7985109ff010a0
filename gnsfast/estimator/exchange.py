# SPDX-License-Identifier: Apache-2.0
"""The exchange between the processes of an update: one vector, which is summed over them.

Beside p and q the vector holds what processes must agree on: the samples' weights on all pipeline
stages, a given ``grad_norm``, and the gradients of data-parallel replicas. So a disagreement is
noticed.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.stages import Stages
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes
from gnsfast.probing import checks


class Seen(NamedTuple):
    """What the gradients of an update show, or their norm. They were ``written`` to after backward;
    they were not zero before the first pass (``stale``); the given ``norm``, which may be zero, is
    ``another`` than the probes allow, or than what an audit has ``read``, NaN without one.
    ``replica`` is the part of q that data-parallel replicas share.
    """

    written: Tensor
    stale: Tensor
    another: Tensor
    norm: Tensor
    read: Tensor
    replica: Tensor


class Shares(NamedTuple):
    """This process's share of the numbers of U updates: float64 p and q [U, K] of its stage's K
    units, q of all together [U], the ``scalars`` of the weights [U, SCALARS], the numbers of
    ``sides`` [U, E]; how often each unit was called, and how often too often [U, K]; whether any
    sample without tokens has a gradient [U] (``padded``), or one with tokens has none (``empty``).
    """

    p: Tensor
    q: Tensor
    whole: Tensor
    scalars: Tensor
    sides: Tensor
    calls: Tensor
    surplus: Tensor
    padded: Tensor
    empty: Tensor
    seen: Seen


class Window(NamedTuple):
    """The numbers of U updates, of all processes and of the K units of all stages. Their columns
    lie one after the other in the ledger.
    """

    p: Tensor
    q: Tensor
    whole: Tensor
    scalars: Tensor
    sides: Tensor


class Exchange:
    """The vector of one model's processes. ``sides`` is how many numbers the sides have."""

    def __init__(
        self,
        processes: Processes,
        stages: Stages,
        group: "dist.ProcessGroup | None",
        sides: int,
    ) -> None:
        self.processes, self.stages, self.group, self.sides = processes, stages, group, sides
        self._slot = stages.rank * processes.tensor + processes.coordinate
        K = len(stages.units)
        self._widths = [K, K, 1, loss_factors.SCALARS, sides]
        self.width = sum(self._widths)
        """How many numbers an update has, those of ``Window``."""
        self.flags = 2 * K + len(checks.Flags._fields)
        """How many flags: the calls and surplus calls of each unit, then ``checks.Flags``."""

    def window(self, vectors_UW: Tensor) -> Window:
        """The parts of the vectors of U updates."""
        p, q, whole, *rest = vectors_UW.split(self._widths, 1)
        return Window(p, q, whole.squeeze(1), *rest)

    def __call__(self, own: Shares) -> tuple[Tensor, Tensor]:
        """The numbers [U, width] and the flags of U updates, from this process's shares of them."""
        seen, of = own.seen, self.stages.of_units
        flags = torch.stack([seen.written, seen.stale, seen.another, own.padded, own.empty], 1)
        if self.processes.world == 1:  # it agrees with itself, and has all of the units
            flags[:, 2] += another_norm(seen.norm, seen.read)
            none = torch.zeros(len(flags), 3, dtype=flags.dtype, device=flags.device)
            return (
                torch.cat([own.p, own.q, own.whole[:, None], own.scalars, own.sides], 1),
                torch.cat([own.calls, own.surplus, flags, none], 1),
            )
        parts = dict(
            p_q=torch.cat([of(own.p), of(own.q), own.whole[:, None]], 1),
            weights=self._of_stage(own.scalars),
            calls=torch.cat([of(own.calls), of(own.surplus)], 1),
            flags=flags,
            norms=torch.stack([seen.norm, seen.norm.square(), seen.read], 1),
            replicas=self._of_replica(seen.replica),
            sides=own.sides,
        )
        vector = torch.cat([*parts.values()], 1)
        dist.all_reduce(vector, group=self.group)
        widths = [t.shape[1] for t in parts.values()]
        all_ = dict(zip(parts, vector.split(widths, 1)))
        flags, (norm, norm_square, read) = all_["flags"], all_["norms"].unbind(1)
        flags[:, 2] += another_norm(norm / self.processes.world, read)
        weights = all_["weights"].unflatten(1, (self.processes.stages, -1))
        first = weights[:, :1]
        disagreements = [
            _differ(*all_["replicas"].unflatten(1, (-1, 3)).unbind(2)).any(1),
            _differ(norm.new_tensor(self.processes.world), norm, norm_square),
            ((weights - first).abs() > 1e-6 * first.abs()).flatten(1).any(1),
        ]
        return (
            torch.cat([all_["p_q"], weights[:, 0], all_["sides"]], 1),
            torch.cat([all_["calls"], flags, torch.stack(disagreements, 1).double()], 1),
        )

    def _of_stage(self, scalars_US: Tensor) -> Tensor:
        """The weights in the place of this stage, [U, stages SCALARS]."""
        on = self.processes
        found = scalars_US.new_zeros(len(scalars_US), on.stages, scalars_US.shape[1])
        found[:, self.stages.rank] = scalars_US / on.tensor
        return found.flatten(1)

    def _of_replica(self, replica_U: Tensor) -> Tensor:
        """Their number, sum and sum of squares in the place of the replicas of these parameters."""
        on = self.processes
        found = replica_U.new_zeros(len(replica_U), on.stages * on.tensor, 3)
        ones = torch.ones_like(replica_U)
        found[:, self._slot] = torch.stack([ones, replica_U, replica_U.square()], 1)
        return found.flatten(1)


def another_norm(given: Tensor, read: Tensor) -> Tensor:
    """Whether the square of a ``grad_norm`` is not what was read, which half precision moves by up
    to 1e-2. After an overflow there is nothing to compare, nor where ``read`` is NaN.
    """
    return given.isfinite() & ((given - read).abs() > 0.03 * read)


def _differ(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whether ``count`` numbers differ, from their sum and the sum of their squares."""
    return count * squares - total.square() > 1e-5 * total.square()
