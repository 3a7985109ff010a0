# SPDX-License-Identifier: Apache-2.0
"""What probes and gradients say of one update, summed over its micro-batches and processes."""

from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.errors import ObservationError
from gnsfast.estimator import gradients
from gnsfast.estimator.adam_metric import AdamMetric
from gnsfast.estimator.exchange import FLAGS, Exchange
from gnsfast.estimator.sample_groups import GroupMeasure
from gnsfast.estimator.settings import EndOfPass, Mark, Pending, Settings
from gnsfast.estimator.stages import Stages
from gnsfast.functional import document_slots
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import (
    PipelinePasses,
    find_processes,
    fsdp_degrees,
    in_context_parallel,
    refuse_context_parallel,
)
from gnsfast.probing import NO_BACKWARD, Audit, GradientWatch, ProbeSlab, Sides, checks, unwrapped
from gnsfast.tensors import is_dtensor


class Observer:
    """Collects what probes and gradients say, on the device, without waiting for it.

    ``finish`` returns an update as one float64 vector and the flags that ``check`` reads
    (``Exchange``). The vector holds p and q of each of K units (parameters, or blocks of them), the
    whole q, and the scalars of the weights.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._wrapped, self.model, self.settings = model, unwrapped(model), settings
        self.slabs: dict[int, ProbeSlab] = {}
        self.slab: ProbeSlab | None = None
        self.pending: Pending | None = None
        self.after_update: list[Mark] | None = None
        self._bind(ProbeSlab(self.model, 1))

    def _bind(self, slab: ProbeSlab) -> None:
        s = self.settings
        self.processes = find_processes(self._wrapped, s.group, s.stages)
        self._stages = Stages(list(slab.units.values()), slab.labels, s.stages)
        self.units = self._stages.units
        if not self.units:
            raise ValueError(
                f"{type(self.model).__name__} has no trainable parameter under a gnsfast module: "
                "call gnsfast.convert(model) first"
            )
        parameters = dict(self.model.named_parameters())
        self.names = list(slab.rows)
        self.parameters = [parameters[name] for name in self.names]
        self.paths = {name: [path for path, _, _ in rows] for name, rows in slab.rows.items()}
        self.labels, self.modules = slab.labels, slab.modules
        own = list(slab.units.values())
        index = {name: k for k, name in enumerate(self.names)}
        self._of_host = [index[unit.parameter] for unit in own]
        self._blocks = [(self.parameters[index[unit.parameter]], unit.block) for unit in own]
        first = next(iter((*self.parameters, *parameters.values())), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._of = torch.tensor(self._of_host, dtype=torch.int64, device=self.device)
        self.metric = AdamMetric.of(self.model, slab, s, self.processes, self.device)
        self.groups = GroupMeasure(s, slab, self.processes, self.device)
        self._sides = Sides(self.metric.modules, self.groups.modules, len(s.groups))
        width = self.metric.width + self.groups.width
        self.exchange = Exchange(self.processes, self._stages, s.group, width)
        spread = fsdp_degrees(self.model)
        replicas = [id(self.parameters[k]) not in spread for k in self._of_host]
        self._replicas = torch.tensor(replicas, dtype=torch.float64, device=self.device)
        single = [not checks.may_repeat(self.modules[path]) for path, _ in self.labels]
        self._single = torch.tensor(single, dtype=torch.float64, device=self.device)
        if self.processes.world > 1 and not self.settings.local:
            gradients.refuse_divide_factor(self.model)
        self._owners = [
            (module._parameters, key, p)
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None and not is_dtensor(p)  # FSDP2 swaps those in and out
        ]
        self.audit = Audit(self.names, self.device)
        self._all = list(parameters.values())
        self._trainable = self._signature()

    def _signature(self) -> list[tuple[bool, torch.device]]:
        return [(p.requires_grad, p.device) for p in self._all]

    @property
    def probes(self) -> list[Tensor]:
        """The probes of the open micro-batch."""
        return [] if self.slab is None else self.slab.probes

    @property
    def all_labels(self) -> list[tuple[str, str]]:
        """The module and parameter of each probe row, over all pipeline stages."""
        return self._stages.labels

    def open(self, num_samples: int, cu_seqlens: Tensor | None = None, groups: Any = None) -> None:
        """Let the next forward and backward pass fill the probes."""
        if self.slab is not None:
            raise ObservationError(
                "a micro-batch is open already: one forward and one backward pass belong to one "
                "gns.microbatch(...) block"
            )
        replaced = any(owner.get(key) is not p for owner, key, p in self._owners)
        if replaced or self._signature() != self._trainable:
            raise ObservationError(
                "parameters were frozen, unfrozen, moved or replaced since the first micro-batch, "
                "so old and new measurements cannot be averaged: call gns.reset()"
            )
        refuse_context_parallel()
        self._check_marks()
        self.groups.start(self.pending is None)
        slots, documents = num_samples, None
        if cu_seqlens is not None:
            slots = -(-(len(cu_seqlens) - 1) // SLOTS) * SLOTS
            documents = document_slots(cu_seqlens, num_samples, slots)
        slab = self.slabs.pop(slots, None) or ProbeSlab(self.model, slots, self._sides)
        self.slabs[slots] = slab  # the newest comes last
        if len(self.slabs) > SLABS:
            del self.slabs[next(iter(self.slabs))]
        moments = self.metric.open(slab, first=self.pending is None)
        slab.open(documents, self.groups.open(groups, num_samples), moments)
        self.slab, self._version = slab, slab.version
        self._before = self._marks()
        self._stale = self._leftover()
        self._end: EndOfPass | None = None
        self._split = False
        named = dict(zip(self.names, self.parameters))
        audited = self.audit.wanted()
        self._watch = GradientWatch(named, audited, slab.probes, self.pass_over)

    def pass_over(self) -> None:
        """Note the state of the gradients after a backward pass."""
        few = None if self.settings.local else gradients.witness(self.parameters, self.device)
        if few is not None:
            few = self._without_scale(few.square())
        self._end = EndOfPass(self._marks(), few)
        self._split |= in_context_parallel()

    def _check_marks(self) -> None:
        """Raise if ``.grad``, from which q is read, holds more than the update's micro-batches."""
        if self.settings.local:
            return
        if self.pending is not None:
            if self._marks() != self.pending.end.marks:
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
        """1.0 if the update starts from gradients that are not zero, else 0.0. It costs nothing if
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
        """Whether backward has reached a probe of the open micro-batch."""
        return self.slab is not None and self.slab.version != self._version

    def discard(self) -> None:
        """Close the probes and forget the update, whose gradients are not complete."""
        if self.slab is not None:
            self.slab.close()
            self._watch.stop()
        self.groups.discard()
        self.slab, self.pending, self.after_update = None, None, self._marks()

    def close(
        self,
        num_samples: int,
        tokens: int | Tensor | None,
        scale: float | Tensor | None,
        pipeline: PipelinePasses | None = None,
    ) -> None:
        """Take what backward left in the probes and add it to the update."""
        slab = self.slab
        assert slab is not None
        try:
            slab.refuse_graph()
            if self.names and not self.reached():
                raise ObservationError(NO_BACKWARD)
            if pipeline is not None:
                self._refuse_unscaled_stage()
            if self._split:
                refuse_context_parallel(always=True)
        except ObservationError:
            self.discard()
            raise
        slab.close()
        self._watch.stop()
        self.slab = None
        s = self.settings
        passes, factor = (1, 1.0) if pipeline is None else (pipeline.passes, pipeline.factor)
        if self._end is None:
            self.pass_over()
        assert self._end is not None
        sums, metric, calls = slab.read(self.device)
        arrived, watched = self._watch.arrived, set(self._watch.watched)
        touched = [
            min(arrived[name], passes) if name in watched else int(old != new)
            for name, old, new in zip(self.names, self._before, self._end.marks)
        ]
        whole = sums.new_zeros(2, len(self.names)).index_add_(1, self._of, sums)
        self.audit.add(whole, self._watch)
        sums = self._without_scale(sums) * factor**2
        self.metric.add(self._without_scale(metric))
        weight = 1.0 if scale is None else scale
        self.groups.add(slab, num_samples, tokens, weight, s.loss_reduction, self._without_scale)
        surplus = (calls - passes).clamp(min=0) * self._single
        calls = torch.stack([calls, torch.where(calls.isnan(), calls, surplus)])
        scalars = loss_factors.block_scalars(
            *(num_samples, passes, tokens, factor * weight),
            *(s.loss_reduction, s.local, self.device),
        )
        if self.pending is not None and factor != 1.0:
            self.discard()
            raise ObservationError(
                "the schedule divides all gradients after its step, those of earlier steps once "
                "more: for several steps in an update make it with scale_grads=False"
            )
        lost = [sums.new_zeros(())] * 2
        if isinstance(tokens, Tensor) and tokens.ndim and pipeline is None and self.names:
            lost = loss_factors.misplaced(slab.sample_sqnorms(self.device), tokens)
        new = Pending(
            *(sums, calls, scalars, self._end, self._stale, tokens is not None, passes, touched),
            lost,
        )
        old = self.pending
        if old is not None:
            if old.lengths != new.lengths:
                self.discard()
                raise ValueError("tokens must be given for all micro-batches or for none")
            new.sums, new.calls = old.sums + sums, old.calls + calls
            new.scalars, new.microbatches = old.scalars + scalars, old.microbatches + passes
            new.stale = old.stale
            new.lost = [a + b for a, b in zip(old.lost, lost)]
            new.touched = [a + b for a, b in zip(old.touched, touched)]
        self.pending = new

    def _refuse_unscaled_stage(self) -> None:
        """Raise if this stage's scaler has no scale: only the last stage scales the loss."""
        scaler = self.settings.grad_scaler
        if scaler is not None and scaler.is_enabled() and scaler._scale is None:
            raise ObservationError(
                "the grad_scaler has scaled nothing on this pipeline stage, so its scale is not "
                "known here: scale something on every stage, scaler.scale(torch.zeros(())), and "
                "call scaler.update() on all of them"
            )

    def finish(self, grad_norm: float | Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
        """The update's vector and its flags [2 R + FLAGS], summed over processes; and how many of
        this process's micro-batches wrote to each parameter's gradient.
        """
        pending, s = self.pending, self.settings
        if pending is None:
            raise ObservationError(
                "gns.update() without a micro-batch: run forward and backward inside "
                "gns.microbatch(num_samples), or call gns.attach() once"
            )
        self.pending, self.after_update = None, self._marks()
        on = self.processes
        p, q = pending.sums / on.tensor  # tensor-parallel processes all found the same
        whole = q.sum()
        written = another = replica = handed = torch.zeros_like(whole)
        stale = pending.stale
        norm = None if grad_norm is None else self._norm(grad_norm)
        alone = pending.microbatches == 1 and on.world == 1 and s.source == "auto"
        if by_probe := s.local or alone:
            stale = torch.zeros_like(stale)
            if norm is not None:  # only compared: the probes are more accurate
                another = ((norm - whole).abs() > 0.02 * whole).double()
        elif norm is not None:
            handed, whole = norm, norm * on.data**2 / on.world
            q = torch.full_like(q, torch.nan)
        elif self.names:
            q, written = self._read_gradients(pending)
            whole, replica = q.sum(), (q * self._replicas).sum()
        touched = {name for name, times in zip(self.names, pending.touched) if times}
        vector, flags = self.exchange(
            *(torch.stack([p, q]), whole, pending.scalars, pending.calls),
            *([written, stale, another, *pending.lost], handed, replica),
            [*self.metric.finish(by_probe, self._unscale, touched), *self.groups.finish()],
        )
        return vector, flags, pending.touched

    def _norm(self, grad_norm: float | Tensor) -> Tensor:
        """The square of a given norm, without a gradient scaler's factor."""
        full = getattr(grad_norm, "full_tensor", None)  # that of FSDP2 is sharded
        norm = torch.as_tensor(grad_norm if full is None else full())
        if norm.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"grad_norm is a {norm.dtype}, too coarse for a difference of squares: call "
                "gns.update() without it, before clipping"
            )
        return self._unscale(norm.to(self.device, torch.float64, non_blocking=True).square())

    def _read_gradients(self, pending: Pending) -> tuple[Tensor, Tensor]:
        """This process's share of q, from the final gradients, and whether they were written to
        after backward.
        """
        s = self.settings
        for name, parameter in zip(self.names, self.parameters):
            if parameter._backward_hooks and not is_dtensor(parameter):
                raise ObservationError(
                    f"{name} has a gradient hook, so .grad is not the sum of its samples' "
                    "gradients: use source='local', which does not read it"
                )
        writes = (
            loss_factors.unscale_writes(self.device) if loss_factors.unscaled(s.grad_scaler) else 0
        )
        expected = [m and (m[0], m[1] + writes) for m in pending.end.marks]
        found = self._marks()
        if all(m is None for m in found):
            raise ObservationError(
                "no parameter has a gradient: call gns.update() before optimizer.zero_grad(). "
                "If the optimizer runs inside backward, use source='local'."
            )
        if found != expected:
            raise ObservationError(checks.REWRITTEN)
        q = self._unscale(gradients.grad_sqnorms(self._blocks, self.processes, self.device))
        written = q.new_zeros(())
        # Not every write changes a version: unscale_ on the CPU does not, nor clipping shards.
        after = gradients.witness(self.parameters, self.device)
        if pending.end.witness is not None and after is not None:
            ratio = self._unscale(after.square()) / pending.end.witness
            written = ((ratio - 1).abs() > 1e-3).double()
        return q * self.processes.data**2, written  # DDP and FSDP2 average

    def _unscale(self, sqnorm: Tensor) -> Tensor:
        """Remove the gradient scaler's factor, unless ``unscale_`` has done so."""
        done = loss_factors.unscaled(self.settings.grad_scaler)
        return sqnorm if done else self._without_scale(sqnorm)

    def _without_scale(self, sqnorm: Tensor) -> Tensor:
        factor = loss_factors.loss_scale(self.settings.grad_scaler)
        if factor is None:
            return sqnorm
        return sqnorm / factor.to(self.device, torch.float64, non_blocking=True).square()

    def check(self, flags: Tensor, touched: list[int]) -> None:
        """Raise if the flags of all passes so far, on the host, say that a norm is wrong."""
        calls_2R = self._stages.own_rows(flags[:-FLAGS].view(2, -1), len(self.labels))
        if wrong := checks.explain_flags(flags[-FLAGS:].tolist()):
            raise ObservationError(wrong)
        seen: dict[str, float] = {}
        counted: set[tuple[str, str]] = set()  # a parameter may have several rows
        for (path, name), count, more in zip(self.labels, *calls_2R.tolist()):
            if not name:
                continue
            module = self.modules[path]
            module.know(calls=None if count != count else int(count))
            if more != 0:  # NaN too
                raise ObservationError(checks.explain_calls(path, module, more + 1))
            if (path, name) not in counted:
                counted.add((path, name))
                seen[name] = seen.get(name, 0.0) + count
        alone = self.processes.world == 1
        for name, times in zip(self.names, touched):
            if seen[name] < (times if alone else min(times, 1)):
                raise ObservationError(checks.explain_unseen(name, self.paths[name][0], self.model))
        named = dict(zip(self.names, self.parameters))
        if wrong := self.audit.check(named, self.paths, self.modules):
            raise ObservationError(wrong)


SLOTS = 32
"""The number of documents is rounded up to a multiple of this, so that few slabs suffice."""

SLABS = 8
"""How many batch sizes' probes are kept; a run with more sizes makes them again."""
