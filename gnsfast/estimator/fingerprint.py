# SPDX-License-Identifier: Apache-2.0
"""What is in ``.grad`` before the first pass of an update, after each pass, and at ``update()``.

There |G|² comes from, and a fingerprint shows that gradients are not those of the backward passes.
Two things make it. The *marks* of gradients change with each write that torch counts, and the host
reads them. The *norms* of a few change with any write (``unscale_`` on the CPU and the clipping of
shards have no mark); they stay on the device until the numbers are read.

A ``grad_norm`` that the caller gives to ``update()`` may be of another kind, or of some of the
parameters: a plausible number, since noise alone may explain a whole gradient that is smaller than
those of its passes. So some updates read all gradients as the last backward pass leaves them,
before anybody clips them.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.estimator.gradients import Sqnorms, grad_sqnorms
from gnsfast.estimator.settings import Settings
from gnsfast.following import unfollowed
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import Processes
from gnsfast.probing import checks
from gnsfast.tensors import accumulate_dtype, is_dtensor, local_part

FEW = 8
"""So many of the smallest gradients are looked at in every update, and so many norms are read."""

IN_TURN = 8
"""So many others are looked at in an update, in turn: no step looks at all of a large model."""

WHOLE = 2
"""The first updates look at all of them."""

DDP_WRITES = 2
"""The most writes of DDP to a gradient that arrives: it may divide it and copy it to a bucket."""


class Print(NamedTuple):
    """The marks of the gradients after a pass; norms of a few and of all, or None if not read."""

    marks: list[checks.Mark]
    norms: Tensor | None
    whole: Sqnorms | None


class Grads(NamedTuple):
    """What an update found in ``.grad``: the norms of a few gradients before the first pass
    (``leftover``), after the last one, and at ``update()`` (``now``); those of all after the last
    pass, if they are to be compared with a given norm (``read``), and at ``update()``.
    """

    leftover: Tensor | None
    last: Tensor | None
    now: Tensor | None
    read: Sqnorms | None
    sqnorms: Sqnorms | None


class Fingerprint:
    """Looks at some gradients at the end of each pass, before the next one, and at ``update()``.

    ``named`` are the parameters that the update under way looks at. ``before`` are the marks of
    their gradients before the open pass, ``leftover`` their norms before the update's first one,
    and ``last`` is the print of the pass before. With ``source="local"`` nobody reads ``.grad``,
    and nothing is compared.

    Args:
        parameters: all that have norms, and so all that a given norm holds.
        averaged: whether gradients at the end of a backward pass are those of all processes. Where
            the caller averages them later by hand, there is no given norm to compare.
        hidden: gradients of these parameters arrive in a way that no hook sees.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Settings,
        processes: Processes,
        device: torch.device,
        averaged: bool = True,
        hidden: Iterable[str] = (),
    ) -> None:
        self._settings, self._processes, self._device = settings, processes, device
        self._is_read, self._hidden = not settings.local, frozenset(hidden)
        self._averaged = averaged and settings.takes_norm
        self._compares = True  # no given norm was compared since ``again``
        self._was_given: bool | None = None  # whether any was, if an update has ended
        few = {*sorted(parameters, key=lambda name: parameters[name].numel())[:FEW]}
        others = [name for name in parameters if name not in few]
        parts = [others[k : k + IN_TURN] for k in range(0, len(others), IN_TURN)] or [[]]
        self._turns = [
            {name: p for name, p in parameters.items() if name in few or name in part}
            for part in parts
        ]
        self._all = self.named = dict(parameters)
        self._suspects: dict[str, nn.Parameter] = {}
        self._updates, self._whole = 0, WHOLE
        # Of ``named``, when the update before had ended:
        self._after: list[checks.Mark] | None = None
        self.before: list[checks.Mark] = []
        self.leftover: Tensor | None = None
        self.last = Print([], None, None)
        self._now: Print | None = None
        self._is_written = False

    def again(self) -> None:
        """Look at all gradients in the next update, and compare one more given norm."""
        self._whole, self._compares = self._updates + 1, True

    def suspect(self, name: str) -> None:
        """Look at this gradient in all further updates."""
        self._suspects[name] = self._all[name]

    def open(self, first: bool) -> None:
        """Begin a pass, which may be the ``first`` of an update.

        Raises:
            ObservationError: if gradients hold more than the passes of the update.
        """
        self._now, self._is_written = None, False
        self.before = self._marks()
        if not first:
            if self._is_read and self.before != self.last.marks:
                raise ObservationError(checks.BETWEEN)
            return
        if self._is_read and self._after is not None:
            for name, old, now in zip(self.named, self._after, self.before):
                if old is not None and now == old:
                    raise ObservationError(
                        f"{name} still has the gradient of the last update. Call "
                        "optimizer.zero_grad() between gns.update() and the next micro-batch."
                    )
        self._updates += 1
        is_whole = self._updates <= self._whole
        named = self._all if is_whole else self._turns[self._updates % len(self._turns)]
        if self._suspects and not is_whole:
            named = named | self._suspects
        if named is not self.named:
            self.named, self.before = named, checks.marks(named.values())
        self.leftover = self.norms() if self._is_read and any(self.before) else None

    def begin_backward(self, arrived: Mapping[str, int]) -> None:
        """Notice writes since the last pass, as by ``zero_grad`` in a block, when few gradients
        have ``arrived``. Gradients that share a buffer share the count of its writes.
        """
        writes, arrivals = dict[int, int](), dict[int, int]()
        several = dist.is_initialized()
        for (name, p), old in zip(self.named.items(), self.last.marks):
            if old is None or name in self._hidden:
                continue
            now, base = checks.mark(p), None if p.grad is None else p.grad._base
            buffer = id(p.grad if base is None else base)
            arrivals[buffer] = arrivals.get(buffer, 0) + arrived.get(name, 0)
            if now is not None and now[0] == old[0]:
                # Another hook than that of the watch may write to what has arrived.
                if not (arrivals[buffer] and len(p._post_accumulate_grad_hooks or ()) > 1):
                    writes[buffer] = now[1] - old[1]
            elif several and (base is not None or arrived.get(name)):
                continue  # DDP makes new buckets after its first pass
            elif not arrived.get(name) or type(p.grad) is Tensor:  # subclasses have new sums
                self._is_written = True
        each = arrival_writes() * (1 + several * DDP_WRITES)
        self._is_written |= any(n > each * arrivals[buffer] for buffer, n in writes.items())

    def end_backward(self, alone: bool) -> None:
        """Note the gradients when a backward pass has ended, which may be ``alone`` in its update:
        the probes then have its norm.
        """
        reads = self._is_read and not (alone and self._settings.by_probe)
        whole = None if alone or not self._is_read else self.read()
        self._now = Print(self._marks(), self.norms() if reads else None, whole)

    def read(self) -> Sqnorms | None:
        """This process's share of the norms of all gradients at the end of a pass, in the first
        update and in one after each ``again``. Where nobody gives a norm, only the first is read.
        """
        wanted = self._averaged and self._compares and self._was_given is not False
        found = self._sqnorms() if wanted else None
        return found if found and found.indices else None

    def _sqnorms(self) -> Sqnorms:
        return grad_sqnorms([*self._all.values()], self._processes)

    @property
    def is_over(self) -> bool:
        """Whether a backward pass has ended since ``open``."""
        return self._now is not None

    def close(self) -> None:
        """End a pass.

        Raises:
            ObservationError: if gradients began anew in it, so that they lack those before it.
        """
        assert self._now is not None
        self.last = self._now
        if self._is_written:
            raise ObservationError(checks.BETWEEN)

    def forget(self) -> None:
        """Note the gradients that ``zero_grad`` has to remove before the next update."""
        self._after = self._marks()

    def finish(self, given: bool, by_probe: bool) -> Grads:
        """End an update, whose norm is ``given`` or comes from the probes, else from ``.grad``.

        Raises:
            ObservationError: if gradients are gone, or are not those of the last backward pass.
        """
        self.forget()
        sqnorms = now = None
        if not given and not by_probe and self._all:
            if not self._settings.by_gradients:  # they are seen as hooks have left them
                self._refuse_hooks()
            sqnorms = self._sqnorms()
            if not sqnorms.indices:
                raise ObservationError(checks.GONE)
            self._refuse_rewritten()
            now = self.norms()
        read = self.last.whole if given else None
        self._compares &= read is None
        self._was_given = given or bool(self._was_given)
        return Grads(self.leftover, self.last.norms, now, read, sqnorms)

    def _refuse_hooks(self) -> None:
        for name, p in self._all.items():
            if p._backward_hooks and not is_dtensor(p):
                raise ObservationError(
                    f"{name} has a gradient hook, so .grad may not be the sum of its samples' "
                    "gradients. Use source='local', which does not read it."
                )

    def _refuse_rewritten(self) -> None:
        unscaled = loss_factors.unscaled(self._settings.grad_scaler)
        writes = loss_factors.unscale_writes(self._device) if unscaled else 0
        if self._after != [m and (m[0], m[1] + writes) for m in self.last.marks]:
            raise ObservationError(checks.explain_rewritten(self._settings.takes_norm))

    def _marks(self) -> list[checks.Mark]:
        return checks.marks(self.named.values())

    def norms(self) -> Tensor | None:
        """The norms of the smallest gradients."""
        few: dict[torch.device, list[Tensor]] = {}
        left = FEW
        with unfollowed():
            for p in sorted(self.named.values(), key=Tensor.numel):
                if (grad := p.grad) is None or grad.is_sparse:
                    continue
                grad = local_part(grad.detach())
                if grad.numel():
                    few.setdefault(grad.device, []).append(grad)
                    left -= 1
                if not left:
                    break
        norms = []
        for grads in few.values():
            wide = max((accumulate_dtype(g.dtype) for g in grads), key=lambda dtype: dtype.itemsize)
            found = torch.stack(torch._foreach_norm(grads, 2, dtype=wide)).to(self._device)
            norms.append(found)
        return torch.cat(norms) if norms else None


def rewritten(
    before: Tensor, after: Tensor, scale_before: Tensor | None, scale_after: Tensor | None
) -> Tensor:
    """1.0 if norms show that gradients were written to between two looks, else 0.0."""
    then = loss_factors.without_scale(before.double().sum().square(), scale_before)
    now = loss_factors.without_scale(after.double().sum().square(), scale_after)
    return ((now / then - 1).abs() > 1e-3).double()


@functools.cache
def arrival_writes() -> int:
    """By how much the mark of a gradient grows when autograd adds to it."""
    p: Any = nn.Parameter(torch.zeros(1, device="cpu"))
    with torch.enable_grad():
        p.sum().backward()
        before: int = p.grad._version
        p.sum().backward()
    return p.grad._version - before  # type: ignore[no-any-return]
