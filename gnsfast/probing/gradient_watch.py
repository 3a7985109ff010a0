# SPDX-License-Identifier: Apache-2.0
"""Watches the gradients that arrive at parameters, and compares them with what probes saw."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gnsfast import reference
from gnsfast.layers import DropIn
from gnsfast.probing import checks
from gnsfast.tensors import is_dtensor


class GradientWatch:
    """The gradients of one backward pass as they arrive at parameters: before they are added to
    ``.grad``, averaged over processes or clipped.

    The gradients of sharded parameters arrive in other ways and are not watched. ``at_end`` runs
    after the backward pass and its averages over processes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        audited: Collection[str],
        probes: Iterable[Tensor] = (),
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.arrived: Counter[str] = Counter()
        self.sqnorms: dict[str, Tensor] = {}
        self.audited: list[str] = []
        self.watched = [name for name, p in parameters.items() if not is_dtensor(p)]
        self._at_end, self._waiting = at_end, False
        self._handles: list[RemovableHandle] = []
        for name in self.watched:
            p = parameters[name]
            if name in audited and not p._backward_hooks:  # a user's hook may change the gradient
                self.audited.append(name)
                self._handles.append(p.register_hook(partial(self._arriving, name)))
            arrived = partial(self._arrived, name)
            self._handles.append(p.register_post_accumulate_grad_hook(arrived))
        for probe in probes:
            self._handles.append(probe.register_post_accumulate_grad_hook(self._wait))

    def _arriving(self, name: str, grad: Tensor) -> None:
        grad = grad.coalesce().values() if grad.is_sparse else grad
        found = reference.sqnorm(grad.detach())
        self.sqnorms[name] = self.sqnorms[name] + found if name in self.sqnorms else found

    def _arrived(self, name: str, p: Tensor) -> None:
        self.arrived[name] += 1

    def _wait(self, probe: Tensor) -> None:
        """Call ``at_end`` after this pass. A callback queued by a callback runs after those in
        which DDP and FSDP2 finish their gradients.
        """
        if self._at_end is None or self._waiting:
            return
        self._waiting = True
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end))

    def _end(self) -> None:
        self._waiting = False
        if self._at_end is not None:
            self._at_end()

    def stop(self) -> None:
        """Remove the hooks."""
        self._at_end = None
        for handle in self._handles:
            handle.remove()


class Audit:
    """Compares the squared norm of what passed through the probes with that of what arrived at the
    parameters, over many passes and without waiting for the device.

    A parameter is audited until it was right once, and all parameters again every ``AUDIT_EVERY``
    updates. For each the pass with the largest discrepancy is kept.
    """

    def __init__(self, names: list[str], device: torch.device) -> None:
        self.names, self.device = names, device
        self.right: set[str] = set()
        self._index = {name: k for k, name in enumerate(names)}
        self._found = torch.zeros(4, len(names), dtype=torch.float64, device=device)

    def wanted(self) -> list[str]:
        """The parameters to audit in the next pass."""
        return [name for name in self.names if name not in self.right]

    def add(self, sums: Tensor, watch: GradientWatch) -> None:
        """Add a pass that ``watch`` saw. ``sums`` [2, names] holds for each parameter the sum of
        the samples' squared norms, and the squared norm of their sum.
        """
        if not watch.audited:
            return
        rows = [self._index[name] for name in watch.audited]
        zero = torch.zeros((), dtype=torch.float64)
        real = torch.stack(
            [watch.sqnorms.get(n, zero).to(self.device, non_blocking=True) for n in watch.audited]
        )
        index = torch.tensor(rows).to(self.device, non_blocking=True)
        samples, ours = sums[:, index]
        whole = sums[0].sum().expand_as(real)
        new = torch.stack([ours, real, samples, whole])
        old = self._found[:, index]
        # Not finite: an overflow, which a gradient scaler skips.
        worse = new.isfinite().all(0) & (_discrepancy(new) >= _discrepancy(old))
        self._found[:, index] = torch.where(worse, new, old)

    def check(
        self,
        parameters: Mapping[str, Tensor],
        paths: Mapping[str, list[str]],
        modules: Mapping[str, DropIn],
    ) -> str | None:
        """What is wrong, with the parameter's name, or None. Waits for the device."""
        for name, (ours, real, samples, whole) in zip(self.names, self._found.T.tolist()):
            own = {path: modules[path] for path in paths[name]}
            wrong = checks.explain_sums(parameters[name], name, own, ours, real, samples, whole)
            if wrong is not None:
                return wrong
            if ours > 0:
                self.right.add(name)
        return None

    def again(self) -> None:
        """Audit all parameters again."""
        self.right.clear()


AUDIT_EVERY = 100


def _discrepancy(found: Tensor) -> Tensor:
    ours, real, samples, whole = found
    scale = torch.maximum(ours, real) + 1e-3 * samples + 1e-7 * whole
    return torch.where(scale > 0, (ours - real).abs() / scale, -1.0)
