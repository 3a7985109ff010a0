# SPDX-License-Identifier: Apache-2.0
"""The measurements of an update in the dual norms of sign descent and of spectral descent
(``noise_scale.dual_norms`` has the mathematics).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.combinations import SIGN, SPECTRAL, TENSOR_PARALLEL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator.dual_factors import Factors, factors
from gnsfast.estimator.eager import EAGER
from gnsfast.estimator.micro_batch_noise import Arrivals, trainable
from gnsfast.estimator.numbers import Pass
from gnsfast.estimator.settings import Settings
from gnsfast.functional import Grams, Halves, Squares
from gnsfast.noise_scale import (
    NUMBERS,
    DualNoiseScale,
    NoiseScale,
    dual_norms,
    summarize_dual,
)
from gnsfast.parallel import Processes
from gnsfast.probing import ProbeSlab
from gnsfast.tensors import accumulate_dtype, is_dtensor


class DualNorms:
    """All dual norms that the settings name; none does nothing and adds no numbers."""

    def __init__(
        self,
        model: nn.Module,
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
        device: torch.device,
    ) -> None:
        self._settings, self._processes, self._device = settings, processes, device
        if settings.dual and processes.tensor > 1:
            refuse(None, [*settings.features(), TENSOR_PARALLEL])
        self.of: dict[str, DualNorm] = {
            metric: KINDS[metric](model, slab, settings) for metric in settings.dual
        }
        self._release: Callable[[], object] | None = None
        self._compared = False  # whether an update had units to compare
        self._rank = dist.get_rank(settings.group) if processes.world > 1 else 0

    @property
    def width(self) -> int:
        """How many numbers an update has."""
        return sum(NUMBERS * len(each.parameters) for each in self.of.values())

    def open(self, slab: ProbeSlab, passes: int) -> dict[str, tuple[Any, ...]]:
        """Where each module adds its sums in the next pass, after ``passes`` of the update."""
        found: dict[str, tuple[Any, ...]] = {}
        for each in self.of.values():
            for path, sums in each.open(slab, self._first_sample(passes), passes == 0).items():
                found[path] = (*found.get(path, ()), *sums)
        return found

    def _first_sample(self, passes: int) -> int:
        """Passes take turns, so that both halves have samples where each pass has one."""
        return (passes + self._rank) % 2

    def opened(self) -> None:
        """Begin to watch a pass. A compiled model runs in eager mode until ``closed`` where its
        modules add to sums: a graph would be compiled anew for those of each update.
        """
        if self._settings.micro_batches:
            for each in self.of.values():
                each.arrivals.start()
        elif self.of:
            self._release = EAGER.hold(self)

    def closed(self) -> None:
        """The reverse of ``opened``."""
        for each in self.of.values():
            each.arrivals.stop()
        if self._release is not None:
            self._release()

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> list[Tensor]:
        """This process's share of the numbers, from what the passes of an update added and from
        ``.grad``, which has the factor ``loss_scale``.
        """
        if not self.of:
            return []
        self._refuse_alone(len(passes))
        world, where = self._processes.world, (self._settings, self._processes, self._device)
        of = factors(passes, self._first_sample, loss_scale, *where)
        found = []
        for each in self.of.values():
            if world > 1:
                for t in (*each.sums.values(), *each.halves.values()):
                    dist.all_reduce(t, group=self._settings.group)
            found.append(each.finish(of).to(self._device) / world)
        return found

    def _refuse_alone(self, passes: int) -> None:
        """Raise if micro-batches are to be compared and there is one. After an update that had
        more, such as before the end of an epoch, that update does not count.
        """
        several = passes * self._processes.world > 1
        if self._settings.micro_batches and not (several or self._compared):
            raise ObservationError(
                "noise_from='micro_batches' compares the gradients of the backward passes of an "
                "update, and this update had 1 on 1 process: it takes 2 or more, better 4, by "
                "gradient accumulation (a gns.microbatch block each) or more processes. "
                "noise_from='samples' measures a single pass"
            )
        self._compared |= several

    def added(
        self, result: NoiseScale, numbers: Tensor, scalars: Tensor, decay: float | None
    ) -> NoiseScale:
        """``result`` with a noise scale in each norm, from the window's numbers [U, width]."""
        widths = [NUMBERS * len(each.parameters) for each in self.of.values()]
        scales: dict[str, DualNoiseScale] = {}
        for (metric, each), own in zip(self.of.items(), numbers.split(widths, 1)):
            modules = [name.rpartition(".")[0] for name in each.parameters]
            own = own.unflatten(1, (-1, NUMBERS))
            found = summarize_dual(metric, own, scalars, modules, each.left_out, decay)
            scales[metric] = replace(found, noise_from=self._settings.noise_from)
        return replace(result, sign=scales.get("sign"), spectral=scales.get("spectral"))

    def refuse_norm(self) -> None:
        """Raise if ``grad_norm`` does not suffice."""
        for metric in self.of:
            raise ValueError(
                f"metric={metric!r} needs the gradients, not their norm: call gns.update() without "
                "it, before clipping"
            )

    def state(self) -> dict[str, Any]:
        """What past updates left, on the CPU."""
        return {metric: each.state() for metric, each in self.of.items()}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        for metric, each in self.of.items():
            each.load(state[metric])
            self._compared = bool(state[metric]["samples"] > 0)


