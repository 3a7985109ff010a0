# SPDX-License-Identifier: Apache-2.0
"""The exchange between the processes of an update: one vector, which is summed over them.

Beside p and q the vector holds what processes must agree on: the samples' weights on all pipeline
stages, a given ``grad_norm``, and the gradients of data-parallel replicas. So a disagreement is
noticed.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.stages import Stages
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes

FLAGS = 8
"""The number of flags of an update, beside the calls of its probe rows. In this order they say:
gradients were changed after backward; they were not zero before the first micro-batch;
``grad_norm`` does not fit the probes; samples without tokens have gradients; samples with tokens
have none; processes have different gradients; they have different values of ``grad_norm``; they
have different weights of the same samples."""
DISAGREEMENTS = 3
"""The last of these compare processes."""


class Exchange:
    """The vector of one model's processes."""

    def __init__(
        self,
        processes: Processes,
        stages: Stages,
        group: "dist.ProcessGroup | None",
        extra: int,
    ) -> None:
        self.processes, self.stages, self.group, self.extra = processes, stages, group, extra
        self._slot = stages.rank * processes.tensor + processes.coordinate

    @property
    def width(self) -> int:
        """How many numbers an update has: p and q of all K units, the whole q, the scalars of the
        weights, and ``extra`` for a metric or groups.
        """
        return 2 * len(self.stages.units) + 1 + loss_factors.SCALARS + self.extra

    @property
    def flags(self) -> int:
        """How many flags: the calls and surplus calls of each probe row, then ``FLAGS``."""
        return 2 * len(self.stages.labels) + FLAGS

    def split(self, vectors_UW: Tensor) -> list[Tensor]:
        """The parts of U updates: p [U, K], q [U, K], the whole q [U, 1], the scalars
        [U, SCALARS], and the numbers of a metric or of groups [U, ``extra``].
        """
        K = len(self.stages.units)
        return list(vectors_UW.split([K, K, 1, loss_factors.SCALARS, self.extra], 1))

    def __call__(
        self,
        sums_2K: Tensor,
        whole: Tensor,
        scalars: Tensor,
        calls_2R: Tensor,
        flags: list[Tensor],
        norm: Tensor,
        replica: Tensor,
        extra: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The update's numbers [width] and flags, from this process's shares of them.

        ``flags`` are the first five of ``FLAGS``. ``norm`` comes from a given ``grad_norm``,
        ``replica`` from the gradients that data-parallel replicas share; both may be zero.
        ``extra`` are the numbers of a metric or of groups.
        """
        on = self.processes
        if on.world == 1:  # it agrees with itself, and half of the arithmetic is for others
            agreed = calls_2R.new_zeros(DISAGREEMENTS)
            return (
                torch.cat([sums_2K.flatten(), whole[None], scalars, *extra]),
                torch.cat([calls_2R.flatten(), torch.stack(flags), agreed]),
            )
        weights = scalars.new_zeros(on.stages, loss_factors.SCALARS)
        weights[self.stages.rank] = scalars / on.tensor
        shared = scalars.new_zeros(on.stages * on.tensor, 3)
        shared[self._slot] = torch.stack([torch.ones_like(replica), replica, replica.square()])
        parts = [
            self.stages.of_units(sums_2K).flatten(),
            whole[None],
            weights.flatten(),
            self.stages.of_rows(calls_2R).flatten(),
            torch.stack(flags),
            torch.stack([norm, norm.square()]),
            shared.flatten(),
            torch.cat([*extra, whole.new_zeros(0)]),
        ]
        vector = torch.cat(parts)
        dist.all_reduce(vector, group=self.group)
        p_q, whole, weights, calls, own_flags, norms, shared, extra_numbers = vector.split(
            [len(t.view(-1)) for t in parts]
        )
        weights = weights.view(on.stages, -1)
        weights_differ = (weights - weights[0]).abs() > 1e-6 * weights[0].abs()
        shared = shared.view(-1, 3).T
        disagreements = [
            _differ(*shared).any(),
            _differ(norms.new_tensor(on.world), *norms),
            weights_differ.any(),
        ]
        return (
            torch.cat([p_q, whole, weights[0], extra_numbers]),
            torch.cat([calls, own_flags, torch.stack(disagreements).double()]),
        )


def _differ(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whether ``count`` numbers differ, from their sum and the sum of their squares."""
    return count * squares - total.square() > 1e-5 * total.square()
