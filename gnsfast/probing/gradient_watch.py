# SPDX-License-Identifier: Apache-2.0
"""Watches the gradients that arrive at parameters, and compares them with what the probes saw."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gnsfast import reference
from gnsfast.following import unfollowed
from gnsfast.probing import checks
from gnsfast.tensors import is_dtensor


def norm_on_gpu(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient, by one kernel."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm


def norm_on_cpu(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient. (Torch's own is 1e-3 low at 16.8M elements.)"""
    return reference.norm(grad)[0]


class GradientWatch:
    """The gradients of one backward pass as they arrive at parameters, before they are added to
    ``.grad``, averaged over processes or clipped.

    ``arrived`` counts those of ``parameters``, and ``norms`` holds the 2-norms of those that are
    ``audited``. Sharded parameters have no hooks, because their gradients arrive in another way:
    their marks tell. With ``by_marks`` the others have none either where ``.grad`` is None: once it
    is there, a gradient has arrived. Where it was there before, it may be written to without one,
    by ``zero_grad`` or by a write to a buffer that several share. A hook takes 4 µs in a pass.
    ``marks`` are those of ``parameters``, if they are known.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        audited: Mapping[str, nn.Parameter],
        by_marks: bool = False,
        marks: list[checks.Mark] | None = None,
    ) -> None:
        self.arrived: Counter[str] = Counter()
        self.norms: dict[str, list[Tensor]] = {}
        self._parameters = parameters
        marks = checks.marks(parameters.values()) if marks is None else marks
        self._before = dict(zip(parameters, marks))
        self._hooked: set[str] = set()
        self._handles: list[RemovableHandle] = []
        try:
            with unfollowed():
                for name, p in audited.items():
                    if not (is_dtensor(p) or p._backward_hooks):  # a user's hook may change it
                        self._handles.append(p.register_hook(partial(self._arriving, name)))
                        self.norms[name] = []
                for name, p in parameters.items():
                    if not (by_marks and self._before[name] is None or is_dtensor(p)):
                        hook = partial(self._arrived, name)
                        self._handles.append(p.register_post_accumulate_grad_hook(hook))
                        self._hooked.add(name)
        except RuntimeError:
            self.stop()
            raise

    def _arriving(self, name: str, grad: Tensor | None) -> None:
        if grad is None:  # the loss does not use this output
            return
        grad = grad.coalesce().values() if grad.is_sparse else grad
        norm = norm_on_gpu if grad.is_cuda else norm_on_cpu
        self.norms[name].append(norm(grad.detach()))

    def _arrived(self, name: str, p: Tensor) -> None:
        mark = checks.mark(p)
        if mark is None or mark == self._before[name]:  # nothing arrived, as in ``_arriving``
            return
        self._before[name] = mark  # only a new mark shows the next one
        self.arrived[name] += 1

    def sees(self, name: str) -> bool:
        """Whether a parameter is among those that are watched."""
        return name in self._before

    def has_arrived(self, name: str) -> bool:
        """Whether a parameter that is watched has got a gradient."""
        if name in self._hooked:
            return name in self.arrived
        return checks.mark(self._parameters[name]) != self._before[name]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class Audit:
    """Compares the squared norm of what passed through the probes with that of the gradients which
    arrived at the parameters, over many passes.

    A pass audits ``AT_ONCE`` parameters, the next pass the next ones, until each was compared once
    with numbers that tell something: a gradient that is not zero and has not overflowed. That is
    known only when the arithmetic is done, and a misuse may be in one micro-batch of an update,
    or in every fifth update. So until then all passes of ``WHOLE`` updates are audited, then those
    of one update in ten. Where the numbers tell nothing, it begins anew. All are audited once more
    every ``AUDIT_EVERY`` updates. For each the pass with the largest discrepancy is kept.
    """

    def __init__(self, names: list[str], device: torch.device) -> None:
        self.names = names
        self._index = {name: k for k, name in enumerate(names)}
        self._found = torch.zeros(4, len(names), dtype=torch.float64, device=device)
        self._updates = 0  # never set back, so that no period is met in one phase only
        self.again()

    def again(self) -> None:
        """Audit all parameters again."""
        self._left = dict.fromkeys(self.names)
        self._begin()

    def _begin(self) -> None:
        """Audit what is left in all passes for a while."""
        self._whole = self._updates + WHOLE * -(-len(self._left) // AT_ONCE)

    def next(self, first: bool = True) -> list[str]:
        """The parameters to audit in the next pass, which may be the ``first`` of an update. They
        have their next turn after all others.
        """
        self._updates += first
        # Multiples of the golden ratio come near to a whole number at all phases of all periods.
        if self._updates > self._whole and self._updates * GOLDEN % 1 >= 0.1:
            return []
        names = list(islice(self._left, AT_ONCE))
        for name in names:
            self._left[name] = self._left.pop(name)
        return names

    def undo(self, names: Iterable[str]) -> None:
        """Audit parameters next whose pass does not count, if they have still to be audited."""
        first = {name: None for name in names if name in self._left}
        self._left = first | self._left

    def add(self, sums_A2K: Tensor, norms: Sequence[Mapping[str, list[Tensor]]]) -> None:
        """Add A passes. ``sums_A2K`` holds the sum of the samples' squared norms of each parameter,
        and the squared norm of their sum; ``norms`` those of the gradients that arrived in each.
        """
        A, _, K = sums_A2K.shape
        device = self._found.device
        audited = [k * K + self._index[name] for k, own in enumerate(norms) for name in own]
        arrived = [
            (k * K + self._index[name], norm.to(device))
            for k, own in enumerate(norms)
            for name, each in own.items()
            for norm in each
        ]
        real = self._found.new_full((A * K,), torch.nan)
        real[torch.tensor(audited, device="cpu").to(device, non_blocking=True)] = 0.0
        if arrived:
            places, found = zip(*arrived)
            squares = torch.stack(found).double().square()
            at = torch.tensor(places, device="cpu").to(device, non_blocking=True)
            real.index_add_(0, at, squares)
        samples, ours = sums_A2K.unbind(1)
        whole = samples.sum(1, True).expand_as(samples)
        new_4AK = torch.stack([ours, real.view(A, K), samples, whole])
        # Not finite: not audited, or an overflow, which a gradient scaler skips.
        finite_AK = new_4AK.isfinite().all(0)
        of_pass = torch.where(finite_AK, _discrepancy(new_4AK), -torch.inf).flip(0)
        worst, back = of_pass.max(0)
        index = (A - 1 - back).expand(4, 1, K)
        worse = worst >= _discrepancy(self._found)
        self._found = torch.where(worse, new_4AK.gather(1, index)[:, 0], self._found)
        if device.type == "cpu":  # else ``check`` knows later
            enough = (finite_AK & (ours > 0)).any(0).tolist()
            for name in {name for own in norms for name in own}:
                if enough[self._index[name]]:
                    self._left.pop(name, None)
                elif name in self._left:
                    self._begin()

    def check(
        self,
        parameters: Mapping[str, Tensor],
        is_half: bool,
    ) -> str | None:
        """The message for a wrong norm, or None. It waits for the device."""
        for name, (ours, real, samples, whole) in zip(self.names, self._found.T.tolist()):
            found = ours, real, samples, whole
            wrong = checks.explain_sums(parameters[name], name, *found, is_half)
            if wrong is not None:
                return wrong
            if ours > 0:
                self._left.pop(name, None)
        self._begin()
        return None


AT_ONCE = 32
"""The parameters audited in a pass. Each costs a read of its gradient and a kernel; a model of 148
parameters is through after 5 passes."""

WHOLE = 16
"""So many updates are audited in all their passes, times as many as a round over all parameters
takes. Penalties on weights are often computed in every tenth or sixteenth step only."""

AUDIT_EVERY = 100

GOLDEN = (math.sqrt(5) - 1) / 2


def _discrepancy(found: Tensor) -> Tensor:
    ours, real, samples, whole = found
    scale = torch.maximum(ours, real) + 1e-3 * samples + 1e-7 * whole
    return torch.where(scale > 0, (ours - real).abs() / scale, -1.0)
