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
ANOTHER = 2
"""The place of "``grad_norm`` does not fit" among them."""
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
        """How many flags: the calls and surplus calls of each unit, then ``FLAGS``."""
        return 2 * len(self.stages.units) + FLAGS

    def split(self, vectors_UW: Tensor) -> list[Tensor]:
        """The parts of U updates: p [U, K], q [U, K], the whole q [U, 1], the scalars
        [U, SCALARS], and the numbers of a metric or of groups [U, ``extra``].
        """
        K = len(self.stages.units)
        return list(vectors_UW.split([K, K, 1, loss_factors.SCALARS, self.extra], 1))

    def __call__(
        self,
        sums_U2K: Tensor,
        whole_U: Tensor,
        scalars_US: Tensor,
        calls_U2R: Tensor,
        flags_U5: Tensor,
        norm_U2: Tensor,
        replica_U: Tensor,
        extra_UE: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The numbers [U, width] and the flags of U updates, from this process's shares of them.

        ``flags_U5`` are the first five of ``FLAGS``. ``norm_U2`` holds a given ``grad_norm``, which
        may be zero, and what an audit has read of it, which is NaN without one. ``replica_U`` comes
        from the gradients that data-parallel replicas share, and may be zero.
        ``extra_UE`` are the numbers of a metric or of groups.
        """
        on, U = self.processes, len(whole_U)
        whole_U1 = whole_U[:, None]
        if on.world == 1:  # it agrees with itself, and half of the arithmetic is for others
            agreed = calls_U2R.new_zeros(U, DISAGREEMENTS)
            flags_U5[:, ANOTHER] += another_norm(*norm_U2.unbind(1))
            return (
                torch.cat([sums_U2K.flatten(1), whole_U1, scalars_US, extra_UE], 1),
                torch.cat([calls_U2R.flatten(1), flags_U5, agreed], 1),
            )
        weights = scalars_US.new_zeros(U, on.stages, loss_factors.SCALARS)
        weights[:, self.stages.rank] = scalars_US / on.tensor
        shared = scalars_US.new_zeros(U, on.stages * on.tensor, 3)
        ones = torch.ones_like(replica_U)
        shared[:, self._slot] = torch.stack([ones, replica_U, replica_U.square()], 1)
        parts = [
            self.stages.of_units(sums_U2K).flatten(1),
            whole_U1,
            weights.flatten(1),
            self.stages.of_units(calls_U2R).flatten(1),
            flags_U5,
            torch.cat([norm_U2, norm_U2[:, :1].square()], 1),
            shared.flatten(1),
            extra_UE,
        ]
        vector = torch.cat(parts, 1)
        dist.all_reduce(vector, group=self.group)
        p_q, whole_U1, weights, calls, own_flags, norms, shared, extra_UE = vector.split(
            [t.shape[1] for t in parts], 1
        )
        norm_U, read_U, squares_U = norms.unbind(1)
        own_flags[:, ANOTHER] += another_norm(norm_U / on.world, read_U)
        weights = weights.view(U, on.stages, -1)
        first = weights[:, :1]
        weights_differ = (weights - first).abs() > 1e-6 * first.abs()
        disagreements = [
            _differ(*shared.view(U, -1, 3).unbind(2)).any(1),
            _differ(norms.new_tensor(on.world), norm_U, squares_U),
            weights_differ.flatten(1).any(1),
        ]
        return (
            torch.cat([p_q, whole_U1, weights[:, 0], extra_UE], 1),
            torch.cat([calls, own_flags, torch.stack(disagreements, 1).double()], 1),
        )


def another_norm(given: Tensor, read: Tensor) -> Tensor:
    """Whether the square of a ``grad_norm`` is not what was read, which half precision moves by up
    to 1e-2. After an overflow there is nothing to compare, nor where ``read`` is NaN.
    """
    return given.isfinite() & ((given - read).abs() > 0.03 * read)


def _differ(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whether ``count`` numbers differ, from their sum and the sum of their squares."""
    return count * squares - total.square() > 1e-5 * total.square()
