# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of updates from what their passes left.

A pass and an update only keep tensors as they are. The arithmetic follows in ``compute()``, on the
host. With several processes it follows in ``update()``, on the device, because they must sum their
numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.estimator.adam_metric import NoMetric
from gnsfast.estimator.exchange import Exchange, another_norm
from gnsfast.estimator.fingerprint import rewritten
from gnsfast.estimator.gradients import Sqnorms
from gnsfast.estimator.sample_groups import GroupMeasure, GroupRows
from gnsfast.estimator.settings import Settings
from gnsfast.noise_scale import loss_factors
from gnsfast.probing import Audit, ProbeSlab, calls_of


class Pass(NamedTuple):
    """What a micro-batch left. ``rows`` comes from ``ProbeSlab.sums``, ``weighed`` from
    ``metric_sums`` and ``uses`` from ``ProbeSlab.uses``. ``samples`` holds each sample's squared
    norm if ``tokens`` is known for each. ``loss_scale`` is the factor of a gradient scaler,
    ``divided`` the factor that a pipeline's schedule applies after the pass. ``arrived`` are norms
    for the audit. ``idle`` parameters got no gradient, ``unseen`` ones one that no probe has seen.
    """

    rows: list[Tensor]
    weighed: list[Tensor]
    uses: tuple[int, ...]
    num_samples: int
    passes: int
    tokens: int | Tensor | None
    scale: float | Tensor
    divided: float
    loss_scale: Tensor | None
    samples: list[Tensor]
    groups: GroupRows | None
    arrived: dict[str, list[Tensor]]
    idle: set[str]
    unseen: list[str]


