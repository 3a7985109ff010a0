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
from gnsfast.estimator.numbers import Pass
from gnsfast.estimator.settings import Settings
from gnsfast.functional import Grams, Squares
from gnsfast.noise_scale import (
    NUMBERS,
    DualNoiseScale,
    NoiseScale,
    dual_norms,
    loss_factors,
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
        names = {p: name for name, p in model.named_parameters()}
        self.of: dict[str, DualNorm] = {
            metric: KINDS[metric](names, slab, settings) for metric in settings.dual
        }
        self._stance: Any = None
        for each in self.of.values():
            if processes.tensor > 1:
                refuse(None, [each.feature, TENSOR_PARALLEL])

    @property
    def width(self) -> int:
        """How many numbers an update has."""
        return sum(NUMBERS * len(each.parameters) for each in self.of.values())

    def open(self, slab: ProbeSlab, first: bool) -> dict[str, tuple[Any, ...]]:
        """Where each module adds second moments. ``first``: this pass begins an update."""
        found: dict[str, tuple[Any, ...]] = {}
        for each in self.of.values():
            for path, sums in each.open(slab, first).items():
                found[path] = (*found.get(path, ()), sums)
        return found

    def opened(self) -> None:
        """Run a compiled model in eager mode until ``closed``: a graph would be compiled anew for
        the sums of each update.
        """
        if self.of:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()

    def closed(self) -> None:
        """The reverse of ``opened``."""
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> list[Tensor]:
        """This process's share of the numbers, from what the passes of an update added and from
        ``.grad``, which has the factor ``loss_scale``.
        """
        if not self.of:
            return []
        s, device = self._settings, self._device
        scalars = torch.stack(
            [
                loss_factors.block_scalars(
                    *(each.num_samples, each.passes, each.tokens, each.divided * each.scale),
                    *(s.loss_reduction, s.local, device),
                )
                for each in passes
            ]
        ).sum(0)
        parallel = self._processes.world > 1
        if parallel:
            dist.all_reduce(scalars, group=s.group)
        of = loss_factors.coefficients(scalars[None], s.local)
        u2, rest = of.u2 / of.weight, of.v - of.u2
        # Σ u² g_b² and ĝ² times these add up to the unbiased C (statistics.trace_estimate).
        of_sums, of_square = (1 + of.u2 / rest) / of.weight, of.v * u2 / rest
        to_mean = self._processes.data / of.v.sqrt()  # DDP averages, the micro-batches add up
        if (added := passes[-1].loss_scale) is not None:
            of_sums = of_sums / added.to(device, torch.float64).square()
        if loss_scale is not None:
            to_mean = to_mean / loss_scale.to(device, torch.float64)
        enough = (rest > 1e-9 * of.v).all()
        found = []
        for each in self.of.values():
            if parallel:
                for t in each.sums.values():
                    dist.all_reduce(t, group=s.group)
            numbers = each.finish(of.samples[0], enough, *(of_sums, of_square, to_mean))
            found.append(numbers.to(device) / self._processes.world)
        return found

    def added(
        self, result: NoiseScale, numbers: Tensor, scalars: Tensor, decay: float | None
    ) -> NoiseScale:
        """``result`` with a noise scale in each norm, from the window's numbers [U, width]."""
        widths = [NUMBERS * len(each.parameters) for each in self.of.values()]
        scales: dict[str, DualNoiseScale] = {}
        for (metric, each), own in zip(self.of.items(), numbers.split(widths, 1)):
            modules = [name.rpartition(".")[0] for name in each.parameters]
            own = own.unflatten(1, (-1, NUMBERS))
            scales[metric] = summarize_dual(metric, own, scalars, modules, each.left_out, decay)
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
        return {metric: each.state("cpu") for metric, each in self.of.items()}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        for metric, each in self.of.items():
            each.load(state[metric])


class DualNorm:
    """The measurement in one dual norm, and the running means of the gradient and of C."""

    feature = SIGN

    def __init__(self, names: dict[nn.Parameter, str], slab: ProbeSlab, settings: Settings) -> None:
        self._names = names
        self.modules = slab.taking(self.feature)
        self.parameters: dict[str, nn.Parameter] = {}
        for path in self.modules:
            own = self._own(slab.modules[path].probed_parameters(), settings)
            self.parameters |= {names[p]: p for p in own}
        self.parameters = {
            name: p for name, p in slab.parameters.items() if name in self.parameters
        }
        if not self.parameters:
            raise ValueError(f"no parameter has {self.feature}: {self.needs}")
        if sharded := [name for name, p in self.parameters.items() if is_dtensor(p)]:
            raise NotImplementedError(
                f"{sharded[0]} is sharded (FSDP2): {self.feature} needs whole parameters, as with "
                "DistributedDataParallel. Leave the metric out"
            )
        self.left_out = tuple(name for name in slab.rows if name not in self.parameters)
        self.sums: dict[str, Tensor] = {}
        self._mean = {name: _zeros(p, p.shape) for name, p in self.parameters.items()}
        self._second = {name: _zeros(p, self._shape(p)) for name, p in self.parameters.items()}
        some = next(iter(self.parameters.values()))
        self._samples = torch.zeros((), dtype=torch.float64, device=some.device)
        self._window = settings.window

    needs = "Linear, Embedding, LayerNorm and RMSNorm layers have one. Leave metric='sign' out"

    def _own(self, of_module: dict[str, nn.Parameter], settings: Settings) -> list[nn.Parameter]:
        """The parameters of a module that are measured."""
        return [*of_module.values()]

    def _shape(self, p: Tensor) -> Sequence[int]:
        """The shape of a parameter's second moments."""
        return p.shape

    def _sink(self, of_module: list[str]) -> Any:
        """Where a module adds the second moments of its parameters."""
        return Squares([self.sums[name] for name in of_module])

    _square: Callable[[Tensor], Tensor] = staticmethod(torch.square)
    _numbers: Callable[..., Tensor] = staticmethod(dual_norms.sign_numbers)

    def open(self, slab: ProbeSlab, first: bool) -> dict[str, Any]:
        """Where each module adds second moments; ``first`` forgets those of the last update."""
        if first:
            self.sums = {name: _zeros(p, self._shape(p)) for name, p in self.parameters.items()}
        found = {}
        for path in self.modules:
            own = [self._names[p] for p in slab.modules[path].probed_parameters().values()]
            if own := [name for name in own if name in self.parameters]:
                found[path] = self._sink(own)
        return found

    def finish(
        self, samples: Tensor, enough: Tensor, of_sums: Tensor, of_square: Tensor, to_mean: Tensor
    ) -> Tensor:
        """The numbers of the update, [P NUMBERS]. NaN, and nothing learnt, if there are not
        ``enough`` samples or anything is not finite, such as after an overflow.
        """
        sums, self.sums = self.sums, {}
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach()
            for name, p in self.parameters.items()
        }
        here = self._samples.device
        finite = [
            t.sum(dtype=torch.float64).isfinite().to(here)
            for t in (*sums.values(), *grads.values())
        ]
        known = torch.stack([enough.to(here), *finite]).all()
        # A mean over about the last ``window`` updates; over all of them at first.
        kept = self._samples * (1 - 1 / self._window)
        total = kept + samples.to(here)
        share = torch.where(known, samples.to(here) / total, 0.0)
        numbers = []
        for name, mean in self._mean.items():
            where = mean.device
            ok, part, k_sums, k_square, k_mean = (
                t.to(where, non_blocking=True) for t in (known, share, of_sums, of_square, to_mean)
            )
            grad = torch.where(ok, grads[name].to(mean.dtype) * k_mean.to(mean.dtype), 0.0)
            new = sums.pop(name).mul_(k_sums).sub_(self._square(grad).mul_(k_square))
            new = torch.where(ok, new, 0.0)
            second = self._second[name]
            second += part.to(second.dtype) * (new - second)
            numbers.append(self._numbers(mean, second, grad, new).to(here))
            mean += part.to(mean.dtype) * (grad - mean)
        usable = known & (self._samples > 0)
        self._samples.copy_(torch.where(known, total, self._samples))
        return torch.where(usable, torch.cat(numbers), torch.nan)

    def state(self, where: str) -> dict[str, Any]:
        """The running means, copied."""
        kept = {"mean": self._mean, "second": self._second}
        found = {
            key: {name: t.to(where, copy=True) for name, t in of.items()}
            for key, of in kept.items()
        }
        return {**found, "samples": self._samples.to(where, copy=True)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        self._samples.copy_(state["samples"])
        for name in self.parameters:
            self._mean[name].copy_(state["mean"][name])
            self._second[name].copy_(state["second"][name])


class SpectralNorm(DualNorm):
    """The measurement of matrices in the nuclear norm."""

    feature = SPECTRAL
    needs = (
        "matrices of Linear layers do, unless they are shared, and with optimizer=... those that "
        "it trains. Leave metric='spectral' out"
    )
    _square = staticmethod(dual_norms.gram)
    _numbers = staticmethod(dual_norms.spectral_numbers)

    def _own(self, of_module: dict[str, nn.Parameter], settings: Settings) -> list[nn.Parameter]:
        trained = settings.matrices
        return [p for p in of_module.values() if p.ndim == 2 and (trained is None or p in trained)]

    def _shape(self, p: Tensor) -> Sequence[int]:
        return (min(p.shape), min(p.shape))

    def _sink(self, of_module: list[str]) -> Any:
        [name] = of_module
        return Grams(self.sums[name])


KINDS = {"sign": DualNorm, "spectral": SpectralNorm}


def _zeros(p: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=accumulate_dtype(p.dtype), device=p.device)
