# SPDX-License-Identifier: Apache-2.0
"""Collects what the probes and gradients of an update show, micro-batch by micro-batch."""

from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnsfast.combinations import TENSOR_PARALLEL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator import gradients
from gnsfast.estimator.adam_metric import AdamMetric
from gnsfast.estimator.dual_norms import DualNorm, SpectralNorm
from gnsfast.estimator.fingerprint import Fingerprint
from gnsfast.estimator.largest import Largest
from gnsfast.estimator.ledger import Ledger
from gnsfast.estimator.micro_batch_noise import GradientSlab, MicroBatches
from gnsfast.estimator.numbers import Numbers
from gnsfast.estimator.records import Pass, Update, kept
from gnsfast.estimator.sample_clusters import ClusterMeasure
from gnsfast.estimator.sample_groups import GroupMeasure
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Block, Setup, Side, joined
from gnsfast.following import Followed, unwrapped
from gnsfast.functional import document_slots
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import (
    find_processes,
    fsdp_degrees,
    gathered,
    in_context_parallel,
    refuse_context_parallel,
)
from gnsfast.probing import (
    Audit,
    GradientWatch,
    ProbeSlab,
    checks,
)
from gnsfast.table import Table
from gnsfast.tensors import is_dtensor

SIDES: tuple[type[Side], ...] = (
    MicroBatches,
    AdamMetric,
    DualNorm,
    SpectralNorm,
    GroupMeasure,
    ClusterMeasure,
    Largest,
)
"""What can be measured beside the norms. Saved states have their numbers in this order."""


