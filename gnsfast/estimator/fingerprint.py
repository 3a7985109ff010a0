# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of the gradients: it shows that they are not those of the backward passes.

Two things make it. The *marks* of gradients change with each write that torch counts, and the host
reads them. The *norms* of a few change with any write (``unscale_`` on the CPU and the clipping of
shards have no mark); they stay on the device until the numbers are read.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast.errors import ObservationError
from gnsfast.following import unfollowed
from gnsfast.noise_scale import loss_factors
from gnsfast.probing import checks
from gnsfast.tensors import accumulate_dtype, local_part

FEW = 8
"""So many of the smallest gradients are looked at in every update, and so many norms are read."""

IN_TURN = 8
"""So many others are looked at in an update, in turn: no step looks at all of a large model."""

WHOLE = 2
"""The first updates look at all of them."""

DDP_WRITES = 2
"""The most writes of DDP to a gradient that arrives: it may divide it and copy it to a bucket."""


class Print(NamedTuple):
    """The marks of the gradients after a pass, and norms, or None if none were read."""

    marks: list[checks.Mark]
    norms: Tensor | None


class Fingerprint:
    """Looks at some gradients at the end of each pass, before the next one, and at ``update()``.

    ``named`` are the parameters that the update under way looks at. ``before`` are the marks of
    their gradients before the open pass, ``leftover`` their norms before the update's first one,
    and ``last`` is the print of the pass before. Without ``is_read``, nobody reads ``.grad``, and
    nothing is compared. Gradients of ``hidden`` parameters arrive in a way that no hook sees.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        is_read: bool,
        hidden: Iterable[str],
    ) -> None:
        self._device, self._is_read, self._hidden = device, is_read, frozenset(hidden)
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
        self.last = Print([], None)
        self._now: Print | None = None
        self._is_written = False

    def again(self) -> None:
        """Look at all gradients in the next update."""
        self._whole = self._updates + 1

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

    def end_backward(self, reads_norms: bool) -> None:
        """Note the gradients when a backward pass has ended."""
        self._now = Print(self._marks(), self.norms() if reads_norms and self._is_read else None)

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

    def finish(self) -> None:
        """Note the gradients that ``zero_grad`` has to remove before the next update."""
        self._after = self._marks()

    def refuse_rewritten(self, scaler: GradScaler | None, takes_norm: bool) -> None:
        """After ``finish``, raise if the gradients are not those of the last backward pass.
        ``takes_norm``: a ``grad_norm`` is a remedy.
        """
        unscaled = loss_factors.unscaled(scaler)
        writes = loss_factors.unscale_writes(self._device) if unscaled else 0
        if self._after != [m and (m[0], m[1] + writes) for m in self.last.marks]:
            raise ObservationError(checks.explain_rewritten(takes_norm))

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
