# SPDX-License-Identifier: Apache-2.0
"""Measures an update in the dual norms of sign descent and of spectral descent.
``noise_scale.dual_norms`` has the mathematics.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnsfast.combinations import SIGN, SPECTRAL
from gnsfast.eager import EAGER
from gnsfast.errors import ObservationError
from gnsfast.estimator.dual_factors import Factors, factors
from gnsfast.estimator.holdings import Held, begun, held, held_by_matrix
from gnsfast.estimator.micro_batch_noise import Arrivals, measurable, trained
from gnsfast.estimator.records import Pass, Update, Window
from gnsfast.estimator.side import Block, Setup, Side
from gnsfast.following import Facts
from gnsfast.functional import Grams, Halves, Squares
from gnsfast.noise_scale import (
    NUMBERS,
    dual_norms,
    summarize_dual,
)

MOST_ALONE = 2
"""So many updates in a row may have a single pass, and are skipped, as at the end of an epoch."""


class DualNorm(Side):
    """The measurement in one dual norm, and V, the running mean of C."""

    name = "sign"
    feature = SIGN
    needs = "None is trained. Leave metric='sign' out."

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        settings, on, names = setup.settings, setup.processes, setup.slab.parameters
        self._settings, self._processes = settings, on
        self._samples_alone = not settings.micro_batches
        measured = names if self._samples_alone else trained(setup.model)
        self.parameters = measurable(setup.model, measured, self.feature, settings)
        self._refuse_none()
        self.left_out = tuple(n for n in names if n not in self.parameters)
        shaped = {name: (p, self._shape(p)) for name, p in self.parameters.items()}
        self._holdings = self._hold(shaped, on, settings.group)
        arriving = {} if self._samples_alone else self.parameters
        self._arrivals, self._first_half = Arrivals(arriving, self._arrived), False
        self._release: Callable[[], object] = int  # there is nothing to release
        self._has_compared = False  # whether an update had units to compare
        self._alone = 0  # updates in a row that had none
        self._moments: dict[str, Tensor] = {}
        for name, holding in self._holdings.items():
            if (part := holding.part(holding.zeros(holding.shape))) is not None:
                self._moments[name] = part
        some = next(iter(self.parameters.values()))
        self._samples = torch.zeros((), dtype=torch.float64, device=some.device)

    @property
    def width(self) -> int:  # type: ignore[override]
        return NUMBERS * len(self.parameters)

    def _refuse_none(self) -> None:
        if not self.parameters:
            raise ValueError(f"No parameter has {self.feature}. {self.needs}")

    def leave_out(self, names: Sequence[str]) -> None:
        """Measure single samples of some parameters no more."""
        for name in names if self._samples_alone else ():
            for of in (self.parameters, self._holdings, self._moments):
                of.pop(name, None)
        if self._samples_alone:
            self.left_out = tuple(n for n in self.left_out if n not in names)
            self._refuse_none()

    def _shape(self, p: Tensor) -> Sequence[int]:
        """The shape of a parameter's second moments."""
        return p.shape

    _sink: Callable[..., Any] = Squares

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        """Add the second moments of one gradient."""
        moments.addcmul_(grad, grad)

    _square: Callable[[Tensor], Tensor] = staticmethod(torch.square)
    _numbers: Callable[..., Tensor] = staticmethod(dual_norms.sign_numbers)
    _hold: Callable[..., Held] = staticmethod(held)

    def _first_sample(self, passes: int) -> int:
        """Passes take turns, so that both halves get samples even if each pass has only one."""
        return (passes + self.setup.rank) % 2

    def open(self, block: Block) -> dict[str, Facts]:
        """Where each parameter adds its sums. The first pass forgets those of the last update."""
        first_sample = self._first_sample(block.before)
        self._first_half = not first_sample
        found = {}
        for holding in () if block.before else self._holdings.values():
            holding.forget()
        for name, holding in self._holdings.items() if self._samples_alone else ():
            halves = Halves(partial(begun, [holding], 1), first_sample, self.feature)
            found[name] = Facts(second=(self._sink(partial(begun, [holding], 0)), halves))
        return found

    def start(self) -> None:
        """If the modules of a compiled model add to sums, it runs in eager mode until ``stop``,
        because each update has new sums and would compile a new graph.
        """
        self._arrivals.start()
        if self._samples_alone:
            self._release = EAGER.hold(self)

    def stop(self) -> None:
        self._arrivals.stop()
        self._release()

    def _arrived(self, name: str, grad: Tensor) -> None:
        """Add the gradient of a micro-batch to the sums of the update."""
        holding = self._holdings[name]
        moments = holding.begun(0)
        whole = grad.to(moments.dtype)
        self._add(moments, whole)
        if self._first_half:
            holding.begun(1).add_(whole)

    def passed(self) -> None:
        """Sum over processes what the pass left of sharded parameters."""
        self._keep(by_pass=True)

    def _keep(self, by_pass: bool) -> None:
        """Sum over processes what backward has left: with ``by_pass`` for the parameters that need
        this after each pass, else for all others.
        """
        for holding in self._holdings.values():
            if holding.by_pass == by_pass:
                holding.keep()

    def finish(self, passes: list[Pass], by_probe: bool, loss_scale: Tensor | None) -> Tensor:
        """This process's share of the numbers of the update, [P NUMBERS]. They are NaN, and V stays
        as it was, if there are too few samples or a number is not finite, as after an overflow.
        """
        self._refuse_alone(len(passes))
        where = self._settings, self._processes, self.setup.device
        of = factors(passes, self._first_sample, loss_scale, *where)
        self._keep(by_pass=False)
        here = self._samples.device
        of = Factors(*(t.to(here) for t in of))
        kept = {name: holding.take() for name, holding in self._holdings.items()}
        lost = torch.zeros((), dtype=torch.float64, device=here)
        for t in chain.from_iterable(kept.values()):
            lost += ~t.sum(dtype=torch.float64).isfinite().to(here)
        if self._processes.world > 1:
            dist.all_reduce(lost, group=self._settings.group)
        known = of.known & (lost == 0)
        # A mean over all updates at first, then over about the last ``window``.
        total = self._samples * (1 - 1 / self._settings.window) + of.samples
        share = torch.where(known, of.samples / total, 0.0)
        numbers = []
        for name, holding in self._holdings.items():
            if name not in self._moments:
                numbers.append(of.samples.new_zeros(NUMBERS))
                continue
            moment = self._moments[name]
            of_device = (t.to(moment.device, non_blocking=True) for t in (known, share, *of))
            ok, part, *own_factors = of_device
            parts = self._parts(Factors(*own_factors), *kept.pop(name))
            new, *others = (torch.where(ok, t, 0.0) for t in parts)
            before = moment.clone()
            moment += part.to(moment.dtype) * (new - moment)
            own = dual_norms.Parts(before, moment, new, *others)
            numbers.append(self._numbers(own, holding.total).to(here) * holding.share)
        usable = known & (self._samples > 0)
        self._samples.copy_(torch.where(known, total, self._samples))
        return torch.where(usable, torch.cat(numbers), torch.nan).to(self.setup.device)

    def _refuse_alone(self, passes: int) -> None:
        """Raise if micro-batches should be compared but there is only one. After an update with
        more of them this is not an error, as at the end of an epoch: the update is skipped.
        """
        several = passes * self._processes.world > 1
        self._alone = 0 if several else self._alone + 1
        few = self._alone > (MOST_ALONE if self._has_compared else 0)
        if self._settings.micro_batches and few:
            raise ObservationError(
                "noise_from='micro_batches' compares the gradients of an update's backward "
                "passes. This update had 1 pass on 1 process, and it takes 2 or more, better 4. "
                "Accumulate gradients, with a gns.microbatch block for each pass, or use more "
                "processes. noise_from='samples' measures a single pass."
            )
        self._has_compared |= several

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
        units = "micro_batches" if self._settings.micro_batches else "samples"
        return {self.name: replace(found, noise_from=units)}

    def state(self, numbers: Tensor) -> dict[str, Any]:
        """The running mean, whole and on the CPU."""
        moments = {
            name: holding.whole(self._moments.get(name)).to("cpu", copy=True)
            for name, holding in self._holdings.items()
        }
        samples = self._samples.to("cpu", copy=True)
        return {self.name: {"moments": moments, "samples": samples}}

    def load(self, state: dict[str, Any]) -> None:
        own = state[self.name]
        self._samples.copy_(own["samples"])
        self._has_compared = bool(own["samples"] > 0)
        for name, moment in self._moments.items():
            part = self._holdings[name].part(own["moments"][name])
            assert part is not None
            moment.copy_(part)


class SpectralNorm(DualNorm):
    """The measurement of matrices in the nuclear norm."""

    name = "spectral"
    feature = SPECTRAL
    needs = (
        "Matrices have it, except for embeddings; with optimizer=... only those that it trains. "
        "Leave metric='spectral' out."
    )
    _sink = Grams
    _square = staticmethod(dual_norms.gram)
    _hold = staticmethod(held_by_matrix)

    @staticmethod
    def _numbers(of: dual_norms.Parts, total: Any) -> Tensor:
        return dual_norms.spectral_numbers(of)

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        moments += dual_norms.gram(grad)

    def _shape(self, p: Tensor) -> Sequence[int]:
        return (min(p.shape), min(p.shape))
