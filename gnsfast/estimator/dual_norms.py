# SPDX-License-Identifier: Apache-2.0
"""The measurements of an update in the dual norms of sign descent and of spectral descent
(``noise_scale.dual_norms`` has the mathematics).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.combinations import SIGN, SPECTRAL, TENSOR_PARALLEL, refuse
from gnsfast.estimator.holdings import Held, begun, held, held_by_matrix
from gnsfast.estimator.numbers import Pass
from gnsfast.estimator.settings import Settings
from gnsfast.functional import Grams, Halves, Squares
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


class Factors(NamedTuple):
    """What turns the sums of an update into means over its samples, float64 scalars.

    With p and q of a coordinate, C (times the square of the mean length) is ``p_new`` p - ``q_new``
    ĝ² and G² is ``q_square`` ĝ² - ``p_square`` p, without bias. ĝ is ``mean`` times ``.grad``; it
    is ``total`` / Σ u times the sum of which the first half of the samples has ``half`` / Σ u.
    ``known``: there are two samples, and each half has one.
    """

    samples: Tensor
    known: Tensor
    p_new: Tensor
    q_new: Tensor
    p_square: Tensor
    q_square: Tensor
    mean: Tensor
    scale: Tensor
    half: Tensor
    total: Tensor


class Eager:
    """The stance of ``torch.compiler`` while any estimator holds it; the last one restores it."""

    def __init__(self) -> None:
        self._holders = 0
        self._stance: Any = None

    def enter(self) -> None:
        if not self._holders:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        self._holders += 1

    def leave(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._stance.__exit__(None, None, None)


EAGER = Eager()


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
        if processes.tensor > 1:
            for metric in settings.dual:
                refuse(None, [KINDS[metric].feature, TENSOR_PARALLEL])
        self.of: dict[str, DualNorm] = {
            metric: KINDS[metric](names, slab, settings, processes) for metric in settings.dual
        }
        self._eager = False
        self._rank = dist.get_rank(settings.group) if processes.world > 1 else 0

    @property
    def width(self) -> int:
        """How many numbers an update has."""
        return sum(NUMBERS * len(each.parameters) for each in self.of.values())

    def open(self, passes: int) -> dict[str, tuple[Any, ...]]:
        """Where each module adds its sums in the next pass, after ``passes`` of the update."""
        found: dict[str, tuple[Any, ...]] = {}
        for each in self.of.values():
            for path, sums in each.open(self._first_sample(passes), passes == 0).items():
                found[path] = (*found.get(path, ()), *sums)
        return found

    def _first_sample(self, passes: int) -> int:
        """Passes take turns, so that both halves have samples where each pass has one."""
        return (passes + self._rank) % 2

    def opened(self) -> None:
        """Run a compiled model in eager mode until ``closed``: a graph would be compiled anew for
        the sums of each update.
        """
        if self.of:
            EAGER.enter()
            self._eager = True

    def closed(self) -> None:
        """The reverse of ``opened``."""
        if self._eager:
            EAGER.leave()
            self._eager = False

    def passed(self) -> None:
        """``closed``, and add up over processes what the pass left of sharded parameters."""
        if self._eager:
            self.closed()
            for each in self.of.values():
                each.keep(by_pass=True)

    def finish(self, passes: list[Pass], loss_scale: Tensor | None) -> list[Tensor]:
        """This process's share of the numbers, from what the passes of an update added and from
        ``.grad``, which has the factor ``loss_scale``.
        """
        if not self.of:
            return []
        factors = self._factors(passes, loss_scale)
        return [each.finish(factors).to(self._device) for each in self.of.values()]

    def _factors(self, passes: list[Pass], loss_scale: Tensor | None) -> Factors:
        s, device = self._settings, self._device
        scalars = []
        for k, each in enumerate(passes):
            tokens, first = each.tokens, self._first_sample(k)
            own = loss_factors.block_scalars(
                *(each.num_samples, each.passes, tokens, each.divided * each.scale),
                *(s.loss_reduction, s.local, device),
            )
            if isinstance(tokens, Tensor):
                lengths = tokens.to(device, torch.float64, non_blocking=True)
                half = lengths[first::2].sum() / lengths.sum()
            else:
                half = own.new_tensor(len(range(first, each.num_samples, 2)) / each.num_samples)
            scalars.append(torch.cat([own, (half * own[4])[None]]))
        summed = torch.stack(scalars).sum(0)
        if self._processes.world > 1:
            dist.all_reduce(summed, group=s.group)
        of = loss_factors.coefficients(summed[None, :-1], s.local)
        total, half, rest = summed[4], summed[-1], (of.v - of.u2)[0]
        v, u2, weight = of.v[0], of.u2[0], summed[5]  # of C times the mean length's square
        added, left = (
            total.new_ones(()) if scale is None else scale.to(device, torch.float64)
            for scale in (passes[-1].loss_scale, loss_scale)
        )
        return Factors(
            samples=of.samples[0],
            known=(rest > 1e-9 * v) & (half > 1e-9 * total) & (total - half > 1e-9 * total),
            p_new=(1 + u2 / rest) / weight / added.square(),
            q_new=v * u2 / rest / weight,
            p_square=1 / rest / added.square(),
            q_square=v / rest,
            mean=self._processes.divisor / total / left,  # DDP averages, the micro-batches add up
            scale=1 / added,
            half=half,
            total=total,
        )

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
        return {metric: each.state() for metric, each in self.of.items()}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        for metric, each in self.of.items():
            each.load(state[metric])


class DualNorm:
    """The measurement in one dual norm, and V, the running mean of C."""

    feature = SIGN
    needs = "Linear, Embedding, LayerNorm and RMSNorm layers have one. Leave metric='sign' out"

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        slab: ProbeSlab,
        settings: Settings,
        processes: Processes,
    ) -> None:
        self._settings, self._several = settings, processes.world > 1
        self.modules = {
            path: [names[p] for p in slab.modules[path].probed_parameters().values()]
            for path in slab.taking(self.feature)
        }
        taken = {name for own in self.modules.values() for name in own}
        self.parameters = {
            name: p
            for name, p in slab.parameters.items()
            if name in taken and self._takes(p, settings)
        }
        if not self.parameters:
            raise ValueError(f"no parameter has {self.feature}: {self.needs}")
        self.left_out = tuple(name for name in slab.rows if name not in self.parameters)
        shaped = {name: (p, self._shape(p)) for name, p in self.parameters.items()}
        self._holdings = self._hold(shaped, processes, settings.group)
        self._moments: dict[str, Tensor] = {}
        for name, holding in self._holdings.items():
            if (part := holding.part(holding.zeros(holding.shape))) is not None:
                self._moments[name] = part
        some = next(iter(self.parameters.values()))
        self._samples = torch.zeros((), dtype=torch.float64, device=some.device)

    def _takes(self, p: nn.Parameter, settings: Settings) -> bool:
        """Whether a parameter is measured."""
        return True

    def _shape(self, p: Tensor) -> Sequence[int]:
        """The shape of a parameter's second moments."""
        return p.shape

    _sink: Callable[..., Any] = Squares
    _square: Callable[[Tensor], Tensor] = staticmethod(torch.square)
    _numbers: Callable[..., Tensor] = staticmethod(dual_norms.sign_numbers)
    _hold: Callable[..., Held] = staticmethod(held)

    def open(self, first_sample: int, first: bool) -> dict[str, tuple[Any, ...]]:
        """Where each module adds its sums; ``first`` forgets those of the last update."""
        found = {}
        for holding in self._holdings.values() if first else ():
            holding.forget()
        for path, names in self.modules.items():
            of = [self._holdings.get(name) for name in names]
            if own := [each for each in of if each is not None]:
                halves = Halves(partial(begun, of, 1), first_sample, self.feature)
                found[path] = self._sink(partial(begun, own, 0)), halves
        return found

    def keep(self, by_pass: bool) -> None:
        """Add up over processes what backward has left, of those parameters for which this is done
        after each pass, or of the others.
        """
        for holding in self._holdings.values():
            if holding.by_pass == by_pass:
                holding.keep()

    def finish(self, of: Factors) -> Tensor:
        """This process' share of the numbers of the update, [P NUMBERS]. NaN, and nothing learnt,
        if the samples do not suffice or anything is not finite, such as after an overflow.
        """
        self.keep(by_pass=False)
        here = self._samples.device
        of = Factors(*(t.to(here) for t in of))
        kept = {name: holding.take() for name, holding in self._holdings.items()}
        lost = torch.zeros((), dtype=torch.float64, device=here)
        for t in chain.from_iterable(kept.values()):
            lost += ~t.sum(dtype=torch.float64).isfinite().to(here)
        if self._several:
            dist.all_reduce(lost, group=self._settings.group)
        known = of.known & (lost == 0)
        # A mean over about the last ``window`` updates; over all of them at first.
        total = self._samples * (1 - 1 / self._settings.window) + of.samples
        share = torch.where(known, of.samples / total, 0.0)
        numbers = []
        for name, holding in self._holdings.items():
            if name not in self._moments:
                numbers.append(of.samples.new_zeros(NUMBERS))
                continue
            moment = self._moments[name]
            of_device = (t.to(moment.device, non_blocking=True) for t in (known, share, *of))
            ok, part, *factors = of_device
            parts = self._parts(Factors(*factors), *kept.pop(name))
            new, *others = (torch.where(ok, t, 0.0) for t in parts)
            before = moment.clone()
            moment += part.to(moment.dtype) * (new - moment)
            own = dual_norms.Parts(before, moment, new, *others)
            numbers.append(self._numbers(own, holding.total).to(here) * holding.share)
        usable = known & (self._samples > 0)
        self._samples.copy_(torch.where(known, total, self._samples))
        return torch.where(usable, torch.cat(numbers), torch.nan)

    def _parts(self, of: Factors, p: Tensor, half: Tensor, grad: Tensor) -> list[Tensor]:
        """C and G² without bias, and the mean gradients, whole and of the halves."""
        whole = grad.to(half.dtype) * of.mean.to(half.dtype)
        square = self._square(whole)
        half *= of.scale
        # Where the first half has all of a sum, as of a word that only it has seen, the rest is
        # rounding, which has a sign.
        rounding = max(torch.finfo(grad.dtype).eps, 16 * torch.finfo(half.dtype).eps)
        rest = whole * of.total - half
        rest = torch.where(rest.abs() > rounding * half.abs(), rest, 0.0)
        return [
            p * of.p_new - square * of.q_new,
            square * of.q_square - p * of.p_square,
            whole,
            half / of.half,
            rest / (of.total - of.half),
        ]

    def state(self) -> dict[str, Any]:
        """The running mean, whole and on the CPU."""
        moments = {
            name: holding.whole(self._moments.get(name)).to("cpu", copy=True)
            for name, holding in self._holdings.items()
        }
        return {"moments": moments, "samples": self._samples.to("cpu", copy=True)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        self._samples.copy_(state["samples"])
        for name, moment in self._moments.items():
            part = self._holdings[name].part(state["moments"][name])
            assert part is not None
            moment.copy_(part)


class SpectralNorm(DualNorm):
    """The measurement of matrices in the nuclear norm."""

    feature = SPECTRAL
    needs = (
        "matrices of Linear layers do, unless they are shared, and with optimizer=... those that "
        "it trains. Leave metric='spectral' out"
    )
    _sink = Grams
    _square = staticmethod(dual_norms.gram)
    _hold = staticmethod(held_by_matrix)

    @staticmethod
    def _numbers(of: dual_norms.Parts, total: Any) -> Tensor:
        return dual_norms.spectral_numbers(of)

    def _takes(self, p: nn.Parameter, settings: Settings) -> bool:
        return p.ndim == 2 and (settings.matrices is None or p in settings.matrices)

    def _shape(self, p: Tensor) -> Sequence[int]:
        return (min(p.shape), min(p.shape))


KINDS = {"sign": DualNorm, "spectral": SpectralNorm}