def kept(value: Any) -> Any:
    """A number as it is. A tensor is copied, because the caller may write to it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class Update(NamedTuple):
    """What an update left. q comes from the final gradients (``sqnorms``), from the norm of the
    whole gradient (``norm``), or from the probes. A pass that was ``alone``, on one process, lets
    ``norm`` be compared with the probes, others with ``read`` if it is not None. ``prints`` are
    the norms of some gradients after the last backward pass and at ``update()``, and ``leftover``
    those before the first pass. ``loss_scale`` is the factor that the gradients still have.
    ``dual`` is this process's share of the numbers of ``DualNorms``.
    """

    passes: list[Pass]
    by_probe: bool
    alone: bool
    leftover: Tensor | None
    norm: Tensor | None
    read: Sqnorms | None
    sqnorms: Sqnorms | None
    prints: tuple[Tensor | None, Tensor | None]
    loss_scale: Tensor | None
    metric_q: Tensor | None
    dual: list[Tensor]


class Numbers:
    """Computes the vectors and the flags of ``Exchange`` on the device that holds the tensors."""

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
        self._no_rows = torch.zeros(0, 3, dtype=torch.float64, device=device)  # of an empty stage
        self._units, self._order = len(slab.units), slab.order(device)
        self._replicas = torch.tensor(replicas, dtype=torch.float64, device=device)

    def __call__(self, updates: list[Update]) -> tuple[Tensor, Tensor]:
        """The vectors [U, width] and the flags of U updates. They do not depend on which updates
        are computed together. Calls cost more than arithmetic here, so there are few of them.
        """
        passes = [each for update in updates for each in update.passes]
        own = [u for u, update in enumerate(updates) for _ in update.passes]
        of_pass = torch.tensor(own).to(self.device, non_blocking=True)

        def of_updates(t: Tensor) -> Tensor:
            return t.new_zeros(len(updates), *t.shape[1:]).index_add_(0, of_pass, t)

        sums, metric_U2, *rest = map(of_updates, self._of_passes(passes))
        calls_U2R, scalars_US, lost_U2 = rest
        p_q_U2K = sums / self._processes.tensor  # all tensor-parallel processes found the same
        whole_U = p_q_U2K[:, 1].sum(1)
        seen_U6 = whole_U.new_zeros(len(updates), 6)
        for u, update in enumerate(updates):
            if not update.by_probe or update.norm is not None:
                p, q = p_q_U2K[u]
                q[:], whole_U[u], seen_U6[u] = self._of_gradients(update, p, q, whole_U[u])
        flags_U5 = torch.cat([seen_U6[:, :3], lost_U2], 1)
        extra_UE = p_q_U2K.new_zeros(len(updates), 0)
        if self._exchange.extra:
            extra_UE = torch.stack([*map(self._extra, updates, metric_U2)])
        return self._exchange(
            *(p_q_U2K, whole_U, scalars_US, calls_U2R),
            *(flags_U5, seen_U6[:, 3:5], seen_U6[:, 5], extra_UE),
        )

    def _of_passes(self, passes: list[Pass]) -> tuple[Tensor, ...]:
        """The numbers of P passes, all [P, ...]: p and q of the units, p and q under a metric,
        calls and surplus calls, the scalars of the weights, and the flags of misplaced tokens.
        """
        K, P = self._units, len(passes)
        parts = (t.to(self.device) for each in passes for t in each.rows)
        rows_K3P = torch.cat([self._no_rows, *parts]).view(P, K, 3).permute(1, 2, 0)
        rows_K3P = torch.zeros_like(rows_K3P).index_copy_(0, self._order, rows_K3P)
        sums = rows_K3P[:, :2].contiguous()
        weighed = sums.new_zeros(P, 2)
        for k, each in enumerate(passes):
            if each.weighed:
                weighed[k] = torch.stack(
                    [t[:, :2].sum(0).to(self.device) for t in each.weighed]
                ).sum(0)
        self._add_audits(passes, sums)
        for k, each in enumerate(passes):
            if each.loss_scale is not None:
                sums[..., k] = loss_factors.without_scale(sums[..., k], each.loss_scale)
                weighed[k] = loss_factors.without_scale(weighed[k], each.loss_scale)
        divided, times = (self._vector(t) for t in zip(*((e.divided**2, e.passes) for e in passes)))
        uses_KP = torch.tensor([e.uses for e in passes], dtype=torch.float64, device="cpu").T
        uses_KP = uses_KP.to(self.device, non_blocking=True)
        calls = calls_of(rows_K3P[:, 2], uses_KP, times)
        surplus = (calls - times).clamp(min=0)
        lost = sums.new_zeros(P, 2)
        for k, each in enumerate(passes):
            if each.samples:
                assert isinstance(each.tokens, Tensor)
                sqnorm_B = torch.stack([t.to(self.device) for t in each.samples]).sum(0)
                lost[k] = torch.stack(loss_factors.misplaced(sqnorm_B, each.tokens))
        return (
            (sums * divided).permute(2, 1, 0),
            weighed,
            torch.stack([calls.T, torch.where(calls.isnan(), calls, surplus).T], 1),
            torch.stack([self._scalars(each) for each in passes]),
            lost,
        )

    def _add_audits(self, passes: list[Pass], sums_K2P: Tensor) -> None:
        audited = [k for k, each in enumerate(passes) if each.arrived]
        if not audited:
            return
        for k, found in zip(audited, sums_K2P[..., audited].permute(2, 1, 0)):
            self._audit.add(found, passes[k].arrived)

    def _scalars(self, each: Pass) -> Tensor:
        return loss_factors.block_scalars(
            *(each.num_samples, each.passes, each.tokens, each.divided * each.scale),
            *(self._settings.loss_reduction, self._settings.local, self.device),
        )

    def _vector(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(self.device, non_blocking=True)

    def _of_gradients(
        self, update: Update, p: Tensor, q: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, its sum, and what an update's gradients or their norm show: whether they were written
        to, were not zero before, or differ from the probes; then the given norm, this process's
        share of what it is compared with, and the part of ``whole`` that all replicas share.
        """
        zero = torch.zeros_like(whole)
        written = another = replica = handed = stale = zero
        read = torch.full_like(whole, torch.nan)
        norm = (
            None
            if update.norm is None
            else loss_factors.without_scale(update.norm, update.loss_scale)
        )
        if update.by_probe:
            if norm is not None:  # it is only compared, since the probes are more accurate
                another = another_norm(norm, whole).double()
            return q, whole, torch.stack([written, stale, another, handed, read, replica])
        if update.leftover is not None:
            stale = (update.leftover.sum() != 0).double()
        if norm is not None:
            if update.alone:
                read = whole
            elif update.read is not None:
                read = update.read.shares(self.device).sum()
                read = loss_factors.without_scale(read, update.passes[-1].loss_scale)
            handed, whole = norm, norm * self._processes.divisor**2 / self._processes.world
            # With noise alone it is about p. A gradient scaler's factor, at least 512, would
            # be squared.
            another = (whole < 1e-5 * p.sum()).double()
            q = torch.full_like(q, torch.nan)
        elif update.sqnorms is not None:
            shares = update.sqnorms.shares(self.device)
            divided = self._processes.divisor**2  # DDP and FSDP2 average
            q = loss_factors.without_scale(shares, update.loss_scale) * divided
            whole, replica = q.sum(), (q * self._replicas).sum()
            written = self._written(update)
        return q, whole, torch.stack([written, stale, another, handed, read, replica])

    def _extra(self, update: Update, metric_2: Tensor) -> Tensor:
        """This process's share of the numbers of a metric, dual norms and groups."""
        metric = self._metric.numbers(metric_2, update.metric_q, update.loss_scale)
        groups = [self._groups.numbers(each, self.device) for each in update.passes]
        return torch.cat([*metric, *update.dual, torch.stack(groups).sum(0).flatten()])

    def _written(self, update: Update) -> Tensor:
        """``rewritten``; 0.0 where there is nothing to compare."""
        before, after = update.prints
        if before is None or after is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return rewritten(before, after, update.passes[-1].loss_scale, update.loss_scale)
