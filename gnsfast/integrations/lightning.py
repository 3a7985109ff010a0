# SPDX-License-Identifier: Apache-2.0
"""``GNSMonitor``: the noise scale of a run of Lightning's or ``pytorch_lightning``'s Trainer."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import LBFGS

from gnsfast.critical_batch import RunIdentity
from gnsfast.errors import ObservationError, SampleShapeError
from gnsfast.following import Followed
from gnsfast.integrations.measuring import LOG, Measuring
from gnsfast.integrations.needed import needed
from gnsfast.integrations.replacing import replaced
from gnsfast.integrations.trackers import Tracker
from gnsfast.noise_scale import Factor
from gnsfast.reasons import NO_RESULT
from gnsfast.table import PROVEN, Table, learn
from gnsfast.torch_internals import pytree

with needed(__name__, "Lightning", "lightning"):
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the same under its older name
        from pytorch_lightning import Callback  # type: ignore[assignment]

__all__ = ["Callback", "GNSMonitor", "is_measured"]

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"}


class GNSMonitor(Measuring, Callback):
    """Measure the noise scale of a ``LightningModule`` as it is.

    Equals a hand-written loop with ``gns.update()`` around the passes of a step, and
    ``gns.microbatch(n, scale=1 / accumulate_grad_batches)`` around each. The result is logged every
    ``log_every_n_steps`` by ``log_dict``, under the names of ``trackers.metrics``. Its measurements
    are part of Lightning's checkpoint, and a resumed run continues bit for bit; any other ``fit()``
    starts afresh.

    Lightning zeroes gradients between the forward and the backward pass. The probes need that
    before the forward pass, so the module's ``optimizer_zero_grad`` is also called there.

    Before the first step, ``gnsfast.learn`` runs ``training_step`` with samples of the first batch.
    The norms are proven on what it and the modules that it calls return. What it logs by
    ``self.log`` is dropped meanwhile.

    ``monitor.gns`` is the estimator once training has started. Code that freezes or unfreezes
    parameters during training calls ``monitor.gns.reset()`` afterwards.

    Args:
        batch_size: takes the batch, returns its number of samples. Without it, that is dimension 0
            of the batch's first tensor.
        tokens: takes the batch, returns the tokens that the loss counts for each sample [B]. A
            loss that is a mean over tokens needs it, such as a language model's over labels that
            are not -100: ``lambda batch: (batch["labels"][:, 1:] != -100).sum(1)``. Without it the
            loss must be a mean over samples. GNSMonitor does not check this: with another loss,
            samples of unequal length give a wrong noise scale.
        per_module: also log the noise scale of every module.
        tracker: gets the same metrics, on the first process. The caller closes it.
        loss_reduction, source, window, decay, every: as for ``gnsfast.GradientNoiseScale``.
        budget: the largest share of the time that measuring may take, as for
            ``GradientNoiseScale``. None measures each update.
        gradients: as there. ``"torch"`` leaves training the same to the last bit; ``"fused"`` costs
            less.
        on_error: as there. ``"skip"`` logs an error of gnsfast and goes on training.
        metric: as there. GNSMonitor passes the module's optimizer for ``"adam"``, and for
            ``"spectral"`` if it is a ``torch.optim.Muon``. All three need
            ``accumulate_grad_batches`` of 2 or more, or several processes.
        keep_largest: how many samples with the largest gradients to keep of each update, for
            ``monitor.gns.largest()``. A ``JSONLTracker`` gets those of the updates since the last
            log, and ``gnsfast report`` shows them.
        ids: how the batch names these samples: a key of a batch that is a mapping, such as
            ``"id"``, a place in one that is a list, such as 2, or what takes the batch and returns
            a name for each sample. ``training_step`` gets the batch as it is.
        factor: CBS / noise scale, as for ``gnsfast.flag``. Each log then says whether the batch
            size fits (``batch/flag``: -1 too small, 0 fair, 1 too large; ``cbs/*``, unless those of
            a ``BatchSizeController`` are logged), and the logger ``gnsfast`` gets the words where
            that changes.
        table: of ``gnsfast.learn(module, batch, run=..., take=...)``, where the first batch cannot
            be learnt from as it is.

    Raises:
        ValueError: when training starts, for a model without trainable parameters, or a pass in the
            module's ``__init__``, or in ``configure_model`` before ``fully_shard``; in a step, for
            a batch without ``ids``.
        ObservationError: in the first step, where the batch is a mapping whose ``position_ids``
            show parts of the same samples on several processes.
        NotImplementedError: for manual optimization, FSDP 1, DeepSpeed and other strategies,
            optimizers that call their closure more than once (``LBFGS``), a second GNSMonitor.

    >>> from gnsfast.integrations.lightning import GNSMonitor
    >>> GNSMonitor(batch_size=lambda batch: len(batch["text"])).per_module
    False
    """

    STARTS = "trainer.fit()"

    def __init__(
        self,
        *,
        batch_size: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], Tensor] | None = None,
        loss_reduction: str = "mean",
        per_module: bool = False,
        tracker: Tracker | None = None,
        source: str = "update",
        window: int = 64,
        decay: float | None = None,
        every: int = 1,
        budget: float | None = 0.02,
        gradients: str = "torch",
        on_error: str = "skip",
        metric: str | Sequence[str] | None = None,
        keep_largest: int = 0,
        ids: str | int | Callable[[Any], Any] | None = None,
        factor: float | Factor | None = None,
        table: Table | None = None,
    ) -> None:
        names = {"loss_reduction": loss_reduction, "source": source, "table": table}
        numbers = {"window": window, "decay": decay, "every": every, "keep_largest": keep_largest}
        names |= {"gradients": gradients, "on_error": on_error}
        numbers["budget"] = budget
        super().__init__(per_module, tracker, metric, factor, ids, names | numbers)
        self.batch_size, self.tokens = batch_size, tokens
        self._saved: dict[str, Any] | None = None
        self._block: AbstractContextManager[None] | None = None
        self._given_up = self._updated = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse(trainer, pl_module)
        self._begin(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._saved is not None:  # of a finished run: no training started
            self._begin(trainer, pl_module)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        own = next(iter(trainer.optimizers), None)
        run, others = RunIdentity.of(pl_module, own), trainer.callbacks
        self._flags.check_run(run, others, log=trainer.is_global_zero)
        self._start(pl_module, own, getattr(trainer.precision_plugin, "scaler", None))
        self._block, self._given_up = None, False
        saved, self._saved = self._saved, None
        if saved is not None:
            self._load(saved)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.gns is not None
        self._updated = False
        accumulated = trainer.accumulate_grad_batches
        if batch_idx % accumulated == 0:
            if self._update is not None:  # an on_train_batch_start ended the last epoch early by -1
                self._give_up()
            self._given_up = False
            pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, trainer.optimizers[0])
        if self._given_up:
            return
        self._begin_update()
        block: AbstractContextManager[None] = nullcontext()
        with self._dropping_errors():
            self._look(batch)
            n = self.samples(batch)
            self._learn(trainer, pl_module, batch, batch_idx, n)
            tokens = None if self.tokens is None else self.tokens(batch)
            told = dict(tokens=tokens, scale=1 / accumulated, ids=self._ids_of(batch))
            block = self.gns.microbatch(n, **told)
        block.__enter__()
        self._block = block

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)
        elif not self._given_up:
            with self._dropping_errors():
                raise ObservationError(
                    "GNSMonitor: one batch had two backward passes. Use an optimizer that calls "
                    "its closure once per step"
                )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.gns is not None
        if self._block is not None:  # training_step returned None
            self._give_up()
        if not self._given_up:
            self._end_update()
            self._updated = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._block is not None:
            self._give_up()
        every = trainer.log_every_n_steps
        if self._updated and every and trainer.global_step % every == 0:
            found = self._found(trainer.global_step, {}, first=trainer.is_global_zero)
            pl_module.log_dict(found, on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._update is not None:
            self._give_up()
        if isinstance(exception, SampleShapeError) and self.batch_size is None:
            exception.args = (
                f"{exception} GNSMonitor read the number of samples off the first tensor of the "
                "batch. If that number is wrong, pass GNSMonitor(batch_size=lambda batch: ...).",
            )

    def state_dict(self) -> dict[str, Any]:
        """All measurements but those of an unfinished update, whose gradients Lightning does not
        save either.
        """
        if self.gns is None:
            return self._saved or {}
        if self._update is not None:
            self._give_up()
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None

    def _give_up(self) -> None:
        """Leave the update under way, and the rest of its batches, unmeasured."""
        assert self.gns is not None
        self.gns.discard()
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)
        self._end_update()
        self._given_up = True

    def _learn(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, n: int) -> None:
        """Learn the table of the module from its first batch of ``n`` samples."""
        followed = Followed.of(pl_module)
        if followed.table is not None:
            return
        parameters = inspect.signature(pl_module.training_step).parameters.values()
        takes_number = len(parameters) > 1 or any(p.kind == p.VAR_POSITIONAL for p in parameters)
        number = (batch_idx,) if takes_number else ()

        def loss(module: Any, batch: Any) -> Any:
            with trainer.precision_plugin.train_step_context():
                return module.training_step(batch, *number)

        tokens = None if self.tokens is None else self.tokens(batch)
        of_each = tokens if isinstance(tokens, Tensor) and tokens.ndim else None
        with replaced(pl_module, log=_drop, log_dict=_drop):
            table = learn(pl_module, batch, loss=loss, tokens=of_each, num_samples=n)
        if of_each is None and tokens is not None:  # a total says nothing of each sample
            table = replace(table, loss="")
        if not table.proofs and all(NO_RESULT.sentence in why for why in table.left_out.values()):
            raise SampleShapeError(
                f"{type(pl_module).__name__}: neither training_step nor a module that it calls "
                f"returns something of each of {n} samples. gnsfast.learn(module, batch, run=...), "
                "with a function that does, makes a table for GNSMonitor(table=...)."
            )
        table.tell(followed)
        is_whole = not table.left_out and table.loss in ("", PROVEN)
        LOG.log(logging.INFO if is_whole else logging.WARNING, "%s", table.summary())

    def _ids_of(self, batch: Any) -> Any:
        """The names of a batch's samples."""
        if self.ids is None or callable(self.ids):
            return None if self.ids is None else self.ids(batch)
        try:
            if isinstance(batch, Tensor):  # its rows are no column
                raise TypeError
            return batch[self.ids]
        except (KeyError, IndexError, TypeError):
            keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise ValueError(
                f"GNSMonitor(ids={self.ids!r}): the batch, a {type(batch).__name__}{keys}, has no "
                "such entry. Let the data set and its collate_fn hand it over, or pass "
                "ids=lambda batch: ..."
            ) from None

    def samples(self, batch: Any) -> int:
        """The number of samples of a batch."""
        if self.batch_size is not None:
            return self.batch_size(batch)
        leaves = pytree.tree_leaves(batch)
        first = next((t for t in leaves if isinstance(t, Tensor) and t.ndim), None)
        if first is None:
            raise ObservationError(
                "GNSMonitor: the batch holds no tensor that shows its number of samples: pass "
                "GNSMonitor(batch_size=lambda batch: ...)"
            )
        return int(first.shape[0])


def _drop(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""


def is_measured(strategy: Any) -> bool:
    """Whether a strategy, of either package, leaves accumulation and gradients to the loop."""
    known = STRATEGIES & {c.__name__ for c in type(strategy).__mro__}
    return bool(known) and not strategy.handles_gradient_accumulation


def _refuse(trainer: Any, pl_module: Any) -> None:
    """Raise for what cannot be measured."""
    reason = None
    if sum(isinstance(c, GNSMonitor) for c in trainer.callbacks) > 1:
        reason = "a second GNSMonitor in one Trainer: remove one of them"
    elif not pl_module.automatic_optimization:
        reason = (
            "manual optimization: make a gns = gnsfast.GradientNoiseScale(model) instead. In "
            "training_step, put gns.update(n) around forward and manual_backward"
        )
    elif any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        reason = (
            "torch.optim.LBFGS, which calls its closure (a forward and a backward pass) several "
            "times per step: use an optimizer that calls it once"
        )
    elif not is_measured(trainer.strategy):
        reason = (
            f"{type(trainer.strategy).__name__}. Use one device, strategy='ddp', or FSDP 2: "
            "strategy=ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1), with "
            "fully_shard in configure_model"
        )
    if reason is not None:
        raise NotImplementedError(f"GNSMonitor does not support {reason}")
