# SPDX-License-Identifier: Apache-2.0
"""Collects what the probes and gradients of an update show, micro-batch by micro-batch."""

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gnsfast.combinations import TENSOR_PARALLEL, refuse
from gnsfast.errors import ObservationError
from gnsfast.estimator import gradients
from gnsfast.estimator.adam_metric import AdamMetric
from gnsfast.estimator.budget import Pace
from gnsfast.estimator.dual_norms import DualNorm, SpectralNorm
from gnsfast.estimator.largest import Largest
from gnsfast.estimator.ledger import Ledger
from gnsfast.estimator.micro_batch_noise import GradientSlab, MicroBatches
from gnsfast.estimator.numbers import Numbers
from gnsfast.estimator.records import Flags, Pass, Update, kept
from gnsfast.estimator.sample_clusters import ClusterMeasure
from gnsfast.estimator.sample_groups import GroupMeasure
from gnsfast.estimator.settings import Settings
from gnsfast.estimator.side import Block, Setup, Side, joined
from gnsfast.following import Followed, unwrapped
from gnsfast.functional import ragged_of
from gnsfast.noise_scale import loss_factors
from gnsfast.parallel import (
    find_processes,
    fsdp_degrees,
    gathered,
    refuse_context_parallel,
)
from gnsfast.probing import ArrivedNorms, Audit, ProbeSlab, checks, is_audited
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

    An update goes from ``begin`` to ``finish``, and each of its passes from ``open`` to ``close``.
    The ``ledger`` takes it. ``is_settled``: an update has ended, so which parameters have norms
    stays what it is.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._wrapped, self.model, self.settings = model, unwrapped(model), settings
        self.is_settled = False
        self.is_open = False  # whether a micro-batch is
        self._passes: list[Pass] | None = None  # of the update under way, if there is one
        s, kind = settings, GradientSlab if settings.by_gradients else ProbeSlab
        self.slab = slab = kind(model, s.gradients, s.take)
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
        self._has_agreed, self._arrived = self.processes.world == 1, ArrivedNorms({})
        self._bind()

    def _bind(self) -> None:
        """Make what depends on which parameters of this process have norms. A batch may show this
        on one process alone, so it must not wait for others.
        """
        slab = self.slab
        if not slab.parameters:
            checks.refuse_nothing(slab.followed)
        spread = fsdp_degrees(self.model)
        parameters: list[Any] = [*slab.parameters.values()]
        self._replicas = [id(p) not in spread for p in parameters]
        self._whole = [
            not is_dtensor(p) or p.device_mesh.size() == spread.get(id(p)) for p in parameters
        ]
        # Several processes sum their numbers on the device. A single one needs no device.
        self._where = self.device if self.processes.world > 1 else torch.device("cpu")
        self.audit = Audit([] if self.settings.by_gradients else [*slab.parameters], self._where)

    def settle(self) -> None:
        """Make what depends on which parameters have norms on all processes."""
        s, sides = self.settings, [*self.sides.values()]
        of = self.slab, s, self.processes, self._replicas, self._whole
        self._numbers = Numbers(*of, self.audit, sides, self._where)
        self.ledger = Ledger(s.window, self._numbers)

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
        self._arrived.stop()
        self.slab.refresh()
        for side in self.sides.values():
            side.leave_out(lost)
        self._bind()
        if self.is_open:
            self._start_audit()

    def agree(self) -> bool:
        """Whether all processes measure the same parameters, which they must ask together before
        the first update ends. If not, they forget it and join their tables, so that all measure
        what one of them has proven and none disproved: another observer is to begin with these.
        """
        if self._has_agreed:
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
        return self._passes is not None

    def begin(self, number: int, passes: int | None) -> None:
        """Begin the measured update of this ``number``, of so many ``passes`` if that is known."""
        if Followed.of(self.model) is not self.slab.followed:
            raise ObservationError(
                "Parameters were moved, frozen, unfrozen or replaced since the first update, so "
                "old and new measurements cannot be averaged. Call gns.reset()."
            )
        if self.processes.world > 1 and not self.settings.local:
            gradients.refuse_new_factor(self._wrapped, self.processes.factor)
        self._passes, self._leftover, self._is_audited = [], None, is_audited(number)
        if not self._is_by_probe(passes):
            self._leftover = self._sqnorms()

    def _is_by_probe(self, passes: int | None) -> bool:
        """Whether q of an update of so many passes comes from the probes."""
        s = self.settings
        return s.local or (self.processes.world == 1 and passes == 1 and s.by_probe)

    def _sqnorms(self) -> gradients.Sqnorms | None:
        """Those of the gradients, if there are any."""
        sqnorms = gradients.grad_sqnorms([*self.slab.parameters.values()], self.processes)
        return sqnorms if sqnorms.indices else None

    def open(self, block: Block, cu_seqlens: Tensor | None = None, rows: Any = None) -> None:
        """Let the next forward and backward pass fill the probes."""
        assert self._passes is not None
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
        ragged = ragged_of(cu_seqlens, rows, block.num_samples, SLOTS)
        slots = block.num_samples if ragged is None else ragged.slots
        block = block._replace(before=len(self._passes), slots=slots)
        facts = joined([side.open(block) for side in self.sides.values()])
        self.is_open = True  # so that ``discard`` closes what an error leaves open
        self.slab.open(slots, ragged, facts, self._learned)
        self._start_audit()
        for side in self.sides.values():
            side.start()  # after the audit, which leaves out parameters with hooks

    def _start_audit(self) -> None:
        audited = self._is_audited and not self.settings.by_gradients
        self._arrived = ArrivedNorms(self.slab.parameters if audited else {})

    def discard(self) -> None:
        """Close the probes and forget the update, whose gradients are not complete."""
        if self.is_open:
            self._stop()
            self.slab.forget()
        self._passes = None

    def close(self, *given: Any) -> None:
        """Take what backward left in the probes and add it to the update. ``given`` are the
        arguments of the block.
        """
        assert self._passes is not None
        self._passes.append(self._closed(self._passes, *given))

    def _closed(
        self,
        before: list[Pass],
        num_samples: int,
        tokens: float | Tensor | None,
        scale: float | Tensor | None,
    ) -> Pass:
        slab = self.slab
        slab.read()
        if not slab.is_reached:
            raise ObservationError(checks.explain_no_backward(slab.followed))
        if slab.is_split:
            refuse_context_parallel(always=True)
        others = {each.tokens is None for each in before}
        if others - {tokens is None} and not self.settings.by_gradients:
            raise ValueError("tokens must be given for all micro-batches or for none")
        rows, uses = slab.sums(), slab.uses
        each = isinstance(tokens, Tensor) and tokens.ndim
        reached, B = slab.each() if each else [], slab.num_samples
        samples = [t[:, :B].sum(0, dtype=torch.float64) for t in reached]
        self._stop()
        return Pass(
            rows=rows,
            uses=uses,
            num_samples=num_samples,
            tokens=kept(tokens),
            scale=1.0 if scale is None else kept(scale),
            loss_scale=self._loss_scale(),
            samples=samples,
            left={name: side.passed() for name, side in self.sides.items()},
            arrived=self._arrived.norms,
        )

    def _stop(self) -> None:
        """Make the model what it was."""
        self.slab.close()
        for side in self.sides.values():
            side.stop()
        self._arrived.stop()
        self.is_open = False

    def lose(self, pace: Pace) -> Update:
        """An update without numbers, in place of one that an error has dropped here."""
        return Update([], None, None, None, {}, pace)

    def finish(self, pace: Pace) -> Update:
        """The update, on a process of this ``pace``. Its gradients are read now, before anybody
        clips or uses them.
        """
        passes, self._passes = self._passes, None
        if not passes:
            raise ObservationError(
                "gns.update() ended without a micro-batch. Give it the number of samples of its "
                "only pass, with gns.update(num_samples), or put gns.microbatch(num_samples) "
                "around each pass in it."
            )
        sqnorms = None
        if not self._is_by_probe(len(passes)):
            sqnorms = self._read()
        done = loss_factors.unscaled(self.settings.grad_scaler)
        loss_scale = None if done else self._loss_scale()
        left = {name: side.finish(passes, loss_scale) for name, side in self.sides.items()}
        return Update(passes, sqnorms, self._leftover, loss_scale, left, pace)

    def _read(self) -> gradients.Sqnorms:
        """The norms of the update's gradients."""
        if not self.settings.by_gradients:  # they are seen as hooks have left them
            gradients.refuse_hooks(self.slab.parameters)
        sqnorms = self._sqnorms()
        if sqnorms is None:
            raise ObservationError(checks.GONE)
        return sqnorms

    def _loss_scale(self) -> Tensor | None:
        """The gradient scaler's factor, which the next step may change."""
        factor = loss_factors.loss_scale(self.settings.grad_scaler)
        return None if factor is None else factor.clone()

    def check(self) -> None:
        """Raise if the flags of all updates so far show a wrong norm. It waits for the device."""
        flags: Flags = self._numbers.flags.split(self.ledger.flags[None])
        whole = [name for name, is_whole in zip(self.slab.parameters, self._whole) if is_whole]
        checks.refuse_flags(self.slab.parameters, whole, flags)
        if wrong := self.audit.check(self.slab.parameters, self.slab.is_half):
            raise ObservationError(wrong)
        if flags.excess.any():
            raise ObservationError(checks.EXCESS)

    def forget(self) -> None:
        """Forget all updates, some of which were wrong."""
        self.ledger.clear()
        self.audit.clear()


SLOTS = 32
"""The number of documents is rounded up to a multiple of this, so that few slabs are needed."""
