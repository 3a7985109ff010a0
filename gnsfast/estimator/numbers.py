# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of updates from what their passes left, and sums them over processes.

A pass and an update only keep tensors as they are. The arithmetic follows in ``compute()``, on the
host. With several processes it follows in ``update()``, on the device, because they must sum their
numbers: one vector for each update. Beside p and q it holds what processes must agree on: a given
``grad_norm``, and the gradients of data-parallel replicas. So a disagreement is noticed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.fingerprint import rewritten
from gnsfast.estimator.micro_batch_noise import scalars_of_pass, weights_of_units
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Side
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes
from gnsfast.probing import Audit, ProbeSlab, calls_of, checks


class Numbers:
    """Computes the numbers and the flags of updates on the ``device`` that holds their tensors.

    The ``width`` numbers of an update are those of ``Window``. Its ``flags`` are the calls of each
    of the K units, and their surplus calls, then ``checks.FLAGS``. ``replicas`` says which
    parameters data-parallel replicas share.
    """

    def __init__(
        self,
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
        replicas: list[bool],
        audit: Audit,
        sides: Sequence[Side],
        device: torch.device,
    ) -> None:
        self.processes, self._settings = processes, settings
        self._audit, self._sides, self.device = audit, sides, device
        self._order = slab.order(device)
        self._replicas = torch.tensor(replicas, dtype=torch.float64, device=device)
        K, of_sides = len(slab.parameters), sum(side.width for side in sides)
        self._units, self._widths = K, [K, K, 1, loss_factors.SCALARS, of_sides]
        self.width, self.flags = sum(self._widths), 2 * K + len(checks.FLAGS)

    def window(self, numbers_UW: Tensor) -> Window:
        """The parts of the numbers of U updates."""
        p, q, whole, *rest = numbers_UW.split(self._widths, 1)
        return Window(p, q, whole.squeeze(1), *rest)

    def __call__(self, updates: list[Update]) -> tuple[Tensor, Tensor]:
        """The numbers [U, width] and the flags of U updates. They do not depend on which updates
        are computed together. Calls cost more than arithmetic here, so there are few of them.
        """
        passes = [each for update in updates for each in update.passes]
        own = [u for u, update in enumerate(updates) for _ in update.passes]
        of_pass = torch.tensor(own).to(self.device, non_blocking=True)

        def of_updates(t: Tensor) -> Tensor:
            return t.new_zeros(len(updates), *t.shape[1:]).index_add_(0, of_pass, t)

        sums_U2K, scalars, *calls, misplaced = map(of_updates, self._of_passes(passes))
        # All tensor-parallel processes found the same.
        p_UK, q_UK = (sums_U2K / self.processes.tensor).unbind(1)
        whole_U = q_UK.sum(1)
        seen_U7 = whole_U.new_zeros(len(updates), 7)
        for u, update in enumerate(updates):
            if not update.by_probe or update.norm is not None:
                q, whole, seen = self._of_gradients(update, p_UK[u], q_UK[u], whole_U[u])
                seen_U7[u] = torch.stack(seen)  # first: it may hold a view of ``whole_U``
                q_UK[u], whole_U[u] = q, whole
        sides_UE = p_UK.new_zeros(len(updates), 0)
        if self._sides:
            rows = ([side.numbers(each, self.device) for side in self._sides] for each in updates)
            sides_UE = torch.stack([torch.cat(row) for row in rows])
        world = self.processes.world
        parts = [
            torch.cat([p_UK, q_UK, whole_U[:, None]], 1),
            *(scalars, sides_UE, torch.cat(calls, 1)),
            *(torch.cat([seen_U7[:, :3], misplaced], 1), seen_U7[:, 3:6]),
        ]
        apart = whole_U.new_zeros(len(updates), 2)
        if world > 1:  # else it agrees with itself
            parts, apart = self._summed(parts, seen_U7[:, 6])
        *numbers, calls_U2K, flags, norms = parts
        flags[:, 2] += another_norm(norms[:, 0] / world, norms[:, 2])
        return torch.cat(numbers, 1), torch.cat([calls_U2K, flags, apart], 1)

    def _summed(self, parts: list[Tensor], replica_U: Tensor) -> tuple[list[Tensor], Tensor]:
        """The parts of all processes, from this process's share of each, and whether processes
        have different gradients, or different norms.
        """
        on = self.processes
        p_q, scalars, *others, norms = parts
        of_replica = torch.stack([torch.ones_like(replica_U), replica_U, replica_U.square()], 1)
        placed = of_replica.new_zeros(len(of_replica), on.tensor, 3)
        placed[:, on.coordinate] = of_replica
        vectors = [p_q, scalars / on.tensor, *others, norms, placed.flatten(1)]
        vector = torch.cat(vectors, 1)
        dist.all_reduce(vector, group=self._settings.group)
        p_q, scalars, *others, norms, replicas = vector.split([t.shape[1] for t in vectors], 1)
        given, square, _ = norms.unbind(1)
        apart = [
            _differ(*replicas.unflatten(1, (-1, 3)).unbind(2)).any(1),
            _differ(given.new_tensor(on.world), given, square),
        ]
        return [p_q, scalars, *others, norms], torch.stack(apart, 1).double()

    def _of_passes(self, passes: list[Pass]) -> tuple[Tensor, ...]:
        """The numbers of P passes [P, ...]: p and q of the units, the scalars of the weights, calls
        and surplus calls, and the flags of misplaced tokens.
        """
        K, P = self._units, len(passes)
        parts = (t.to(self.device) for each in passes for t in each.rows)
        rows_K3P = torch.cat([*parts]).view(P, K, 3).permute(1, 2, 0)
        rows_K3P = torch.zeros_like(rows_K3P).index_copy_(0, self._order, rows_K3P)
        sums = rows_K3P[:, :2].contiguous()
        if audited := [k for k, each in enumerate(passes) if each.arrived]:
            arrived = [passes[k].arrived for k in audited]
            self._audit.add(sums[..., audited].permute(2, 1, 0), arrived)
        for k, each in enumerate(passes):
            if each.loss_scale is not None:
                sums[..., k] = loss_factors.without_scale(sums[..., k], each.loss_scale)
        uses_KP = torch.tensor([e.uses for e in passes], dtype=torch.float64, device="cpu").T
        uses_KP = uses_KP.to(self.device, non_blocking=True)
        calls = calls_of(rows_K3P[:, 2], uses_KP)
        surplus = (calls - 1).clamp(min=0)
        misplaced = sums.new_zeros(P, 2)
        for k, each in enumerate(passes):
            if each.samples:
                assert isinstance(each.tokens, Tensor)
                sqnorm_B = torch.stack([t.to(self.device) for t in each.samples]).sum(0)
                misplaced[k] = torch.stack(loss_factors.misplaced(sqnorm_B, each.tokens))
        return (
            sums.permute(2, 1, 0),
            torch.stack([self._scalars(each) for each in passes]),
            calls.T,
            torch.where(calls.isnan(), calls, surplus).T,
            misplaced,
        )

    def _scalars(self, each: Pass) -> Tensor:
        found = scalars_of_pass(each, self._settings, self.device)
        if not self._settings.by_gradients:
            return found
        return weights_of_units(found, found[4:5].square())

    def _of_gradients(
        self, update: Update, p: Tensor, q: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """q, its sum, and what an update's gradients or their norm show.

        That is whether they were *written* to after backward, whether they were not zero before the
        first pass (*stale*), and whether the given norm is *another* than the probes allow; the
        square of the *given* norm, which may be zero, and the square of that; what an audit has
        *read*, which is NaN without one; the part of q that data-parallel replicas share
        (*replica*).
        """
        written = stale = another = given = replica = torch.zeros_like(whole)
        read, scale, on = torch.full_like(whole, torch.nan), update.loss_scale, self.processes
        norm = (
            update.norm if update.norm is None else loss_factors.without_scale(update.norm, scale)
        )
        if not update.by_probe and update.grads.leftover is not None:
            stale = (update.grads.leftover.sum() != 0).double()
        if update.by_probe:
            if norm is not None:  # it is only compared, since the probes are more accurate
                another = another_norm(norm, whole).double()
        elif norm is not None:
            if update.alone:
                read = whole
            elif update.grads.read is not None:
                read = update.grads.read.shares(self.device).sum()
                read = loss_factors.without_scale(read, update.passes[-1].loss_scale)
            given, whole, q = norm, norm * on.divisor**2 / on.world, torch.full_like(q, torch.nan)
            # With noise alone it is about p. A gradient scaler's factor, at least 512, would
            # be squared.
            another = (whole < 1e-5 * p.sum()).double()
        elif update.grads.sqnorms is not None:
            q = loss_factors.without_scale(update.grads.sqnorms.shares(self.device), scale)
            q = q * on.divisor**2  # DDP and FSDP2 average
            whole, replica = q.sum(), (q * self._replicas).sum()
            before, now = update.grads.last, update.grads.now
            if before is not None and now is not None:
                written = rewritten(before, now, update.passes[-1].loss_scale, scale)
        return q, whole, [written, stale, another, given, given.square(), read, replica]


def another_norm(given: Tensor, read: Tensor) -> Tensor:
    """Whether the square of a ``grad_norm`` is not what was read, which half precision moves by up
    to 1e-2. After an overflow there is nothing to compare, nor where ``read`` is NaN.
    """
    return given.isfinite() & ((given - read).abs() > 0.03 * read)


def _differ(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whether ``count`` numbers differ, from their sum and the sum of their squares."""
    return count * squares - total.square() > 1e-5 * total.square()
