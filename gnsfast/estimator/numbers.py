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
from gnsfast.estimator.exchange import Exchange, Seen, Shares, another_norm
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


class OfPasses(NamedTuple):
    """The numbers of P passes [P, ...]: those of ``Shares``, and p and q under a metric."""

    p: Tensor
    q: Tensor
    metric: Tensor
    calls: Tensor
    surplus: Tensor
    scalars: Tensor
    padded: Tensor
    empty: Tensor


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

        found = OfPasses(*map(of_updates, self._of_passes(passes)))
        # All tensor-parallel processes found the same.
        p_UK, q_UK = found.p / self._processes.tensor, found.q / self._processes.tensor
        whole_U = q_UK.sum(1)
        seen_U6 = whole_U.new_zeros(len(updates), len(Seen._fields))
        for u, update in enumerate(updates):
            if not update.by_probe or update.norm is not None:
                q_UK[u], whole_U[u], seen = self._of_gradients(update, p_UK[u], q_UK[u], whole_U[u])
                seen_U6[u] = torch.stack([*seen])
        sides_UE = p_UK.new_zeros(len(updates), 0)
        if self._exchange.sides:
            sides_UE = torch.stack([*map(self._sides, updates, found.metric)])
        return self._exchange(
            Shares(
                *(p_UK, q_UK, whole_U, found.scalars, sides_UE, found.calls, found.surplus),
                *(found.padded, found.empty, Seen(*seen_U6.unbind(1))),
            )
        )

    def _of_passes(self, passes: list[Pass]) -> "OfPasses":
        """The numbers of P passes."""
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
        sums = sums * divided
        return OfPasses(
            p=sums[:, 0].T,
            q=sums[:, 1].T,
            metric=weighed,
            calls=calls.T,
            surplus=torch.where(calls.isnan(), calls, surplus).T,
            scalars=torch.stack([self._scalars(each) for each in passes]),
            padded=lost[:, 0],
            empty=lost[:, 1],
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
    ) -> tuple[Tensor, Tensor, Seen]:
        """q, its sum, and what an update's gradients or their norm show."""
        zero = torch.zeros_like(whole)
        seen = Seen(zero, zero, zero, zero, torch.full_like(whole, torch.nan), zero)
        norm = (
            None
            if update.norm is None
            else loss_factors.without_scale(update.norm, update.loss_scale)
        )
        if update.by_probe:
            if norm is not None:  # it is only compared, since the probes are more accurate
                seen = seen._replace(another=another_norm(norm, whole).double())
            return q, whole, seen
        if update.leftover is not None:
            seen = seen._replace(stale=(update.leftover.sum() != 0).double())
        if norm is not None:
            if update.alone:
                seen = seen._replace(read=whole)
            elif update.read is not None:
                read = update.read.shares(self.device).sum()
                read = loss_factors.without_scale(read, update.passes[-1].loss_scale)
                seen = seen._replace(read=read)
            whole = norm * self._processes.divisor**2 / self._processes.world
            # With noise alone it is about p. A gradient scaler's factor, at least 512, would
            # be squared.
            small = (whole < 1e-5 * p.sum()).double()
            return torch.full_like(q, torch.nan), whole, seen._replace(norm=norm, another=small)
        if update.sqnorms is not None:
            shares = update.sqnorms.shares(self.device)
            divided = self._processes.divisor**2  # DDP and FSDP2 average
            q = loss_factors.without_scale(shares, update.loss_scale) * divided
            replica = (q * self._replicas).sum()
            return q, q.sum(), seen._replace(replica=replica, written=self._written(update))
        return q, whole, seen

    def _sides(self, update: Update, metric_2: Tensor) -> Tensor:
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
