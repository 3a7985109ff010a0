# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of an update from what its passes left.

A pass and an update only keep tensors as they are. The arithmetic follows in ``compute()``, on the
host. With several processes it follows in ``update()``, on the device, because they must sum their
numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.estimator.adam_metric import NoMetric
from gnsfast.estimator.exchange import Exchange
from gnsfast.estimator.gradients import Sqnorms, rewritten
from gnsfast.estimator.sample_groups import GroupMeasure, GroupRows
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import loss_factors
from gnsfast.probing import Audit, ProbeSlab, checks


class Pass(NamedTuple):
    """What a micro-batch left. ``rows`` comes from ``ProbeSlab.sums``. ``samples`` holds each
    sample's squared norm if ``tokens`` is known for each. ``loss_scale`` is the factor of a
    gradient scaler, ``divided`` the factor that a pipeline's schedule applies after the pass.
    """

    rows: list[Tensor]
    num_samples: int
    passes: int
    tokens: int | Tensor | None
    scale: float | Tensor
    divided: float
    loss_scale: Tensor | None
    samples: list[Tensor]
    groups: GroupRows | None
    arrived: dict[str, list[Tensor]]


def kept(value: Any) -> Any:
    """A number as it is. A tensor is copied, because the caller may write to it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Update(NamedTuple):
    """What an update left. q comes from the final gradients (``sqnorms``), from the norm of the
    whole gradient (``norm``), or from the probes. ``witnesses`` are the norms of some gradients
    after the last backward pass and at ``update()``, and ``leftover`` those before the first pass.
    ``loss_scale`` is the factor that the gradients still have. ``dual`` is this process's share of
    the numbers of ``DualNorms``.
    """

    passes: list[Pass]
    by_probe: bool
    leftover: Tensor | None
    norm: Tensor | None
    sqnorms: Sqnorms | None
    witnesses: tuple[Tensor | None, Tensor | None]
    loss_scale: Tensor | None
    metric_q: Tensor | None
    dual: list[Tensor]


class Numbers:
    """Computes the vector and the flags of ``Exchange`` on the device that holds the tensors."""

    def __init__(
        self,
        slab: ProbeSlab,
        exchange: Exchange,
        settings: Settings,
        replicas: list[bool],
        audit: Audit,
        metric: NoMetric,
        groups: GroupMeasure,
        device: torch.device,
    ) -> None:
        self._exchange, self._processes = exchange, exchange.processes
        self._settings, self.device = settings, device
        self._audit, self._metric, self._groups = audit, metric, groups
        self._units, self._names = len(slab.units), len(slab.rows)
        self._no_rows = torch.zeros(0, 3, dtype=torch.float64, device=device)  # of an empty stage
        self._owners, self._plain = slab.owners(device), slab.plain(device)
        index = {name: k for k, name in enumerate(slab.rows)}
        parameters = [index[unit.parameter] for unit in slab.units.values()]
        self._parameters = torch.tensor(parameters, dtype=torch.int64, device=device)
        self._replicas = torch.tensor(replicas, dtype=torch.float64, device=device)
        single = [p != "" and not checks.may_repeat(slab.modules[path]) for path, p in slab.labels]
        self._single = torch.tensor(single, dtype=torch.float64, device=device)

    def __call__(self, update: Update) -> tuple[Tensor, Tensor]:
        found = [self._of_pass(each) for each in update.passes]
        sums, metric_2, calls, scalars, lost = (torch.stack(t).sum(0) for t in zip(*found))
        p, q = sums / self._processes.tensor  # all tensor-parallel processes found the same
        whole = q.sum()
        written = another = replica = handed = stale = torch.zeros_like(whole)
        norm = (
            None
            if update.norm is None
            else loss_factors.without_scale(update.norm, update.loss_scale)
        )
        if update.by_probe:
            if norm is not None:  # it is only compared, since the probes are more accurate
                another = ((norm - whole).abs() > 0.02 * whole).double()
        else:
            if update.leftover is not None:
                stale = (update.leftover.sum() != 0).double()
            if norm is not None:
                handed, whole = norm, norm * self._processes.divisor**2 / self._processes.world
                # With noise alone it is about p. A gradient scaler's factor, at least 512, would
                # be squared.
                another = (whole < 1e-5 * p.sum()).double()
                q = torch.full_like(q, torch.nan)
            elif update.sqnorms is not None:
                divided = self._processes.divisor**2  # DDP and FSDP2 average
                q = (
                    loss_factors.without_scale(
                        update.sqnorms.shares(self.device), update.loss_scale
                    )
                    * divided
                )
                whole, replica = q.sum(), (q * self._replicas).sum()
                written = self._written(update)
        metric = self._metric.numbers(metric_2, update.metric_q, update.loss_scale)
        groups = [self._groups.numbers(each, self.device) for each in update.passes]
        return self._exchange(
            *(torch.stack([p, q]), whole, scalars, calls),
            *([written, stale, another, *lost], handed, replica),
            [
                *metric,
                *update.dual,
                *(torch.stack(groups).sum(0).flatten()[None] if groups else ()),
            ],
        )

    def _of_pass(self, each: Pass) -> tuple[Tensor, ...]:
        """The numbers of a pass: p and q of the units, p and q under a metric, calls and surplus
        calls, the scalars of the weights, and the flags of misplaced tokens.
        """
        rows = torch.cat([self._no_rows, *(t.to(self.device) for t in each.rows)])
        K = self._units
        sums = rows.new_zeros(2, K + 2).index_add_(1, self._owners, rows[:, :2].T)
        of_parameters = sums.new_zeros(2, self._names)
        self._audit.add(of_parameters.index_add_(1, self._parameters, sums[:, :K]), each.arrived)
        sums = loss_factors.without_scale(sums, each.loss_scale)
        calls = rows[:, 2][self._plain]
        surplus = (calls - each.passes).clamp(min=0) * self._single
        scalars = loss_factors.block_scalars(
            *(each.num_samples, each.passes, each.tokens, each.divided * each.scale),
            *(self._settings.loss_reduction, self._settings.local, self.device),
        )
        lost = rows.new_zeros(2)
        if each.samples:
            assert isinstance(each.tokens, Tensor)
            sqnorm_B = torch.stack([t.to(self.device) for t in each.samples]).sum(0)
            lost = torch.stack(loss_factors.misplaced(sqnorm_B, each.tokens))
        return (
            sums[:, :K] * each.divided**2,
            sums[:, K + 1],
            torch.stack([calls, torch.where(calls.isnan(), calls, surplus)]),
            scalars,
            lost,
        )

    def _written(self, update: Update) -> Tensor:
        """``gradients.rewritten``; 0.0 where there is nothing to compare."""
        before, after = update.witnesses
        if before is None or after is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return rewritten(before, after, update.passes[-1].loss_scale, update.loss_scale)
