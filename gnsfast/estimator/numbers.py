# SPDX-License-Identifier: Apache-2.0
"""The numbers of updates: named columns, computed from what passes left, and summed over processes.

A pass and an update only keep tensors as they are. The arithmetic follows in ``compute()``, on the
host. With several processes it follows at the end of the update, on the device, because they must
sum their shares: one vector for each update.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.estimator.micro_batch_noise import scalars_of_pass, weights_of_units
from gnsfast.estimator.records import Columns, Flags, Pass, Share, Update, Window
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Side
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes
from gnsfast.probing import Audit, ProbeSlab, calls_of


class Numbers:
    """Computes the numbers and the flags of updates on the ``device`` that holds their tensors.

    ``window`` and ``flags`` are the columns of both. ``replicas`` says which parameters
    data-parallel replicas share, and ``whole`` which ones each tensor-parallel process has for
    itself.
    """

    def __init__(
        self,
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
        replicas: list[bool],
        whole: list[bool],
        audit: Audit,
        sides: Sequence[Side],
        device: torch.device,
    ) -> None:
        self.processes, self._settings = processes, settings
        self._audit, self._sides, self.device = audit, sides, device
        self._order = slab.order(device)
        self._replicas = torch.tensor(replicas, dtype=torch.float64, device=device)
        self._whole = torch.tensor(whole, dtype=torch.float64, device=device)
        K, E, S = len(slab.parameters), sum(side.width for side in sides), loss_factors.SCALARS
        norms = {"p": K, "q": K, "scalars": S, "sides": E}
        self.window = Columns(Window, **norms)
        self.flags = Columns(Flags, calls=K, surplus=K, unseen=K)
        replica = 4 * processes.tensor
        self._share = Columns(Share, **norms, calls=K, surplus=K, pace=2, replicas=replica)

    def __call__(self, updates: list[Update]) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers and the flags of U updates, and the pace [U, 2]. They do not depend on which
        updates are computed together.
        """
        share = self._share_of(updates) if updates[0].passes else self._lost(updates)
        apart = parts = torch.zeros_like(share.reach)
        if self.processes.world > 1:  # else it agrees with itself
            vector = self._share.joined(share)
            dist.all_reduce(vector, group=self._settings.group)
            share = self._share.split(vector)
            *replicas, whole = share.replicas.unflatten(1, (-1, 4)).unbind(2)
            apart = _differ(*replicas).any(1, True).double()
            if (tensor := self.processes.tensor) > 1:
                sums = whole.sum(1, True), whole.square().sum(1, True)
                parts = _differ(torch.full_like(parts, tensor), *sums).double()
        largest = (1 + TOLERANCE) * share.reach.square()
        flags = Flags(
            calls=share.calls,
            surplus=share.surplus,
            unseen=((share.calls == 0) & (share.q > 0)).double(),
            stale=share.stale,
            zeroed=((share.q.sum(1, True) == 0) & (share.reach > 0)).double(),
            excess=(share.q.sum(1, True) > largest).double(),
            padded=share.padded,
            empty=share.empty,
            apart=apart,
            parts=parts,
        )
        numbers = Window(share.p, share.q, share.scalars, share.sides)
        return self.window.joined(numbers), self.flags.joined(flags), share.pace

    def _lost(self, updates: list[Update]) -> Share:
        """The share in an update that an error has dropped here: nobody uses its numbers."""
        widths = zip(Share._fields, self._share.widths)
        shape = {
            name: torch.zeros(1, width, dtype=torch.float64, device=self.device)
            for name, width in widths
        }
        [update] = updates
        pace = shape["pace"].new_tensor([update.pace]) / self.processes.world
        nothing = torch.full_like(shape["p"], torch.nan)  # so no flag is raised either
        return Share(**shape)._replace(p=nothing, q=nothing, pace=pace)

    def _share_of(self, updates: list[Update]) -> Share:
        """This process's share. Calls cost more than arithmetic here, so there are few of them."""
        passes = [each for update in updates for each in update.passes]
        place = [u for u, update in enumerate(updates) for _ in update.passes]
        of_pass = torch.tensor(place).to(self.device, non_blocking=True)

        def of_updates(t: Tensor) -> Tensor:
            return t.new_zeros(len(updates), *t.shape[1:]).index_add_(0, of_pass, t)

        on, sums_P2K, calls_PK = self.processes, *self._of_passes(passes)
        scalars_PS = torch.stack([self._scalars(each) for each in passes])
        if self._settings.local:
            sums_PK2, scalars_PK = loss_factors.per_token(sums_P2K.mT, scalars_PS[:, None])
            sums_P2K, scalars_PS = sums_PK2.mT, scalars_PK[:, 0]
        reach = of_updates(sums_P2K[:, 1].sum(1, True).sqrt())
        # All tensor-parallel processes have measured the same.
        p, q = (of_updates(sums_P2K) / on.tensor).unbind(1)
        replicas, stale = q.new_zeros(len(updates), on.tensor, 4), torch.zeros_like(reach)
        if on.tensor > 1:
            replicas[:, on.coordinate, 3] = p @ self._whole
        for u, update in enumerate(updates):
            if update.sqnorms is not None:
                of_grad = update.sqnorms.shares(self.device)
                # DDP and FSDP2 average.
                q[u] = loss_factors.without_scale(of_grad, update.loss_scale) * on.divisor**2
                replica = (q[u] * self._replicas).sum()
                row = torch.stack([torch.ones_like(replica), replica, replica.square()])
                replicas[u, on.coordinate, :3] = row
            if update.leftover is not None:
                stale[u] = update.leftover.shares(self.device).sum() != 0
        sides = p.new_zeros(len(updates), 0)
        if self._sides:
            rows = ([side.numbers(each, self.device) for side in self._sides] for each in updates)
            sides = torch.stack([torch.cat(row) for row in rows])
        padded, empty = of_updates(self._misplaced(passes)).split(1, 1)
        surplus = torch.where(calls_PK.isnan(), calls_PK, (calls_PK - 1).clamp(min=0))
        return Share(
            p=p,
            q=q,
            scalars=of_updates(scalars_PS) / on.tensor,
            sides=sides,
            pace=p.new_tensor([update.pace for update in updates]) / on.world,
            calls=of_updates(calls_PK),
            surplus=of_updates(surplus),
            stale=stale,
            padded=padded,
            empty=empty,
            reach=reach / on.tensor,
            replicas=replicas.flatten(1),
        )

    def _of_passes(self, passes: list[Pass]) -> tuple[Tensor, Tensor]:
        """p and q of the units in P passes [P, 2, K], and the calls that reached them [P, K]."""
        K, P = len(self._order), len(passes)
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
        return sums.permute(2, 1, 0), calls_of(rows_K3P[:, 2], uses_KP).T

    def _misplaced(self, passes: list[Pass]) -> Tensor:
        """The flags of misplaced tokens in P passes [P, 2]."""
        misplaced = torch.zeros(len(passes), 2, dtype=torch.float64, device=self.device)
        for k, each in enumerate(passes):
            if each.samples:
                assert isinstance(each.tokens, Tensor)
                sqnorm_B = torch.stack([t.to(self.device) for t in each.samples]).sum(0)
                misplaced[k] = torch.stack(loss_factors.misplaced(sqnorm_B, each.tokens))
        return misplaced

    def _scalars(self, each: Pass) -> Tensor:
        scalars = scalars_of_pass(each, self._settings, self.device)
        if not self._settings.by_gradients:
            return scalars
        return weights_of_units(scalars, scalars[4:5].square())


TOLERANCE = 3e-2
"""Half precision moves the squared norm of ``.grad`` by up to 1e-2."""


def _differ(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whether ``count`` numbers differ, from their sum and the sum of their squares."""
    return count * squares - total.square() > 1e-5 * total.square()
