# SPDX-License-Identifier: Apache-2.0
"""Measures an update in the dual norms of sign descent and of spectral descent.
``noise_scale.dual_norms`` has the mathematics.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.estimator.dual_factors import Factors, factors
from gnsfast.estimator.micro_batch_noise import MicroBatchSide, trained
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.side import Block, Setup
from gnsfast.following import Facts
from gnsfast.noise_scale import NUMBERS, dual_norms, summarize_dual
from gnsfast.parallel import parameters_at_rest
from gnsfast.tensors import accumulate_dtype


class DualNorm(MicroBatchSide):
    """The measurement in one dual norm, and V, the running mean of C.

    Each micro-batch adds its gradient to two sums of a parameter: that of the second moments, and
    that of every second micro-batch's gradient.
    """

    name = "sign"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, self._measurable(setup))
        self.left_out = tuple(n for n in setup.slab.parameters if n not in self.parameters)
        self._adds_to_half = False
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._moments = {n: self._zeros(p, self._shape(p)) for n, p in self.parameters.items()}
        some = next(iter(self.parameters.values()))
        self._samples = torch.zeros((), dtype=torch.float64, device=some.device)

    @property
    def width(self) -> int:  # type: ignore[override]
        return NUMBERS * len(self.parameters)

    def _measurable(self, setup: Setup) -> Mapping[str, nn.Parameter]:
        """The parameters that have the dual norm: all that are trained."""
        return trained(setup.model)

    def _shape(self, p: Tensor) -> Sequence[int]:
        """The shape of a parameter's second moments."""
        return p.shape

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        """Add the second moments of one gradient."""
        moments.addcmul_(grad, grad)

    _square: Callable[[Tensor], Tensor] = staticmethod(torch.square)
    _numbers: Callable[[dual_norms.Parts], Tensor] = staticmethod(dual_norms.sign_numbers)

    @staticmethod
    def _zeros(p: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=accumulate_dtype(p.dtype), device=p.device)

    def _in_first_half(self, number: int) -> bool:
        """Whether the first half of the micro-batches holds a pass of this process. Processes begin
        with different halves, so that both get one even if each process has a single pass.
        """
        return (number + self.setup.rank) % 2 == 0

    def open(self, block: Block) -> dict[str, Facts]:
        """The first pass forgets the sums of the last update."""
        self._adds_to_half = self._in_first_half(block.before)
        if not block.before:
            self._sums = {}
        return {}

    def _sums_of(self, name: str) -> tuple[Tensor, Tensor]:
        """The sums of a parameter. They take no memory before the first backward pass."""
        if name not in self._sums:
            p = self.parameters[name]
            self._sums[name] = self._zeros(p, self._shape(p)), self._zeros(p, p.shape)
        return self._sums[name]

    def _arrived(self, name: str, grad: Tensor) -> None:
        moments, half = self._sums_of(name)
        whole = grad.to(moments.dtype)
        self._add(moments, whole)
        if self._adds_to_half:
            half += whole

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> Tensor:
        """This process's share of the numbers of the update, [P NUMBERS]. They are NaN, and V stays
        as it was, if there are too few passes or a number is not finite, as after an overflow.
        """
        self._refuse_alone(len(passes))
        s, on, here = self.setup.settings, self.setup.processes, self._samples.device
        of = factors(passes, self._in_first_half, loss_scale, s, on, self.setup.device)
        of = Factors(*(t.to(here) for t in of))
        lost = torch.zeros((), dtype=torch.float64, device=here)
        for name, p in self.parameters.items():
            for t in self._sums_of(name):
                if on.world > 1:
                    dist.all_reduce(t, group=s.group)
                lost += ~t.sum(dtype=torch.float64).isfinite().to(here)
            lost += ~_grad(p).sum(dtype=torch.float64).isfinite().to(here)
        if on.world > 1:
            dist.all_reduce(lost, group=s.group)
        known = of.known & (lost == 0)
        # A mean over all updates at first, then over about the last ``window``.
        total = self._samples * (1 - 1 / s.window) + of.samples
        share = torch.where(known, of.samples / total, 0.0)
        numbers = []
        for name, moment in self._moments.items():
            of_device = (t.to(moment.device, non_blocking=True) for t in (known, share, *of))
            ok, part, *own_factors = of_device
            sums, grad = self._sums.pop(name), _grad(self.parameters[name])
            parts = self._parts(Factors(*own_factors), *sums, grad)
            new, *others = (torch.where(ok, t, 0.0) for t in parts)
            before = moment.clone()
            moment += part.to(moment.dtype) * (new - moment)
            own = dual_norms.Parts(before, moment, new, *others)
            numbers.append(self._numbers(own).to(here) / on.world)
        usable = known & (self._samples > 0)
        self._samples.copy_(torch.where(known, total, self._samples))
        return torch.where(usable, torch.cat(numbers), torch.nan).to(self.setup.device)

    def _parts(self, of: Factors, p: Tensor, half: Tensor, grad: Tensor) -> list[Tensor]:
        """C and G² without bias, and the mean gradients, whole and of the halves."""
        whole = grad.to(half.dtype) * of.mean.to(half.dtype)
        square = self._square(whole)
        half *= of.scale
        rest = whole * of.total - half
        # If no sample of the second half has a gradient, as for a word that only the first half
        # has, the rest is the rounding error of ``.grad``, which has a sign.
        eps = 2 * torch.finfo(grad.dtype).eps + 16 * torch.finfo(half.dtype).eps
        rest = torch.where(rest.abs() > eps * half.abs(), rest, 0.0)
        return [
            p * of.p_new - square * of.q_new,
            square * of.q_square - p * of.p_square,
            whole,
            half / of.half,
            rest / (of.total - of.half),
        ]

    def numbers(self, update: Update, device: torch.device) -> Tensor:
        found: Tensor = update.left[self.name]
        return found

    def fields(self, numbers: Tensor, window: Window, decay: float | None) -> dict[str, Any]:
        modules = [name.rpartition(".")[0] for name in self.parameters]
        own, left_out = numbers.unflatten(1, (-1, NUMBERS)), self.left_out
        found = summarize_dual(self.name, own, window.scalars, modules, left_out, decay)
        return {self.name: found}

    def state(self, numbers: Tensor) -> dict[str, Any]:
        """The running mean, on the CPU."""
        moments = {name: moment.to("cpu", copy=True) for name, moment in self._moments.items()}
        return {self.name: {"moments": moments, "samples": self._samples.to("cpu", copy=True)}}

    def load(self, state: dict[str, Any]) -> None:
        own = state[self.name]
        self._samples.copy_(own["samples"])
        for name, moment in self._moments.items():
            moment.copy_(own["moments"][name])


