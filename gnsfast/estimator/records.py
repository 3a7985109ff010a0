# SPDX-License-Identifier: Apache-2.0
"""The records of a measurement: what a pass and an update leave, as tensors that wait for their
arithmetic, and the columns of numbers that come of it.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from gnsfast.estimator.budget import Pace
from gnsfast.estimator.gradients import Sqnorms

R = TypeVar("R", bound=tuple[Any, ...])


class Pass(NamedTuple):
    """What a micro-batch left. ``rows`` comes from ``ProbeSlab.sums``, ``uses`` from
    ``ProbeSlab.uses``, and ``left`` from the sides, by name. ``samples`` holds each sample's
    squared norm if ``tokens`` is known for each. ``loss_scale`` is the factor of a gradient scaler.
    ``arrived`` are norms for the audit.
    """

    rows: list[Tensor]
    uses: tuple[int, ...]
    num_samples: int
    tokens: float | Tensor | None
    scale: float | Tensor
    loss_scale: Tensor | None
    samples: list[Tensor]
    left: dict[str, Any]
    arrived: dict[str, list[Tensor]]


def kept(value: Any) -> Any:
    """A number as it is. A tensor is copied, because the caller may write to it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Update(NamedTuple):
    """What an update left. q comes from ``sqnorms``, those of ``.grad`` at the end of the block,
    which still have the factor ``loss_scale``; if it is None, from the probes. ``leftover`` are
    those of the gradients that were there when the block began. ``left`` is what the sides have
    left, by name. ``pace`` is what updates take on this process.
    """

    passes: list[Pass]
    sqnorms: Sqnorms | None
    leftover: Sqnorms | None
    loss_scale: Tensor | None
    left: dict[str, Any]
    pace: Pace


class Window(NamedTuple):
    """The numbers of U updates, of all processes and of the K units, which are the parameters that
    have norms: float64 ``p`` and ``q`` [U, K], the ``scalars`` of the weights [U, SCALARS], and the
    numbers of ``sides`` [U, E].
    """

    p: Tensor
    q: Tensor
    scalars: Tensor
    sides: Tensor

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """p and q of all units together [U]."""
        return self.p.sum(1), self.q.sum(1)


class Flags(NamedTuple):
    """What may be wrong, as counts of updates [U, 1] or, of each unit, [U, K].

    ``calls`` counts the passes that reached a unit, and ``surplus`` the calls that were too many.
    An ``unseen`` unit has a gradient although no pass reached it. Gradients were not zero when the
    update began (``stale``), are all zero at its end (``zeroed``), or are larger than those of the
    passes together (``excess``). Samples
    without tokens have gradients (``padded``), or samples with tokens have none (``empty``).
    Processes have different gradients (``apart``), or parts of what all of them should have whole
    (``parts``).
    """

    calls: Tensor
    surplus: Tensor
    unseen: Tensor
    stale: Tensor
    zeroed: Tensor
    excess: Tensor
    padded: Tensor
    empty: Tensor
    apart: Tensor
    parts: Tensor


class Share(NamedTuple):
    """What a process has of U updates: columns that all processes sum. They are those of ``Window``
    and ``Flags``, its part of the mean ``pace`` [U, 2], and the sum of the norms of its passes
    (``reach`` [U, 1]), which bounds that of the update. Under tensor parallelism each place there
    has four columns of ``replicas``: 1, the part of q that data-parallel replicas share, its
    square, and the part of p of parameters that each place has whole.
    """

    p: Tensor
    q: Tensor
    scalars: Tensor
    sides: Tensor
    pace: Tensor
    calls: Tensor
    surplus: Tensor
    stale: Tensor
    padded: Tensor
    empty: Tensor
    reach: Tensor
    replicas: Tensor


class Columns(Generic[R]):
    """The columns of a record of tensors [U, width], one after the other in a matrix."""

    def __init__(self, kind: type[R], **widths: int) -> None:
        fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        self._kind, self.widths = kind, [widths.get(name, 1) for name in fields]
        self.width = sum(self.widths)

    def joined(self, record: R) -> Tensor:
        """All columns of a record, [U, width]."""
        return torch.cat([*record], 1)

    def split(self, matrix: Tensor) -> R:
        """The reverse of ``joined``."""
        return self._kind(*matrix.split(self.widths, 1))