class Observer:
    """Collects what probes and gradients show, on the device, without waiting for it.

    ``finish`` returns an update, which the ``ledger`` takes. It has the flags that ``check`` reads.
    ``is_settled``: an update has ended, so which parameters have norms stays what it is.
    ``unseen``: in how many passes a parameter got a gradient although no probe of it was reached.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._wrapped, self.model, self.settings = model, unwrapped(model), settings
        self.is_settled = False
        self.is_open = False  # whether a micro-batch is
        self._passes: list[Pass] = []  # of the update under way
        self._watch = GradientWatch({}, {})  # of the last pass
        s, kind = settings, GradientSlab if settings.by_gradients else ProbeSlab
        self.slab = slab = kind(model, s.gradients)
        self._table = slab.followed.table
        self.processes = find_processes(self._wrapped, s.group)
        if self.processes.world > 1 and not s.local:
            factor = gradients.divide_factor(self._wrapped)
            self.processes = replace(self.processes, factor=factor)
        first = next(iter((*slab.parameters.values(), *self.model.parameters())), None)
        self.device = torch.device("cpu") if first is None else first.device
        asked = [side for side in SIDES if s.sides[side.name]]
        if asked and self.processes.tensor > 1:
            refuse([*s.features(), TENSOR_PARALLEL])
        setup = Setup(self.model, slab, s, self.processes, self.device)
        self.sides = {side.name: side(setup) for side in asked}
        self._alone = self._has_agreed = self.processes.world == 1
        self.unseen: Counter[str] = Counter()
        self._bind()

    def _bind(self) -> None:
        """Make what depends on which parameters of this process have norms. A batch may show this
        on one process alone, so it must not wait for others.
        """
        s, slab = self.settings, self.slab
        if not slab.parameters:
            checks.refuse_nothing(slab.followed)
        spread = fsdp_degrees(self.model)
        self._replicas = [id(p) not in spread for p in slab.parameters.values()]
        # A tensor-parallel gradient arrives at ``.grad`` unseen, one of FSDP2 when backward ends.
        hidden = (n for n, p in slab.parameters.items() if is_dtensor(p) and id(p) not in spread)
        averaged = gradients.averages(self._wrapped, self.processes, self._replicas)
        where = self.processes, self.device, averaged, hidden
        self.prints = Fingerprint(slab.parameters, s, *where)
        # Several processes sum their numbers on the device. A single one needs no device.
        self._where = self.device if self.processes.world > 1 else torch.device("cpu")
        self.audit = Audit([] if s.by_gradients else [*slab.parameters], self._where)

    def settle(self) -> None:
        """Make what depends on which parameters have norms on all processes."""
        s, sides = self.settings, [*self.sides.values()]
        of = self.slab, s, self.processes, self._replicas
        numbers = Numbers(*of, self.audit, sides, self._where)
        self.ledger = Ledger(s.window, numbers)

    @property
    def saved(self) -> int:
        """How many numbers of an update a state holds: all but those of ``Largest``, the last."""
        largest = self.sides.get("largest")
        return self.ledger.ring.shape[1] - (0 if largest is None else largest.width)

    def _learned(self) -> None:
        """Take over what the first batch has shown: which parameters have norms."""
        table, lost = self.slab.followed.table, self.slab.lost()
        if not lost:
            self._table = table
            return
        if self.is_settled or self._passes:
            self.discard()
            why = next(leaf.left_out for leaf in self.slab.followed.leaves if leaf.name in lost)
            raise ObservationError(
                f"{lost[0]}: {why}. Other passes were measured with it before, so call gns.reset() "
                f"to leave it out, or before training gnsfast.configure(model, exclude={lost})."
            )
        self._table = table
        self._watch.stop()
        self._leave_out(lost)
        if self.is_open:
            self.prints.open(first=True)
            self._watch_gradients()

    def _leave_out(self, names: list[str]) -> None:
        """Measure some parameters no more."""
        self.slab.refresh()
        for side in self.sides.values():
            side.leave_out(names)
        self._bind()

    def agree(self) -> bool:
        """Whether all processes measure the same parameters, which they must ask together before
        the first update ends. If not, they forget it and join their tables, so that all measure
        what one of them has proven and none disproved: another observer is to begin with these.
        """
        if self._has_agreed or not self._passes:
            return True
        self._has_agreed, s = True, self.settings
        leaves = self.slab.followed.leaves
        shapes = {leaf.name: tuple(leaf.parameter.shape) for leaf in leaves}
        lost = [] if s.by_gradients else [leaf for leaf in leaves if leaf.left_out]
        here = {leaf.name: leaf.left_out for leaf in lost}
        refused = {leaf.name: leaf.refused for leaf in leaves if leaf.refused}
        table = self.slab.followed.table
        found = gathered((shapes, here, refused, table, s.clusters), s.group)
        if any(other != shapes for other, *_ in found):
            raise ObservationError(
                "The processes train different parameters, as the stages of a pipeline do. With "
                "unit='micro_batch' measure each stage by itself: give GradientNoiseScale the "
                "process_group of the processes that hold the same stage."
            )
        if any(clusters != s.clusters for *_, clusters in found):
            raise ObservationError(
                "Some processes gave gns.microbatch(clusters=...) and others did not: give it on "
                "each of them."
            )
        everywhere = {name: why for _, other, *_ in found for name, why in other.items()}
        if all(other.keys() == everywhere.keys() for _, other, *_ in found):
            return True
        if self.is_settled:
            raise ObservationError(
                f"Other processes cannot measure {', '.join(everywhere.keys() - here.keys())} of "
                "which there are updates. Call gns.reset()."
            )
        refused = {name: why for *_, other, _, _ in found for name, why in other.items()}
        for leaf in leaves:
            leaf.refused = leaf.left_out = refused.get(leaf.name, "")
        if tables := [other for *_, other, _ in found if other is not None]:
            reduce(Table.__or__, tables).tell(self.slab.followed)
        self.discard()
        return False

    @property
    def midway(self) -> bool:
        """Whether an update has begun and has not ended."""
        return self.is_open or bool(self._passes)

    def open(self, block: Block, cu_seqlens: Tensor | None = None) -> None:
        """Let the next forward and backward pass fill the probes."""
        if Followed.of(self.model) is not self.slab.followed:
            raise ObservationError(
                "Parameters were moved, frozen, unfrozen or replaced since the first micro-batch, "
                "so old and new measurements cannot be averaged. Call gns.reset()."
            )
        if self.slab.followed.table is not self._table:  # another block has shown it
            self._learned()
        if (block.groups is None) != (not self.settings.groups):
            raise ValueError(
                "Groups need two arguments: GradientNoiseScale(groups=[...]) names them, and "
                "gns.microbatch(n, groups=...) gives one for each sample. Give both or neither."
            )
        if (block.clusters is None) == self.settings.clusters:
            raise ValueError(
                "clusters was given in some micro-batches and not in others. Give "
                "gns.microbatch(n, clusters=...) in each, or call gns.reset() to begin anew."
            )
        refuse_context_parallel()
        if not self._passes and self.processes.world > 1 and not self.settings.local:
            gradients.refuse_new_factor(self._wrapped, self.processes.factor)
        slab, first = self.slab, not self._passes
        try:
            self.prints.open(first)
        except ObservationError:
            self._drop()
            raise
        slots, documents = block.num_samples, None
        if cu_seqlens is not None:
            slots = -(-(len(cu_seqlens) - 1) // SLOTS) * SLOTS
            documents = document_slots(cu_seqlens, block.num_samples, slots)
        block = block._replace(before=len(self._passes), slots=slots)
        facts = joined([side.open(block) for side in self.sides.values()])
        begins = None if first or self.settings.local else self._begin_backward
        slab.open(slots, documents, facts, self.pass_over, begins, self._learned)
        self.is_open, self._split = True, False
        self._watch_gradients()
        for side in self.sides.values():
            side.start()  # after the watch, which does not audit parameters with hooks

    def _watch_gradients(self) -> None:
        prints, parameters = self.prints, self.slab.parameters
        self._audited = self.audit.next(not self._passes)
        audited = {name: parameters[name] for name in self._audited}
        by_marks = not dist.is_initialized()  # DDP writes to whole buckets
        try:
            self._watch = GradientWatch(prints.named, audited, by_marks, prints.before)
        except RuntimeError:
            self.discard()
            raise

    def _begin_backward(self) -> None:
        """Look at the gradients of earlier passes when backward begins."""
        self.prints.begin_backward(self._watch.arrived)

    def pass_over(self) -> None:
        """Look at the gradients after a backward pass."""
        # With another pass, that one's end counts.
        self.prints.end_backward(alone=self._alone and not self._passes)
        self._split |= in_context_parallel()

    def discard(self) -> None:
        """Close the probes and forget the update, whose gradients are not complete."""
        if self.is_open:
            self._stop()
            self.slab.forget()
            self.audit.undo(self._audited)
        self._drop()
        self.prints.forget()

    def _drop(self) -> None:
        """Forget the passes of the update under way."""
        for each in self._passes:
            self.audit.undo(each.arrived)
        self._passes = []

    def close(self, *given: Any) -> None:
        """Take what backward left in the probes and add it to the update. ``given`` are the
        arguments of the block.
        """
        try:
            self._passes.append(self._closed(*given))
        except (ObservationError, ValueError):
            self.discard()
            raise

    def _closed(
        self,
        num_samples: int,
        tokens: int | Tensor | None,
        scale: float | Tensor | None,
    ) -> Pass:
        slab, watch = self.slab, self._watch
        slab.read()
        if not slab.is_reached:
            raise ObservationError(checks.explain_no_backward(slab.followed))
        if self._split:
            refuse_context_parallel(always=True)
        others = {each.tokens is None for each in self._passes}
        if others - {tokens is None} and not self.settings.by_gradients:
            raise ValueError("tokens must be given for all micro-batches or for none")
        rows, uses, idle = slab.sums(), slab.uses, slab.idle
        each = isinstance(tokens, Tensor) and tokens.ndim
        reached, B = slab.each() if each else [], slab.num_samples
        samples = [t[:, :B].sum(0, dtype=torch.float64) for t in reached]
        self._stop()
        left = {name: side.passed() for name, side in self.sides.items()}
        if not self.prints.is_over:
            self.pass_over()
        unseen = [name for name in idle if watch.sees(name) and watch.has_arrived(name)]
        for name in idle:
            if not watch.sees(name):
                self.prints.suspect(name)
        self.prints.close()
        slab.refuse_unseen(unseen)
        return Pass(
            rows=rows,
            uses=uses,
            num_samples=num_samples,
            tokens=kept(tokens),
            scale=1.0 if scale is None else kept(scale),
            loss_scale=self._loss_scale(),
            samples=samples,
            left=left,
            arrived=watch.norms,
            idle={*idle}.difference(unseen),
            unseen=unseen,
        )

    def _stop(self) -> None:
        """Make the model what it was."""
        if self.is_open:
            self.slab.close()
            for side in self.sides.values():
                side.stop()
        self._watch.stop()
        self.is_open = False

    def finish(self, grad_norm: float | Tensor | None) -> Update:
        """The update."""
        passes, s = self._passes, self.settings
        if not passes:
            raise ObservationError(
                "gns.update() was called without a micro-batch. Run forward and backward inside "
                "gns.microbatch(num_samples)."
            )
        self._passes = []
        norm = None if grad_norm is None else gradients.given_sqnorm(grad_norm, self.device)
        alone = self._alone and len(passes) == 1
        by_probe = s.local or (alone and s.by_probe)
        grads = self.prints.finish(norm is not None, by_probe)
        self.unseen.update(name for each in passes for name in each.unseen)
        done = loss_factors.unscaled(s.grad_scaler)
        loss_scale = None if done else self._loss_scale()
        sides = self.sides.items()
        left = {name: side.finish(passes, by_probe, loss_scale) for name, side in sides}
        return Update(passes, by_probe, alone, norm, grads, loss_scale, left)

    def audit_again(self) -> None:
        """Look at the gradients of all parameters again, and audit them and one given norm."""
        self.prints.again()
        self.audit.again()

    def refuse_norm(self) -> None:
        """Raise if the norm of the whole gradient is not enough."""
        if self.settings.local:
            raise ValueError("source='local' does not use grad_norm: call gns.update()")
        if not self.settings.takes_norm:
            raise ValueError(
                f"metric={self.settings.metrics[0]!r} needs the gradients, not their norm. Call "
                "gns.update() without grad_norm, before clipping."
            )
        gradients.refuse_partial_norm(self.slab.left_out)

    def _loss_scale(self) -> Tensor | None:
        """The gradient scaler's factor, which the next step may change."""
        factor = loss_factors.loss_scale(self.settings.grad_scaler)
        return None if factor is None else factor.clone()

    def check(self, flags: Tensor) -> None:
        """Raise if the flags of all passes so far, which are on the host, show a wrong norm."""
        parameters, K = self.slab.parameters, len(self.slab.parameters)
        calls_2K = flags[: 2 * K].view(2, K)
        own, takes_norm = flags[2 * K :].tolist(), self.settings.takes_norm
        if wrong := checks.explain_flags(own, takes_norm):
            raise ObservationError(wrong)
        for name, count, more in zip(parameters, *calls_2K.tolist()):
            if more != 0:  # NaN too
                raise ObservationError(checks.explain_calls(name, more + 1))
            if self.unseen[name] and (self.processes.world == 1 or count == 0):
                raise ObservationError(checks.explain_unseen(name))
        if wrong := self.audit.check(parameters, self.slab.is_half):
            raise ObservationError(wrong)


SLOTS = 32
"""The number of documents is rounded up to a multiple of this, so that few slabs are needed."""
