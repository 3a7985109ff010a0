# SPDX-License-Identifier: Apache-2.0
"""``GradientNoiseScale`` measures the noise scale of a training run in its own backward passes."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gnsfast.arguments import check_choice, integer
from gnsfast.errors import AmbiguousRowsError, ObservationError
from gnsfast.estimator.budget import Budget, Pace
from gnsfast.estimator.errors import Errors
from gnsfast.estimator.largest import LargestSample
from gnsfast.estimator.micro_batch_noise import trained
from gnsfast.estimator.observer import Observer
from gnsfast.estimator.records import Window
from gnsfast.estimator.saved_state import identity, refuse_other
from gnsfast.estimator.settings import Settings, measured, ordered_names
from gnsfast.estimator.side import Block, Side
from gnsfast.following import Followed, unwrapped
from gnsfast.guard import Guard
from gnsfast.noise_scale import NOT_MEASURED, NoiseScale, loss_factors, summarize
from gnsfast.probing import checks
from gnsfast.table import PROVEN, Table, Take

LOG = logging.getLogger("gnsfast")


class GradientNoiseScale:
    """Measure the gradient noise scale tr Σ / |G|² while training.

    At fixed weights it equals ``g.var(0).sum() / (g.mean(0).square().sum() - g.var(0).sum() /
    len(g))`` for the per-sample gradients g of all samples in the window. It needs neither these
    gradients nor fixed weights: each update measures tr Σ and |G|² without bias, the window
    averages both, and the ratio is taken last.

    Args:
        model: any model. Nothing in it is changed. Parameters without norms are left out of both
            tr Σ and |G|² (``gnsfast.coverage``).
        take: what a sample is, for the first batch, as for ``gnsfast.learn``. A number K says that
            rows b, b + n, ... of the batch, K of them, are sample b of n: pairs have 2. ``table``
            knows it already.
        source: where |G|² comes from. ``"update"``: from the gradient of the whole update, over all
            micro-batches and processes. It is read from ``.grad`` at the end of the block; that of
            one micro-batch on one process comes from the probes, and nothing is read. ``"local"``:
            from each micro-batch by itself. This is noisier, needs two samples in each micro-batch,
            and never reads ``.grad``, so it serves optimizers that average gradients themselves.
        window: the number of newest measured updates that ``compute()`` averages.
        decay: the weight of an update relative to the next newer one. Below 0.82 there is no
            interval.
        every: measure at most one update in so many. The others run plain torch.
        budget: the largest share of the time that measuring may take, such as 0.01. The estimator
            times measured and plain updates, from the end of one to the end of the next, and
            measures as often as this allows, on all processes alike. At first one update in three
            is measured, which later ones pay off.
        loss_reduction: ``"mean"`` over the micro-batch's samples (or tokens), or ``"sum"``.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss.
        process_group: the processes that train this model together, data and model parallel. The
            default is all processes.
        metric: other noise scales to measure too, one name or several: ``"adam"``, under the
            metric of the optimizer (``compute().adam``); ``"sign"`` and ``"spectral"``, in the dual
            norms of sign descent and of Muon (``compute().sign``, ``.spectral``). Their noise is
            the spread of an update's backward passes on all processes, so an update needs two.
        optimizer: for ``"adam"`` the ``torch.optim.Adam`` or ``AdamW`` in use. For ``"spectral"``
            the optimizer of the matrices to measure, by default all but those of embeddings.
        groups: names of groups of samples, such as data domains. Each gets a noise scale of its own
            in ``compute().per_group``; ``update(groups=...)`` gives each sample's group.
        keep_largest: how many samples with the largest gradients to keep of each update, for
            ``largest()``. ``update(ids=...)`` names them.
        unit: whose gradients are compared with that of the update: ``"sample"``, or
            ``"micro_batch"``, each backward pass of each process. The second needs no norms of
            samples, so it holds every trained parameter of any model, and it reads each gradient
            once more in a micro-batch. It needs two of them in an update, better four or more, and
            refuses FSDP2 and tensor parallelism. It has no bias, but of n samples in K
            micro-batches tr Σ has up to √((n - 1) / (K - 1)) times the error, and |G|² √((n - 1) /
            (n - n / K)) times (``compute().excess``). Where samples depend on each other, as
            through batch norm, the noise is that of micro-batches of this size.
        gradients: who makes the gradients of measured updates. ``"fused"``: the kernels that square
            each sample's gradient, at the least cost; losses differ from those of plain torch in
            their last bits. ``"torch"``: torch's own functions, so training is the same to the last
            bit. Measured updates then compute one more product for each weight, and write nothing.

        on_error: what becomes of an error of gnsfast in an update. ``"raise"`` raises it.
            ``"skip"`` logs it once, drops the update and goes on as plain torch, in the same step.
            With ``gradients="torch"`` no bit of training then depends on gnsfast. Errors of your
            own code are raised as ever.

    Each process must have whole samples, and processes average their gradients inside the block of
    the update, as DDP and FSDP2 do. At its end one small vector is summed over them. Tensor
    parallel layers (``parallelize_module``) need no setting, also under FSDP2. If |G|² is read from
    ``.grad``, nothing inside the block may change it: clip after the block. A hook that rewrites
    gradients after accumulation is not noticed.

    Raises:
        ValueError: for a model without parameters, or settings that do not go together.
        ObservationError: if a pass, a gradient or a micro-batch is missing or counted twice.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A, with B_small = 1.

    >>> model = torch.nn.Linear(5, 2)
    >>> gns = gnsfast.GradientNoiseScale(model)
    >>> for x in torch.randn(8, 16, 5):
    ...     with gns.update(16):
    ...         model(x).square().sum(1).mean().backward()
    ...     model.zero_grad()
    >>> gns.compute().updates
    8
    """

    def __init__(
        self,
        model: nn.Module,
        table: Table | None = None,
        *,
        take: Take | None = None,
        source: str = "update",
        window: int = 64,
        decay: float | None = None,
        every: int = 1,
        budget: float | None = None,
        loss_reduction: str = "mean",
        grad_scaler: GradScaler | None = None,
        process_group: "dist.ProcessGroup | None" = None,
        metric: str | Sequence[str] | None = None,
        optimizer: Any = None,
        groups: Sequence[str] = (),
        keep_largest: int = 0,
        unit: str = "sample",
        gradients: str = "fused",
        on_error: str = "raise",
    ) -> None:
        if decay is not None and not 0 < decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {decay!r}")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no trainable parameter to measure")
        if table is not None:
            table.tell(Followed.of(unwrapped(model)))
        self.model, self.decay = model, decay
        self._is_due: bool | None = None  # of the update under way: whether it is measured
        self._is_in_pass = False
        self.window, self.every = integer("window", window), integer("every", every)
        self.budget = budget
        self._settings = Settings(
            *(source, loss_reduction, grad_scaler, process_group),
            **measured(metric, optimizer),
            groups=ordered_names(groups),
            window=window,
            keep_largest=keep_largest,
            unit=unit,
            gradients=gradients,
            take=take,
        )
        check_choice("on_error", on_error, ("raise", "skip"))
        self._skips, self._errors = on_error == "skip", Errors()
        if self._settings.by_gradients:
            trained(unwrapped(model))
        self.reset()

    def reset(self) -> None:
        """Forget all measurements, and read the model's parameters anew."""
        self.discard()
        self._observer: Observer | None = None
        self._has_warned = False
        self._seen = self._measured = 0
        self._budget = Budget(self.budget, self.every)

    def discard(self) -> None:
        """Forget the update that is under way, from inside its block. A pass that has begun ends as
        it has begun, because a checkpoint may run its forward again. Earlier measurements stay.
        """
        if self._is_due:
            self._is_due = False
            if self._observer is not None and not self._is_in_pass:
                self._observer.discard()

    def _start(self) -> Observer:
        """The observer. It is made at the first micro-batch, after wrapping and sharding."""
        if self._observer is None:
            with torch.inference_mode(False):  # a trainer may save its state under it
                self._observer = Observer(self.model, self._settings)
        return self._observer

    def _settle(self) -> Observer:
        """The observer, when it is known which parameters have norms."""
        observer = self._start()
        if not observer.is_settled:
            with torch.inference_mode(False):  # see ``_start``
                observer.settle()
        return observer

    def update(
        self,
        num_samples: int | None = None,
        *,
        tokens: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rows: Any = None,
        groups: Sequence[Any] | Tensor | None = None,
        ids: Sequence[Any] | Tensor | None = None,
        clusters: int | Sequence[Any] | Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """Measure an update: the backward passes of one step of the optimizer.

        With ``num_samples`` the block holds one forward and one backward pass, and all arguments
        are those of ``microbatch``. Without it, each pass has a ``microbatch`` block of its own
        inside this one. Gradients are None or zero when the block begins, and complete when it
        ends. Clip, ``unscale_``, step and ``zero_grad`` after it.

        Nothing waits for the device, except for ``metric="spectral"``. With several processes the
        end of the block is a collective: if one of them raises, the others wait for it.

        Raises:
            ValueError: as ``microbatch``.
            ObservationError: as ``microbatch``, and at the end of a block without a pass, or
                without a gradient.

        >>> model = torch.nn.Linear(5, 2)
        >>> gns = gnsfast.GradientNoiseScale(model)
        >>> with gns.update():
        ...     for x in torch.randn(4, 16, 5):
        ...         with gns.microbatch(16, scale=1 / 4):
        ...             (model(x).square().sum(1).mean() / 4).backward()
        """
        if self._is_due is None and self._seen < self._budget.next:
            return _Plain(self)
        of_pass = {
            "tokens": tokens,
            "scale": scale,
            "cu_seqlens": cu_seqlens,
            "rows": rows,
            "groups": groups,
            "ids": ids,
            "clusters": clusters,
        }
        if num_samples is None and (given := [k for k, v in of_pass.items() if v is not None]):
            raise ValueError(
                f"gns.update({given[0]}=...) describes the only pass of an update, and it lacks "
                f"num_samples. Of several passes, give it to each gns.microbatch(num_samples, "
                f"{given[0]}=...)."
            )
        return self._measured_update(num_samples, of_pass)

    @contextmanager
    def _measured_update(
        self, num_samples: int | None, of_pass: Mapping[str, Any]
    ) -> Iterator[None]:
        if self._is_due is not None:
            raise ObservationError(
                "gns.update() was called inside a gns.update() block. A block is one update: its "
                "end must come before optimizer.step()."
            )
        self._is_due, self._passes, pace = True, None if num_samples is None else 1, None
        self._is_lost = False
        try:
            if num_samples is None:
                yield
            else:
                with self.microbatch(num_samples, **of_pass):
                    yield
            if self._is_due or self._is_lost:
                pace = self._finish()
                self._budget.end(True)
                self._budget.decide(self._seen, pace)
                if self._is_lost and not self._is_distributed:
                    self._budget.wait(self._errors.in_a_row)
                self._errors.in_a_row *= self._is_lost
                self._seen += 1
        except BaseException:
            self.discard()
            # As where memory is short for a measured update alone, and the user skips it.
            if self.budget is not None and not self._is_distributed:
                self._seen += 1
                self._errors.in_a_row += 1
                self._budget.wait(self._errors.in_a_row)
            raise
        finally:
            if pace is None:
                self._budget.interrupt()
            self._is_due = None

    def _finish(self) -> Pace:
        """End a measured update, and return the pace of all processes. Where an error drops it, the
        others still need this process.
        """
        if not self._is_lost:
            with self.dropping_errors():
                return self._end()
        with self.dropping_errors():
            if self._is_distributed:
                return self._end(is_lost=True)
        return Pace()

    @property
    def _is_distributed(self) -> bool:
        """Whether other processes measure the same updates."""
        return self._observer is not None and self._observer.processes.world > 1

    def _end(self, is_lost: bool = False) -> Pace:
        observer = self._start()
        if not observer.agree():  # they have joined their tables in place of measuring
            self._observer = None
            return Pace()
        observer = self._settle()
        observer.is_settled = True
        pace = self._budget.here
        update = observer.lose(pace) if is_lost else observer.finish(pace)
        self._measured += 1
        return observer.ledger.add(update)

    @contextmanager
    def dropping_errors(self) -> Iterator[None]:
        """Let an error inside this block drop the update under way, as ``on_error`` says. It is for
        code that only prepares a measurement, such as that of a callback.
        """
        try:
            yield
        except Exception as error:
            self.discard()
            if not self._skips and not isinstance(error, AmbiguousRowsError):
                raise
            self._is_lost = True
            self._errors.add(error)

    def microbatch(
        self,
        num_samples: int,
        *,
        tokens: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rows: Any = None,
        groups: Sequence[Any] | Tensor | None = None,
        ids: Sequence[Any] | Tensor | None = None,
        clusters: int | Sequence[Any] | Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """One of several passes of an update: measure the one forward and one backward pass inside
        the block, which is inside ``with gns.update():``.

        Args:
            num_samples: the number of samples on this process.
            tokens: the number of tokens that the loss counts, in total or for each sample
                [num_samples]. Give it if the loss is a mean (or sum) over the tokens of samples
                of unequal length. In any other weighted mean it is the weight of each sample, such
                as that of its class: numbers of any size, floats too. ``learn(loss=...)`` proves
                them.
            scale: the factor of the loss after its reduction, such as 1 / A for A micro-batches,
                without that of a ``grad_scaler``. It changes the noise scale only if micro-batches
                weigh tokens unequally: see ``NoiseScale.unequal``. Tensors, also of ``tokens``, are
                read at the block's end.
            cu_seqlens: needed if samples are documents packed into rows: integers [documents + 1]
                on the CPU. If all rows of the batch are one list, they are the first row of each
                document, and then the end of the last (``gnsfast.cu_seqlens`` makes them from
                position ids). Documents beyond ``num_samples`` are padding. Documents must not
                attend to each other. (Call transformers with ``use_cache=False``, or it drops their
                mask.) ``tokens`` must then hold a count for each: ``cu_seqlens.diff() - 1`` for
                next-token losses, 0 for padding.
            rows: needed if samples have unequal numbers of rows, such as graphs that are batched as
                one: integers [N] on the CPU, the sample (0 to num_samples - 1) of each row, in any
                order, or a list or a dictionary of several, for rows of several kinds, such as
                nodes and edges. A tensor whose first dimension has N rows belongs to the map of N
                rows. If the loss is a mean over rows, ``tokens`` must hold a count for each sample.
            groups: the name of each sample's group.
            ids: a name for each sample, such as its number in the data set, for ``largest()``.
            clusters: which samples belong together, such as the rollouts of a prompt or the
                augmentations of an image: 8 if every 8 consecutive samples are a cluster, or the
                cluster of each sample. ``compute().clusters`` then has the noise scale of clusters.
                A cluster must be in one micro-batch, on one process (but with ``"local"``). A
                tensor is best on the CPU, since it is read at once.

        Raises:
            ValueError: for counts that are zero or negative, or a single sample with ``"local"``.
            ObservationError: outside of an update, if no backward pass runs in the block, or if
                ``per_sample_sqnorms`` would raise.
        """
        if self._is_due is False:
            return nullcontext()
        if self._is_due is None:
            raise ObservationError(
                "gns.microbatch is a pass of an update. Write with gns.update(): around all passes "
                "of a step, or with gns.update(num_samples): around the only one."
            )
        block = Block(num_samples, self._seen, groups, ids, clusters)
        return self._measured_pass(block, tokens, scale, cu_seqlens, rows)

    @contextmanager
    def _measured_pass(
        self,
        block: Block,
        tokens: float | Tensor | None,
        scale: float | Tensor | None,
        cu_seqlens: Tensor | None,
        rows: Any,
    ) -> Iterator[None]:
        with self.dropping_errors():
            loss_factors.check_factors(integer("num_samples", block.num_samples), tokens, scale)
            if self._observer is None:  # the first micro-batch decides
                self._settings = replace(self._settings, clusters=block.clusters is not None)
            self._settings.check_block(block, tokens, cu_seqlens, rows)
            observer = self._start()
            if observer.is_open:
                raise ObservationError(
                    "A micro-batch is already open, by another gns.microbatch block. Each "
                    "micro-batch takes one forward and one backward pass."
                )
            if not observer.midway:
                observer.begin(self._measured, self._passes)
            table = observer.slab.followed.table
            if table is not None and table.has_weights and tokens is None:
                raise ValueError(
                    "The samples of this loss have unequal weights: its table was proven with "
                    "tokens=. Give those of this batch: gns.update(n, tokens=weights)"
                )
            observer.open(block, cu_seqlens, rows)
        guard, self._is_in_pass = Guard(), True
        try:
            with guard if self._skips else nullcontext():
                yield
        except BaseException as error:
            self._is_due = False
            if self._observer is not None:
                checks.explain_penalty(error, self._observer.slab.took_graphs)
            raise
        finally:
            self._is_in_pass = False
            if not self._is_due and self._observer is not None:  # an error or discard() dropped it
                self._observer.discard()
        if not self._is_due:
            return
        with self.dropping_errors():
            if guard.error is not None:
                raise guard.error
            observer.close(block.num_samples, tokens, scale)

    def compute(self) -> NoiseScale:
        """The noise scale over the window, with its 95 % interval. It waits for the device.

        With ``metric="adam"`` the field ``adam`` is tr(PΣ) / GᵀPG, where P = 1 / (√(v / (1 -
        beta2^t)) + eps) is the optimizer's diagonal before the step. It is the batch size at which
        noise and gradient are equally large *under Adam's metric*, over the updates that have a v,
        from the second on. P has no learning rates. It is not a critical batch size: P is frozen,
        there is no momentum, and v, which is smoothed noise itself, is small where gradients were
        rare. (Weights that never had a gradient count with 1 / eps.)

        With ``metric="sign"`` and ``"spectral"`` the fields of these names are ``DualNoiseScale``
        objects. A measured update waits for the device where matrices are decomposed.

        Raises:
            ObservationError: if backward did not go through a module once for each micro-batch, or
                a weight was used outside of its module. The message names the module.
        """
        if self._observer is None or not self._observer.is_settled:
            return self._not_measured()
        try:
            return self._computed(self._observer)
        except Exception as error:
            if not self._skips:
                raise
            self._errors.add(error)
            self._observer.forget()
            return self._not_measured()

    def _not_measured(self) -> NoiseScale:
        """The result where there are no numbers."""
        counts = dict.fromkeys(("updates", "skipped", "samples"), 0)
        nothing: Any = {**vars(NOT_MEASURED), **counts, "drift": False, "per_module": {}}
        return NoiseScale(**nothing, errors=self._errors.count)

    def _computed(self, observer: Observer) -> NoiseScale:
        window, sides = self._window()
        observer.check()
        slab, fields = observer.slab, dict[str, Any]()
        modules = [name.rpartition(".")[0] for name in slab.parameters]
        norms = window.p, window.q, window.scalars
        result = summarize(*norms, self._settings.local, modules, self.decay)
        for side, numbers in sides:
            fields |= side.fields(numbers, window, self.decay)
        fields |= {"covered": slab.covered, "covered_norm": slab.covered_norm}
        fields |= {"left_out": tuple(slab.left_out)}
        fields |= {"every": self._budget.gap, "cost": self._budget.cost}
        fields |= {"errors": self._errors.count, "loss": self._doubt(observer)}
        result = replace(result, **fields)
        if (warning := result.warning) and not self._has_warned:
            self._has_warned = True
            LOG.warning("%s", warning)
        return result

    def _doubt(self, observer: Observer) -> str:
        """Why the loss is not proven, if it was asked."""
        table = observer.slab.followed.table
        return "" if table is None or table.loss == PROVEN else table.loss

    def _window(self) -> tuple[Window, list[tuple[Side, Tensor]]]:
        """The numbers of the window's updates, and of each side its own [U, width]."""
        observer = self._settle()
        window, sides = observer.ledger.window(), [*observer.sides.values()]
        return window, [*zip(sides, window.sides.split([side.width for side in sides], 1))]

    def largest(self, k: int | None = None) -> list[LargestSample]:
        """The ``k`` samples with the largest share of their update's gradient, over the window; all
        that are kept without ``k``. It waits for the device. With several processes it is a
        collective.

        A large gradient finds broken data, wrong labels and odd lengths, and also samples that are
        hard. Samples whose gradient is no number come first.

        Raises:
            ValueError: without ``GradientNoiseScale(keep_largest=...)``.

        >>> gns = gnsfast.GradientNoiseScale(torch.nn.Linear(2, 1), keep_largest=4)
        >>> x = torch.ones(8, 2)
        >>> x[3] *= 100
        >>> with gns.update(8, ids=[f"file {k}" for k in range(8)]):
        ...     gns.model(x).square().mean().backward()
        >>> gns.largest(1)[0].id
        'file 3'
        """
        if not self._settings.keep_largest:
            raise ValueError("largest() needs GradientNoiseScale(model, keep_largest=16)")
        if self._observer is None:
            return []
        k = k if k is None else integer("k", k)
        side: Any = self._observer.sides["largest"]
        found: list[LargestSample] = side.largest(k)
        return found

    def state_dict(self) -> dict[str, Any]:
        """All measurements, on the CPU, and the table as JSON. Call it between updates. The numbers
        are the same on every process, as ``torch.distributed.checkpoint`` expects. With
        ``keep_largest`` it is a collective: all processes must call it. An id of a sample that is
        neither a number nor text, nor a list or tuple of these, is saved as its text.
        """
        observer = self._settle()
        if observer.midway:
            raise ObservationError(
                "gns.state_dict() was called inside a gns.update() block: call it between updates"
            )
        _, sides = self._window()
        table = observer.slab.followed.table
        return {
            **identity(observer, self.window, self.every),
            "seen": self._seen,
            "measured": self._measured,
            "budget": self._budget.state(),
            "table": table and json.dumps(table.state_dict()),
            "ring": observer.ledger.ring[:, : observer.saved].clone(),
            "flags": observer.ledger.flags.clone(),
            "means": {k: v for side, own in sides for k, v in side.state(own).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``, with the same bits as without an interruption.

        Raises:
            ValueError: for a state of another model or other settings. It names the difference.
        """
        followed = Followed.of(unwrapped(self.model))
        takes_table = followed.table is None and state["table"] is not None
        if takes_table:
            Table.from_state_dict(json.loads(state["table"])).tell(followed)
        settings = replace(self._settings, clusters=bool(state.get("clusters")))
        try:
            with torch.inference_mode(False):  # see ``_start``
                observer = Observer(self.model, settings)
                observer.settle()
            refuse_other(state, identity(observer, self.window, self.every))
        except ValueError:
            if takes_table:
                followed.forget_table()
            raise
        self.reset()
        self._observer, self._settings = observer, settings
        self._seen, self._measured = state["seen"], state["measured"]
        self._budget.load(state["budget"])
        observer.is_settled = self._measured > 0
        ledger, saved = observer.ledger, observer.saved
        ledger.count = self._measured
        ledger.ring.fill_(math.nan)
        ledger.ring[:, :saved] = state["ring"][:, :saved]
        ledger.flags.copy_(state["flags"])
        for side in observer.sides.values():
            side.load(state["means"])


class _Plain:
    """The block of an update that is not measured. It takes as little time as it can."""

    __slots__ = ("_gns",)

    def __init__(self, gns: GradientNoiseScale) -> None:
        self._gns = gns

    def __enter__(self) -> None:
        self._gns._is_due = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        gns = self._gns
        gns._is_due = None
        if kind is None:
            gns._seen += 1
            gns._budget.end(False)
        else:
            gns._budget.interrupt()
