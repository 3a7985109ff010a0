# SPDX-License-Identifier: Apache-2.0
"""One optimizer update as the probes see it: sums over its micro-batches and processes."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast import checks, gradients, scales
from gnsfast.errors import ObservationError
from gnsfast.probed import Probed
from gnsfast.probes import NO_BACKWARD, ProbeSlab

Mark = tuple[int, int] | None


@dataclass(frozen=True)
class Settings:
    """What stays the same over all updates."""

    source: str
    loss_reduction: str
    grad_scaler: GradScaler | None
    group: "dist.ProcessGroup | None"

    @property
    def local(self) -> bool:
        return self.source == "local"

    @property
    def ranks(self) -> int:
        distributed = dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self.group) if distributed else 1


@dataclass
class Pending:
    """The micro-batches of the update under way."""

    sums: Tensor
    calls: Tensor
    scalars: Tensor
    marks: list[Mark]
    witness: Tensor | None
    stale: Tensor
    lengths: bool
    microbatches: int = 0
    touched: list[int] = field(default_factory=list)


class Observer:
    """Collects what probes and gradients say, on the device, without waiting for it.

    ``finish`` returns an update as one float64 vector, p and q of each of K parameters, the whole
    q and the weights' scalars, beside the flags that ``check`` reads: calls and surplus calls of
    each of R probe rows, then whether gradients were scaled after backward, and whether they were
    not zero before the first micro-batch.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = unwrapped(model), settings
        self.slabs: dict[int, ProbeSlab] = {}
        self.slab: ProbeSlab | None = None
        self.pending: Pending | None = None
        self.after_update: list[Mark] | None = None
        self.audit: tuple[list[str], Tensor] | None = None
        self._bind(ProbeSlab(self.model, 1))

    def _bind(self, slab: ProbeSlab) -> None:
        if not slab.rows:
            raise ValueError(
                f"{type(self.model).__name__} has no trainable parameter under a gnsfast module: "
                "call gnsfast.convert(model) first"
            )
        parameters = dict(self.model.named_parameters())
        self.names = list(slab.rows)
        self.parameters = [parameters[name] for name in self.names]
        self.paths = {name: [path for path, _, _ in rows] for name, rows in slab.rows.items()}
        self.labels, self.modules = slab.labels, slab.modules
        self.device = self.parameters[0].device
        single = [not checks.may_repeat(self.modules[path]) for path, _ in self.labels]
        self._single = torch.tensor(single, dtype=torch.float64, device=self.device)
        if self.settings.ranks > 1 and not self.settings.local:
            gradients.refuse_divide_factor(self.model)
        self._all = list(parameters.values())
        self._trainable = self._signature()

    def _signature(self) -> list[tuple[bool, torch.device]]:
        return [(p.requires_grad, p.device) for p in self._all]

    @property
    def width(self) -> int:
        return 2 * len(self.names) + 1 + scales.SCALARS

    @property
    def flags(self) -> int:
        return 2 * len(self.labels) + 2

    def split(self, vectors_UW: Tensor) -> list[Tensor]:
        """p [U, K], q [U, K], the whole q [U, 1] and the scalars [U, SCALARS] of U updates."""
        K = len(self.names)
        return list(vectors_UW.split([K, K, 1, scales.SCALARS], 1))

    def open(self, num_samples: int) -> None:
        """Let the next forward and backward pass fill the probes."""
        if self.slab is not None:
            raise ObservationError(
                "a micro-batch is open already: one forward and one backward pass belong to one "
                "gns.microbatch(...) block"
            )
        if self._signature() != self._trainable:
            raise ObservationError(
                "parameters were frozen, unfrozen or moved since the first micro-batch, so old and "
                "new measurements cannot be averaged: call gns.reset()"
            )
        self._check_marks()
        slab = self.slabs.pop(num_samples, None) or ProbeSlab(self.model, num_samples)
        self.slabs[num_samples] = slab  # the newest comes last
        if len(self.slabs) > SLABS:
            del self.slabs[next(iter(self.slabs))]
        slab.open()
        self.slab, self._version = slab, slab.version
        self._before = self._marks()
        self._stale = self._leftover()
        named = dict(zip(self.names, self.parameters))
        self._watch = checks.GradientWatch(named, self.names if self.audit is None else ())

    def _check_marks(self) -> None:
        """Nothing but our own micro-batches may be in ``.grad``, where q is read from it."""
        if self.settings.local:
            return
        if self.pending is not None:
            if self._marks() != self.pending.marks:
                self.pending = None
                raise ObservationError(
                    "gradients were written to between two micro-batches of an update (another "
                    "backward pass, clipping, zero_grad without gns.update()): each backward pass "
                    "of an update needs its own gns.microbatch(...) block"
                )
        elif self.after_update is not None:
            for name, p, old in zip(self.names, self.parameters, self.after_update):
                if old is not None and checks.mark(p) == old:
                    raise ObservationError(
                        f"{name} still has the gradient of the last update: call "
                        "optimizer.zero_grad() between gns.update() and the next micro-batch"
                    )

    def _leftover(self) -> Tensor:
        """1.0 where the update starts from gradients that are not zero; costs nothing where
        ``zero_grad`` sets them to None.
        """
        first = self.pending is None and not self.settings.local
        norm = gradients.witness(self.parameters, self.device) if first else None
        if norm is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return (norm != 0).double()

    def _marks(self) -> list[Mark]:
        return [checks.mark(p) for p in self.parameters]

    def reached(self) -> bool:
        """Whether backward has come to a probe of the open micro-batch."""
        return self.slab is not None and self.slab.version != self._version

    def discard(self) -> None:
        """Close the probes and forget the update: its gradients are not whole."""
        if self.slab is not None:
            self.slab.close()
            self._watch.stop()
        self.slab, self.pending, self.after_update = None, None, self._marks()

    def close(self, num_samples: int, tokens: int | Tensor | None, scale: float | None) -> None:
        """Take what backward left in the probes and add it to the update."""
        slab = self.slab
        assert slab is not None
        if not self.reached():
            self.discard()
            raise ObservationError(NO_BACKWARD)
        slab.close()
        self._watch.stop()
        self.slab = None
        s = self.settings
        sums, calls = slab.collect(self.device)
        marks, arrived = self._marks(), self._watch.marks
        touched = [
            int(name in arrived if name in self._watch.watched else old != new)
            for name, old, new in zip(self.names, self._before, marks)
        ]
        in_grad = not s.local and s.ranks == 1  # else processes average it after it has arrived
        if in_grad and any(arrived.get(n, m) != m for n, m in zip(self.names, marks)):
            self.discard()
            raise ObservationError(REWRITTEN)
        if self.audit is None:
            self.audit = self._watch.audited, self._audited(sums)
        sums = self._without_scale(sums)
        surplus = (calls - 1).clamp(min=0) * self._single
        calls = torch.stack([calls, torch.where(calls.isnan(), calls, surplus)])
        scalars = scales.microbatch_scalars(
            num_samples,
            tokens,
            1.0 if scale is None else scale,
            s.loss_reduction,
            s.local,
            self.device,
        )
        shards = [] if s.local else gradients.sharded(self.parameters)
        new = Pending(
            sums,
            calls,
            scalars,
            marks,
            gradients.witness(shards, self.device),
            self._stale,
            tokens is not None,
            1,
            touched,
        )
        old = self.pending
        if old is not None:
            if old.lengths != new.lengths:
                self.discard()
                raise ValueError("tokens must be given for all micro-batches or for none")
            new.sums, new.calls = old.sums + sums, old.calls + calls
            new.scalars, new.microbatches = old.scalars + scalars, old.microbatches + 1
            new.stale = old.stale
            new.touched = [a + b for a, b in zip(old.touched, touched)]
        self.pending = new

    def _audited(self, sums: Tensor) -> Tensor:
        """[3, K]: what passed through the probes, what arrived at the parameters, the samples."""
        real = torch.zeros_like(sums[0])
        for name, sqnorm in self._watch.sqnorms.items():
            real[self.names.index(name)] = sqnorm.to(self.device, non_blocking=True)
        return torch.stack([sums[1], real, sums[0]])

    def finish(self, grad_norm: float | Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
        """The update's vector and its flags [2 R + 2], summed over processes, and how many of
        this one's micro-batches wrote to each parameter's gradient.
        """
        pending, s = self.pending, self.settings
        if pending is None:
            raise ObservationError(
                "gns.update() without a micro-batch: run forward and backward inside of "
                "gns.microbatch(num_samples), or call gns.attach() once"
            )
        self.pending, self.after_update = None, self._marks()
        p, q = pending.sums
        whole, scaled = q.sum(), q.new_zeros(())
        in_probes = pending.microbatches == 1 and s.ranks == 1 and s.source == "auto"
        if grad_norm is not None:
            norm = torch.as_tensor(_plain(grad_norm), dtype=torch.float64)
            whole = self._unscale(norm.to(self.device, non_blocking=True).square()) * s.ranks
            q = torch.full_like(q, torch.nan)
        elif not (s.local or in_probes):
            q, scaled = self._read_gradients(pending)
            whole = q.sum()
        in_grad = grad_norm is not None or not (s.local or in_probes)
        flags = [pending.calls.flatten(), scaled[None], pending.stale[None] * in_grad]
        vector = torch.cat([p, q, whole[None], pending.scalars, *flags])
        if s.ranks > 1:
            dist.all_reduce(vector, group=s.group)
        return vector[: self.width], vector[self.width :], pending.touched

    def _read_gradients(self, pending: Pending) -> tuple[Tensor, Tensor]:
        """This process's share of q, from the final gradients, and whether they were scaled."""
        s = self.settings
        writes = scales.unscale_writes(self.device) if scales.unscaled(s.grad_scaler) else 0
        expected = [m and (m[0], m[1] + writes) for m in pending.marks]
        found = self._marks()
        if all(m is None for m in found):
            raise ObservationError(
                "no parameter has a gradient: call gns.update() before optimizer.zero_grad(). "
                "Where the optimizer runs inside of backward, say source='local'."
            )
        if found != expected:
            raise ObservationError(REWRITTEN)
        q = self._unscale(gradients.grad_sqnorms(self.parameters, s.ranks, self.device))
        scaled = q.new_zeros(())
        if pending.witness is not None:
            after = gradients.witness(gradients.sharded(self.parameters), self.device)
            assert after is not None
            ratio = self._unscale(after.square()) / self._without_scale(pending.witness.square())
            scaled = ((ratio - 1).abs() > 1e-3).double()
        return q * s.ranks**2, scaled  # DDP and FSDP2 average

    def _unscale(self, sqnorm: Tensor) -> Tensor:
        """Take the gradient scaler's factor off, unless ``unscale_`` has done so."""
        done = scales.unscaled(self.settings.grad_scaler)
        return sqnorm if done else self._without_scale(sqnorm)

    def _without_scale(self, sqnorm: Tensor) -> Tensor:
        factor = scales.loss_scale(self.settings.grad_scaler)
        if factor is None:
            return sqnorm
        return sqnorm / factor.to(self.device, torch.float64, non_blocking=True).square()

    def check(self, flags: Tensor, touched: list[int]) -> None:
        """Raise where all passes so far (on the host) make a norm wrong."""
        calls_2R, (scaled, stale) = flags[:-2].view(2, -1), flags[-2:].tolist()
        if stale:
            raise ObservationError(
                "gradients were not zero before the first micro-batch of an update: call "
                "optimizer.zero_grad() between gns.update() and the next micro-batch"
            )
        if scaled:
            raise ObservationError(REWRITTEN)
        seen: dict[str, float] = {}
        for (path, name), count, more in zip(self.labels, *calls_2R.tolist()):
            if not name:
                continue
            module: Probed = self.modules[path]
            module._calls = None if count != count else int(count)
            if more != 0:  # NaN too
                raise ObservationError(checks.explain_calls(path, module, more + 1))
            seen[name] = seen.get(name, 0.0) + count
        alone = self.settings.ranks == 1
        for name, times in zip(self.names, touched):
            if seen[name] < (times if alone else min(times, 1)):
                raise ObservationError(checks.explain_unseen(name, self.paths[name][0]))
        self._check_audit()

    def _check_audit(self) -> None:
        if self.audit is None or not self.audit[0]:
            return
        members, found = self.audit
        numbers, whole = found.T.tolist(), found[2].sum().item()
        for name in members:
            k = self.names.index(name)
            p, (ours, real, samples) = self.parameters[k], numbers[k]
            if wrong := checks.explain_sums(p, name, self.paths[name], ours, real, samples, whole):
                raise ObservationError(wrong)
        self.audit = [], found


SLABS = 8
"""Batch sizes whose probes are kept; a run with more of them makes new ones."""

REWRITTEN = (
    "gradients were written to after backward (clipping, a manual division or all_reduce), so "
    "their norm has another scale: call gns.update() before that, or hand the unclipped norm over, "
    "outside of the micro-batch: gns.update(grad_norm=clip_grad_norm_(...))"
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile, whose names are the user's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _plain(norm: float | Tensor) -> float | Tensor:
    """FSDP2's ``clip_grad_norm_`` returns a norm that is spread over processes."""
    full = getattr(norm, "full_tensor", None)
    return full() if full is not None else norm