class SpectralNorm(DualNorm):
    """The measurement of matrices in the nuclear norm."""

    name = "spectral"
    _square = staticmethod(dual_norms.gram)
    _numbers = staticmethod(dual_norms.spectral_numbers)

    def _measurable(self, setup: Setup) -> Mapping[str, nn.Parameter]:
        """The matrices in ``settings.matrices``, or all except for the weights of embeddings."""
        looked_up, matrices = (nn.Embedding, nn.EmbeddingBag), setup.settings.matrices
        modules = dict(setup.model.named_modules())
        rows = {
            id(p)
            for name, p in parameters_at_rest(setup.model).items()
            if isinstance(modules[name.rpartition(".")[0]], looked_up)
        }
        found = {
            name: p
            for name, p in trained(setup.model).items()
            if p.ndim == 2 and (id(p) not in rows if matrices is None else p in matrices)
        }
        if not found:
            raise ValueError(
                "No parameter has a spectral noise scale. Matrices have it, except for embeddings; "
                "with optimizer=... only those that it trains. Leave metric='spectral' out."
            )
        return found

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        moments += dual_norms.gram(grad)

    def _shape(self, p: Tensor) -> Sequence[int]:
        return (min(p.shape), min(p.shape))


def _grad(p: nn.Parameter) -> Tensor:
    """``p.grad`` as a dense tensor, or zeros if there is none."""
    grad: Tensor = torch.zeros_like(p) if p.grad is None else p.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad
