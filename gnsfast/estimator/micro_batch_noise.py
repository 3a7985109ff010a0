# SPDX-License-Identifier: Apache-2.0
"""Gradients of micro-batches and processes as they arrive, instead of those of single samples.

The unit k is one backward pass of one process. Its gradient g_k = Σ u_b g_b, over its own samples,
arrives at a parameter before it is added to ``.grad`` and averaged over processes. With U_k = Σ u_b
over the samples of a unit, P = Σ g_k² (or Σ g_k g_kᵀ) and Q = (Σ g_k)² have the means

    E P = W G² + S,    E Q = V G² + S,    S = Σ_b u_b² C_b,    W = Σ U_k²,    V = (Σ U_k)²

so that G² = (Q - P) / (V - W) and S = P - W G² are unbiased, for units of any sizes: W takes the
place of U₂ = Σ u_b² of single samples (``noise_scale.statistics``), and nothing else changes. For n
units of b samples, S over the weight of C is b / (n - 1) · (Σ ḡ_k² - n ḡ²): the estimator of
Naganuma et al. 2026 (arXiv 2602.03001), who take a unit of each data-parallel process. C has n - 1
degrees of freedom in an update where single samples give n b - 1.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from gnsfast import reference
from gnsfast.combinations import MICRO_BATCHES, SHARDED, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator.records import Pass, Window
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Setup, Side
from gnsfast.following import EXCLUDED, Leaf
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import parameters_at_rest
from gnsfast.probing import Arrivals, ProbeSlab
from gnsfast.tensors import accumulate_dtype, is_dtensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters that are trained; none of them may be sharded."""
    found = {name: p for name, p in parameters_at_rest(model).items() if p.requires_grad}
    if any(map(is_dtensor, found.values())):
        refuse([MICRO_BATCHES, SHARDED])
    return found


class MicroBatchGradients:
    """Takes the gradient of each parameter in a pass, which must be a single one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._arrivals, self._seen = Arrivals(parameters, self._arriving), set[str]()

    def start(self) -> None:
        """Watch a pass."""
        self._seen = set()
        self._arrivals.start()

    def stop(self) -> None:
        """The reverse of ``start``."""
        self._arrivals.stop()

    def _arriving(self, name: str, grad: Tensor) -> None:
        if name in self._seen:
            raise ObservationError(
                f"{name} got its gradient in several parts in one pass, and no part is that of the "
                "whole micro-batch. Checkpoint with use_reentrant=False, and call backward once "
                "in each gns.microbatch block."
            )
        self._seen.add(name)
        self._arrived(name, grad.to_dense())

    def _arrived(self, name: str, grad: Tensor) -> None:
        """Take the gradient that a micro-batch brings to a parameter."""
        raise NotImplementedError


class GradientSlab(ProbeSlab):
    """In the place of probes: the squared norm of the gradient that a micro-batch brings to each
    trained parameter, as it arrives.
    """

    def refresh(self) -> None:
        super().refresh()
        self._gradients = _Sqnorms(trained(self.model), self.arrives)

    def _measured(self) -> list[Leaf]:
        return [leaf for leaf in self.followed.leaves if leaf.refused != EXCLUDED]

    def _begin(self, *asked: Any) -> None:
        self.forget()
        self._gradients.start()

    def _stop(self) -> None:
        self._gradients.stop()

    @property
    def is_reached(self) -> bool:
        return bool(self._gradients.rows)

    @property
    def uses(self) -> tuple[int, ...]:
        return (1,) * len(self.parameters)

    def read(self) -> None:
        pass

    def _sums(self, leaves: list[Leaf]) -> Tensor:
        none = torch.zeros(3, dtype=torch.float64, device=leaves[0].parameter.device)
        return torch.stack([self._gradients.rows.get(leaf.name, none) for leaf in leaves])

    def forget(self) -> None:
        self._gradients.rows = {}


class _Sqnorms(MicroBatchGradients):
    """Rows [3] of the parameters that a pass has reached, as in ``ProbeSlab.sums``: the micro-batch
    stands for its samples.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], arrives: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._arrives, self.rows = WeakMethod(arrives), dict[str, Tensor]()

    def _arrived(self, name: str, grad: Tensor) -> None:
        if (arrives := self._arrives()) is not None:
            arrives()
        if grad.device.type == "cpu":  # where torch's own norm is 1e-3 low at 16.8M elements
            sqnorm = reference.sqnorm(grad).double()
        else:
            norm = torch.linalg.vector_norm(grad, dtype=accumulate_dtype(grad.dtype))
            sqnorm = norm.double().square()
        self.rows[name] = torch.stack([sqnorm, sqnorm, torch.ones_like(sqnorm)])


def scalars_of_pass(each: Pass, s: Settings, device: torch.device) -> Tensor:
    """The scalars of the weights of a pass's samples, float64 [SCALARS]."""
    return loss_factors.microbatch_scalars(
        each.num_samples, each.tokens, each.scale, s.loss_reduction, s.local, device
    )


def weights_of_units(scalars: Tensor, squares: Tensor) -> Tensor:
    """The ``scalars`` [..., SCALARS] of weights with W, which is ``squares`` [..., 1], in the place
    of U₂.
    """
    return torch.cat([scalars[..., :6], squares, torch.zeros_like(squares)], -1)


MOST_ALONE = 1
"""So many updates in a row may have a single pass, and are skipped, as at the end of an epoch."""


class MicroBatchSide(MicroBatchGradients, Side):
    """A side that compares the gradients which micro-batches bring to ``parameters``."""

    def __init__(self, setup: Setup, parameters: Mapping[str, nn.Parameter]) -> None:
        Side.__init__(self, setup)
        MicroBatchGradients.__init__(self, parameters)
        self.parameters = parameters
        self._alone = 0  # updates in a row that had a single gradient

    def _refuse_alone(self, passes: int) -> None:
        """Raise if updates of so many ``passes`` have a single gradient, which there is nothing to
        compare with.
        """
        several = passes * self.setup.processes.world > 1
        self._alone = 0 if several else self._alone + 1
        if self._alone > MOST_ALONE:
            raise ObservationError(
                f"metric={self.name!r} compares the gradients of an update's backward passes. This "
                "update had 1 pass on 1 process, and it takes 2 or more, better 4. Accumulate "
                "gradients, with a gns.microbatch block for each pass, use more processes, or "
                f"leave metric={self.name!r} out."
            )


class MicroBatches(Side):
    """What is said of numbers that come from gradients of micro-batches."""

    name = "micro_batches"

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> None:
        if len(passes) * self.setup.processes.world < 2:
            raise ObservationError(
                "unit='micro_batch' compares the gradients of the backward passes of an update, "
                "and this update had 1 on 1 process. Use 2 or more, better 4: accumulate gradients "
                "with a gns.microbatch block for each pass, or train with more processes. "
                "unit='sample' measures a single pass."
            )

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        passes = window.scalars[:, 2]
        used = torch.stack(window.whole).isfinite().all(0) & (passes > 1)
        return {"noise_from": "micro_batches", "passes": int(passes[used].sum())}