class DualNorm:
    """The measurement in one dual norm, and V, the running mean of C."""

    feature = SIGN
    needs = "Linear, Embedding, LayerNorm and RMSNorm layers have one. Leave metric='sign' out"

    def __init__(self, model: nn.Module, slab: ProbeSlab, settings: Settings) -> None:
        self._names = {p: name for name, p in model.named_parameters()}
        self._window = settings.window
        if settings.micro_batches:
            self.modules: frozenset[str] = frozenset()
            self.parameters = trainable(model, self.feature, settings)
        else:
            self.modules = slab.taking(self.feature)
            taken = {
                self._names[p]
                for path in self.modules
                for p in slab.modules[path].probed_parameters().values()
                if self._takes(p, settings)
            }
            self.parameters = {name: p for name, p in slab.parameters.items() if name in taken}
        self.arrivals = Arrivals(self.parameters if settings.micro_batches else {}, self._add)
        if not self.parameters:
            raise ValueError(f"no parameter has {self.feature}: {self.needs}")
        if sharded := [name for name, p in self.parameters.items() if is_dtensor(p)]:
            raise NotImplementedError(
                f"{sharded[0]} is sharded (FSDP2): {self.feature} needs whole parameters, as with "
                "DistributedDataParallel. Leave the metric out"
            )
        self.left_out = tuple(name for name in slab.rows if name not in self.parameters)
        self.sums: dict[str, Tensor] = {}
        self.halves: dict[str, Tensor] = {}
        self._moments = {name: _zeros(p, self._shape(p)) for name, p in self.parameters.items()}
        some = next(iter(self.parameters.values()))
        self._samples = torch.zeros((), dtype=torch.float64, device=some.device)

    def _takes(self, p: nn.Parameter, settings: Settings) -> bool:
        """Whether a parameter is measured."""
        return True

    def _shape(self, p: Tensor) -> Sequence[int]:
        """The shape of a parameter's second moments."""
        return p.shape

    def _sink(self, of_module: list[Tensor]) -> Any:
        """Where a module adds the second moments of its parameters."""
        return Squares(of_module)

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        """Add the second moments of one gradient."""
        moments.addcmul_(grad, grad)

    _square: Callable[[Tensor], Tensor] = staticmethod(torch.square)
    _numbers: Callable[[dual_norms.Parts], Tensor] = staticmethod(dual_norms.sign_numbers)

    def open(self, slab: ProbeSlab, first_sample: int, first: bool) -> dict[str, tuple[Any, ...]]:
        """Where each module adds its sums; ``first`` forgets those of the last update."""
        if first:
            self.sums = {name: _zeros(p, self._shape(p)) for name, p in self.parameters.items()}
            self.halves = {name: _zeros(p, p.shape) for name, p in self.parameters.items()}
        self.arrivals.open(self.sums, {} if first_sample else self.halves)
        found = {}
        for path in self.modules:
            names = [self._names[p] for p in slab.modules[path].probed_parameters().values()]
            if own := [self.sums[name] for name in names if name in self.sums]:
                halves = [self.halves.get(name) for name in names]
                found[path] = self._sink(own), Halves(halves, first_sample, self.feature)
        return found

    def finish(self, of: Factors) -> Tensor:
        """The numbers of the update, [P NUMBERS]. NaN, and nothing learnt, if the samples do not
        suffice or anything is not finite, such as after an overflow.
        """
        sums, halves, self.sums, self.halves = self.sums, self.halves, {}, {}
        here = self._samples.device
        of = Factors(*(t.to(here) for t in of))
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            for name, p in self.parameters.items()
        }
        every = (*sums.values(), *halves.values(), *grads.values())
        finite = [t.sum(dtype=torch.float64).isfinite().to(here) for t in every]
        known = torch.stack([of.known, *finite]).all()
        # A mean over about the last ``window`` updates; over all of them at first.
        total = self._samples * (1 - 1 / self._window) + of.samples
        share = torch.where(known, of.samples / total, 0.0)
        numbers = []
        for name, moment in self._moments.items():
            of_device = (t.to(moment.device, non_blocking=True) for t in (known, share, *of))
            ok, part, *factors = of_device
            parts = self._parts(
                sums.pop(name), halves.pop(name), grads.pop(name), Factors(*factors)
            )
            new, *others = (torch.where(ok, t, 0.0) for t in parts)
            before = moment.clone()
            moment += part.to(moment.dtype) * (new - moment)
            found = self._numbers(dual_norms.Parts(before, moment, new, *others))
            numbers.append(found.to(here))
        usable = known & (self._samples > 0)
        self._samples.copy_(torch.where(known, total, self._samples))
        return torch.where(usable, torch.cat(numbers), torch.nan)

    def _parts(self, p: Tensor, half: Tensor, grad: Tensor, of: Factors) -> list[Tensor]:
        """C and G² without bias, and the mean gradients, whole and of the halves."""
        whole = grad.to(half.dtype) * of.mean.to(half.dtype)
        square = self._square(whole)
        half *= of.scale
        rest = whole * of.total - half
        # The rounding of ``.grad`` where no sample of the second half has a gradient.
        eps = 2 * torch.finfo(grad.dtype).eps + 16 * torch.finfo(half.dtype).eps
        rest = torch.where(rest.abs() > eps * half.abs(), rest, 0.0)
        return [
            p * of.p_new - square * of.q_new,
            square * of.q_square - p * of.p_square,
            whole,
            half / of.half,
            rest / (of.total - of.half),
        ]

    def state(self) -> dict[str, Any]:
        """The running mean, copied to the CPU."""
        moments = {name: t.to("cpu", copy=True) for name, t in self._moments.items()}
        return {"moments": moments, "samples": self._samples.to("cpu", copy=True)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        self._samples.copy_(state["samples"])
        for name, moment in self._moments.items():
            moment.copy_(state["moments"][name])


class SpectralNorm(DualNorm):
    """The measurement of matrices in the nuclear norm."""

    feature = SPECTRAL
    needs = (
        "matrices of Linear layers do, unless they are shared, and with optimizer=... those that "
        "it trains. Leave metric='spectral' out"
    )
    _square = staticmethod(dual_norms.gram)
    _numbers = staticmethod(dual_norms.spectral_numbers)

    @staticmethod
    def _add(moments: Tensor, grad: Tensor) -> None:
        moments += dual_norms.gram(grad)

    def _takes(self, p: nn.Parameter, settings: Settings) -> bool:
        return p.ndim == 2 and (settings.matrices is None or p in settings.matrices)

    def _shape(self, p: Tensor) -> Sequence[int]:
        return (min(p.shape), min(p.shape))

    def _sink(self, of_module: list[Tensor]) -> Any:
        [of_weight] = of_module
        return Grams(of_weight)


KINDS = {"sign": DualNorm, "spectral": SpectralNorm}


def _zeros(p: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=accumulate_dtype(p.dtype), device=p.device)
