# SPDX-License-Identifier: Apache-2.0
"""Compares the gradients that arrive at parameters with what the probes measured."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gnsfast import guard, reference
from gnsfast.following import unfollowed
from gnsfast.probing import checks
from gnsfast.tensors import is_dtensor


class Arrivals:
    """Hands each gradient that arrives at ``parameters`` to ``take``, by the parameter's name,
    before it is added to ``.grad``, averaged over processes or clipped. ``take`` is a method, whose
    owner may be deleted meanwhile.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], take: Callable[[str, Tensor], object]
    ) -> None:
        self._parameters, self._take = parameters, WeakMethod(take)
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Watch a pass."""
        with unfollowed():
            for name, p in self._parameters.items():
                hook = partial(_arriving, self._take, name)
                self._handles.append(p.register_hook(hook))

    def stop(self) -> None:
        """The reverse of ``start``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _arriving(
    to: "WeakMethod[Callable[[str, Tensor], object]]", name: str, grad: Tensor | None
) -> None:
    take = to()
    if grad is None or take is None:  # the loss may use no part of the output
        return
    try:
        take(name, grad.detach())
    except Exception as error:
        if not guard.takes(error):
            raise


class ArrivedNorms:
    """The 2-norms of the gradients that arrive at ``parameters`` in a pass, by name, or without
    ``is_read`` only which of them got one. Those of sharded parameters and of ones with a user's
    hook, which may change them, are not there.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], is_read: bool = True) -> None:
        plain = {
            name: p for name, p in parameters.items() if not (is_dtensor(p) or p._backward_hooks)
        }
        self.names, self._is_read = set[str](), is_read
        self.norms: dict[str, list[Tensor]] = {name: [] for name in plain if is_read}
        self._arrivals = Arrivals(plain, self._add)
        self._arrivals.start()

    def _add(self, name: str, grad: Tensor) -> None:
        self.names.add(name)
        if not self._is_read:
            return
        grad = grad.coalesce().values() if grad.is_sparse else grad
        self.norms[name].append(norm_on_gpu(grad) if grad.is_cuda else norm_on_cpu(grad))

    def stop(self) -> None:
        """Remove the hooks."""
        self._arrivals.stop()


def norm_on_gpu(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient, by one kernel."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm


def norm_on_cpu(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient. (Torch's own is 1e-3 low at 16.8M elements.)"""
    return reference.norm(grad)[0]


class Audit:
    """Compares the squared norm of what passed through the probes with that of the gradients which
    arrived at the parameters. For each parameter the pass with the largest discrepancy is kept.
    """

    def __init__(self, names: list[str], device: torch.device) -> None:
        self.names = names
        self._index = {name: k for k, name in enumerate(names)}
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        shape = 4, len(self.names)
        self._worst = torch.zeros(shape, dtype=torch.float64, device=self._device)

    def add(self, sums_A2K: Tensor, norms: Sequence[Mapping[str, list[Tensor]]]) -> None:
        """Add A passes. ``sums_A2K`` holds the sum of the samples' squared norms of each parameter,
        and the squared norm of their sum; ``norms`` those of the gradients that arrived in each.
        """
        A, _, K = sums_A2K.shape
        device = self._worst.device
        real = self._worst.new_full((A * K,), torch.nan)  # not audited
        audited = [k * K + self._index[name] for k, of in enumerate(norms) for name in of]
        real[torch.tensor(audited, device="cpu").to(device, non_blocking=True)] = 0.0
        arrived = [
            (k * K + self._index[name], norm.to(device))
            for k, of in enumerate(norms)
            for name, parts in of.items()
            for norm in parts
        ]
        if arrived:
            places, parts = zip(*arrived)
            squares = torch.stack(parts).double().square()
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
        worse = worst >= _discrepancy(self._worst)
        self._worst = torch.where(worse, new_4AK.gather(1, index)[:, 0], self._worst)

    def check(self, parameters: Mapping[str, Tensor], is_half: bool) -> str | None:
        """The message for a wrong norm, or None. It waits for the device."""
        for name, (ours, real, samples, whole) in zip(self.names, self._worst.T.tolist()):
            sums = ours, real, samples, whole
            wrong = checks.explain_sums(parameters[name], name, *sums, is_half)
            if wrong is not None:
                return wrong
        return None


AUDIT_EVERY = 100


def is_audited(update: int) -> bool:
    """Whether the gradients of this measured update are compared: of number 0, 1, 2, 4, ..., 64,
    and then of each hundredth. The first ones may overflow under a gradient scaler, and a penalty
    may come in every tenth update only.
    """
    return update % AUDIT_EVERY == 0 if update > AUDIT_EVERY else update & (update - 1) == 0


def _discrepancy(sums_4K: Tensor) -> Tensor:
    ours, real, samples, whole = sums_4K
    scale = torch.maximum(ours, real) + 1e-3 * samples + 1e-7 * whole
    return torch.where(scale > 0, (ours - real).abs() / scale, -1.0)
