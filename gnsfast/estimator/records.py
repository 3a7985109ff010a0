# SPDX-License-Identifier: Apache-2.0
"""What a pass and an update leave: tensors as they are, until the numbers are computed, which a
window holds.
"""

from typing import Any, NamedTuple

from torch import Tensor

from gnsfast.estimator.fingerprint import Grads


class Pass(NamedTuple):
    """What a micro-batch left. ``rows`` comes from ``ProbeSlab.sums``, ``uses`` from
    ``ProbeSlab.uses``, and ``left`` from the sides, by name. ``samples`` holds each sample's
    squared norm if ``tokens`` is known for each. ``loss_scale`` is the factor of a gradient scaler.
    ``arrived`` are norms for the audit. ``idle`` parameters got no gradient, ``unseen`` ones one
    that no probe has seen.
    """

    rows: list[Tensor]
    uses: tuple[int, ...]
    num_samples: int
    tokens: int | Tensor | None
    scale: float | Tensor
    loss_scale: Tensor | None
    samples: list[Tensor]
    left: dict[str, Any]
    arrived: dict[str, list[Tensor]]
    idle: set[str]
    unseen: list[str]


def kept(value: Any) -> Any:
    """A number as it is. A tensor is copied, because the caller may write to it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Update(NamedTuple):
    """What an update left. q comes from the final gradients, of which ``grads`` tells, from the
    norm of the whole gradient (``norm``), or from the probes (``by_probe``). A pass that was
    ``alone``, on one process, lets ``norm`` be compared with the probes. ``loss_scale`` is the
    factor that the gradients still have. ``left`` is what the sides have left, by name.
    """

    passes: list[Pass]
    by_probe: bool
    alone: bool
    norm: Tensor | None
    grads: Grads
    loss_scale: Tensor | None
    left: dict[str, Any]


class Window(NamedTuple):
    """The numbers of U updates, of all processes and of the K units, which are the parameters that
    have norms: float64 p and q [U, K], q of all units together [U], the ``scalars`` of the weights
    [U, SCALARS], and the numbers of ``sides`` [U, E]. Their columns lie one after the other in the
    ledger.
    """

    p: Tensor
    q: Tensor
    whole: Tensor
    scalars: Tensor
    sides: Tensor
