# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of updates from what their passes left.

A pass and an update only keep tensors as they are. The arithmetic follows in ``compute()``, on the
host. With several processes it follows in ``update()``, on the device, because they must sum their
numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gnsfast.estimator.exchange import Exchange, Seen, Shares, another_norm
from gnsfast.estimator.fingerprint import rewritten
from gnsfast.estimator.micro_batch_noise import weights_of_units
from gnsfast.estimator.records import Pass, Update
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Side
from gnsfast.noise_scale import loss_factors
from gnsfast.probing import Audit, ProbeSlab, calls_of


class Numbers:
    """Computes the vectors and the flags of ``Exchange`` on the device that holds the tensors."""

    def __init__(
        self,
        slab: ProbeSlab,
        exchange: Exchange,
        settings: Settings,
        replicas: list[bool],
        audit: Audit,
        sides: Sequence[Side],
        device: torch.device,
    ) -> None:
        self._exchange, self._processes = exchange, exchange.processes
        self._settings, self.device = settings, device
        self._audit, self._sides = audit, sides
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

        sums_U2K, scalars, calls, surplus, *lost = map(of_updates, self._of_passes(passes))
        # All tensor-parallel processes found the same.
        p_UK, q_UK = (sums_U2K / self._processes.tensor).unbind(1)
        whole_U = q_UK.sum(1)
        seen_U6 = whole_U.new_zeros(len(updates), len(Seen._fields))
        for u, update in enumerate(updates):
            if not update.by_probe or update.norm is not None:
                q, whole, seen = self._of_gradients(update, p_UK[u], q_UK[u], whole_U[u])
                seen_U6[u] = torch.stack([*seen])  # first: it may hold a view of ``whole_U``
                q_UK[u], whole_U[u] = q, whole
        sides_UE = p_UK.new_zeros(len(updates), 0)
        if self._sides:
            rows = ([side.numbers(each, self.device) for side in self._sides] for each in updates)
            sides_UE = torch.stack([torch.cat(row) for row in rows])
        seen = Seen(*seen_U6.unbind(1))
        return self._exchange(
            Shares(p_UK, q_UK, whole_U, scalars, sides_UE, calls, surplus, lost[0], lost[1], seen)
        )

    def _of_passes(self, passes: list[Pass]) -> tuple[Tensor, ...]:
        """The numbers of P passes [P, ...]: p and q of the units, the scalars of the weights, calls
        and surplus calls, and the flags of misplaced tokens.
        """
        K, P = self._units, len(passes)
        parts = (t.to(self.device) for each in passes for t in each.rows)
        rows_K3P = torch.cat([self._no_rows, *parts]).view(P, K, 3).permute(1, 2, 0)
        rows_K3P = torch.zeros_like(rows_K3P).index_copy_(0, self._order, rows_K3P)
        sums = rows_K3P[:, :2].contiguous()
        self._add_audits(passes, sums)
        for k, each in enumerate(passes):
            if each.loss_scale is not None:
                sums[..., k] = loss_factors.without_scale(sums[..., k], each.loss_scale)
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
            torch.stack([self._scalars(each) for each in passes]),
            calls.T,
            torch.where(calls.isnan(), calls, surplus).T,
            *lost.T,
        )

    def _add_audits(self, passes: list[Pass], sums_K2P: Tensor) -> None:
        audited = [k for k, each in enumerate(passes) if each.arrived]
        if not audited:
            return
        self._audit.add(
            sums_K2P[..., audited].permute(2, 1, 0), [passes[k].arrived for k in audited]
        )

    def _scalars(self, each: Pass) -> Tensor:
        found = loss_factors.block_scalars(
            *(each.num_samples, each.passes, each.tokens, each.divided * each.scale),
            *(self._settings.loss_reduction, self._settings.local, self.device),
        )
        return weights_of_units(found) if self._settings.by_gradients else found

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

    def _written(self, update: Update) -> Tensor:
        """``rewritten``; 0.0 where there is nothing to compare."""
        before, after = update.prints
        if before is None or after is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return rewritten(before, after, update.passes[-1].loss_scale, update.loss_scale)
