# SPDX-License-Identifier: Apache-2.0
"""``GNSCallback``: the noise scale of a run of transformers' Trainer."""

import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnsfast.arguments import integer
from gnsfast.critical_batch import RunIdentity
from gnsfast.errors import ObservationError
from gnsfast.integrations.measuring import Measuring
from gnsfast.integrations.needed import needed
from gnsfast.integrations.replacing import replaced
from gnsfast.integrations.token_losses import (
    LOSSES,
    Rows,
    Rule,
    RuleSearch,
    document_starts,
    not_of_pairs,
)
from gnsfast.integrations.trackers import Tracker
from gnsfast.integrations.transformers_ids import keep_column, names_of
from gnsfast.integrations.trl_head import measured_head
from gnsfast.kept import kept_chance
from gnsfast.noise_scale import Factor, loss_factors
from gnsfast.table import Table

with needed(__name__, "transformers and accelerate", "'transformers[torch]'"):
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

WRAPPED = ("training_step", "compute_loss", "log")
"""Methods of a Trainer that are wrapped while it trains."""

FILE = "gnsfast.pt"
"""The measurements in a checkpoint, beside Trainer's own files."""


class GNSCallback(Measuring, TrainerCallback):
    """Measure the noise scale of ``Trainer(model=model, callbacks=[this])``.

    Equals a hand-written loop with ``gns.update()`` around the passes of a step, and
    ``gns.microbatch(n, tokens=counts, scale=...)`` around each. The result is added to
    Trainer's own logs every ``logging_steps``, under the names of ``trackers.metrics``, and so
    reaches its reporters and ``state.log_history``; ``compute()`` returns it at any time. The
    measurements are saved in the checkpoint, as ``gnsfast.pt``, and a resumed run continues bit for
    bit; any other ``train()`` starts afresh.

    While Trainer trains, the callback stands in for its ``training_step``, ``compute_loss`` and
    ``log``. Trainer has no events around a forward and a backward pass, none that adds to a log
    before its reporters see it, and hands no event the Trainer: so the Trainer that calls
    ``on_train_begin`` is looked up on the stack. The factor that Trainer multiplies the loss by
    (for accumulation, processes, ``GradScaler``) is measured: it is the gradient that arrives at
    the loss.

    ``callback.gns`` is the estimator once training has started. Code that freezes or unfreezes
    parameters during training calls ``callback.gns.reset()`` afterwards.

    Args:
        loss: what the loss is a mean over. ``"causal"``: tokens whose next label is not -100 (or
            ``shift_labels``). ``"tokens"``: labels that are not -100, one or more per sample. Both
            are sums divided by ``num_items_in_batch``, where Trainer counts that. ``"samples"``:
            the samples of a micro-batch. ``"auto"`` compares the loss of the first micro-batch with
            the cross entropy of the logits, label smoothing included, and takes ``"causal"`` or
            ``"tokens"``, whichever agrees. For TRL's trainers of preferences it is ``"samples"``.
            It repeats this until samples have unequal numbers of
            labels, for eight micro-batches at most, and again after every log. The other values
            are not checked.
        rows_per_sample: how many rows of the batch are one sample, such as 2 for pairs. Rows b,
            b + n, ... are sample b of n. None knows the pairs of TRL's ``DPOTrainer`` and
            ``RewardTrainer``, and takes a row for a sample otherwise. A batch with more rows than
            Trainer's batch size allows is then refused. A number is believed.
        per_module: also log the noise scale of every module.
        tracker: gets the same metrics, on the first process. The caller closes it.
        source, window, decay, every: as for ``gnsfast.GradientNoiseScale``.
        budget: the largest share of the time that measuring may take, as for
            ``GradientNoiseScale``. None measures each update.
        gradients: as there. ``"torch"`` leaves training the same to the last bit; ``"fused"`` costs
            less.
        on_error: as there. ``"skip"`` logs an error of gnsfast and goes on training.
        metric: as there. GNSCallback passes Trainer's optimizer for ``"adam"``, and for
            ``"spectral"`` if it is a ``torch.optim.Muon``. All three need
            ``gradient_accumulation_steps`` of 2 or more, or several processes. ``"sign"`` and
            ``"spectral"`` keep running means as large as the parameters, which checkpoints then
            hold.
        keep_largest: how many samples with the largest gradients to keep of each update, for
            ``callback.gns.largest()``. A ``JSONLTracker`` gets those of the updates since the last
            log, and ``gnsfast report`` shows them.
        ids: the column of the training data that names these samples, such as ``"id"``: numbers or
            text. Trainer and its collator would remove the column or make a tensor of it. The
            callback keeps it in the batch, and takes it out before the model gets the batch. If the
            model has an argument of this name, the column stays, as the collator made it. Give the
            callback to ``Trainer(callbacks=[...])`` and not to ``add_callback``, which is too late
            for that.
        factor: CBS / noise scale, as for ``gnsfast.flag``. Each log then says whether the batch
            size fits (``batch/flag``: -1 too small, 0 fair, 1 too large; ``cbs/*``, unless those of
            a ``BatchSizeController`` are logged), and the logger ``gnsfast`` gets the words where
            that changes.
        table: of ``gnsfast.learn(model, batch, ...)``. By default the first batch is learnt from.

    Raises:
        ValueError: at the start of training, for a model without trainable parameters; in a step,
            for a batch without ``ids``, or if ``loss="auto"`` finds another loss (a router's
            balance, class weights) or a ``compute_loss`` that returns no outputs.
        ObservationError: in the first step, where ``position_ids`` show parts of the same samples
            on several processes.
        NotImplementedError: for DataParallel, DeepSpeed, FSDP 1, tensor, context and sequence
            parallelism, a second GNSCallback, a ``metric`` under FSDP 2; in a step, for packed rows
            without ``position_ids``.

    >>> from gnsfast.integrations.transformers import GNSCallback
    >>> GNSCallback(loss="causal", window=128).loss
    'causal'
    """

    STARTS = "trainer.train()"

    def __init__(
        self,
        *,
        loss: str = "auto",
        rows_per_sample: int | None = None,
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
        ids: str | None = None,
        factor: float | Factor | None = None,
        table: Table | None = None,
    ) -> None:
        if loss != "auto" and loss not in LOSSES:
            raise ValueError(f"loss must be 'auto' or one of {', '.join(LOSSES)}, not {loss!r}")
        if rows_per_sample is not None:
            integer("rows_per_sample", rows_per_sample)
        names = {"loss_reduction": "sum", "source": source, "table": table}
        numbers = {"window": window, "decay": decay, "every": every, "keep_largest": keep_largest}
        names |= {"gradients": gradients, "on_error": on_error}
        numbers["budget"] = budget
        super().__init__(per_module, tracker, metric, factor, ids, names | numbers)
        self.loss, self.rows_per_sample = loss, rows_per_sample
        self.first: Callable[[Any, Any], None] | None = None  # of a micro-batch and the items
        self._trainer: Any = None
        self._wrapped: dict[str, Callable[..., Any]] = {}
        self._saver: Any = None
        self._rows = Rows(1)
        self._rule: Rule | None = None
        self._search: RuleSearch | None = None
        self._pass: _Pass | None = None
        self._undo = ExitStack()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ids is not None:
            trainer = calling_frame()["self"]
            # Without the callback nothing takes the column out of the batches.
            keep_column(trainer, self.ids, lambda: self in trainer.callback_handler.callbacks)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        caller = calling_frame()
        trainer = caller["self"]
        self._attach(trainer)
        load_measurements(self._load, state, caller.get("resume_from_checkpoint"))
        state.stateful_callbacks[SavedMeasurements.__name__] = {}  # Trainer's save expects the key
        trainer.add_callback(self._saver)
        self._undo.callback(trainer.remove_callback, self._saver)

    def _attach(self, trainer: Any) -> None:
        """Wrap the Trainer's methods, so that its steps are measured."""
        self._detach()
        _refuse(trainer, self.metric)
        others, first = trainer.callback_handler.callbacks, trainer.is_world_process_zero()
        self._flags.check_run(identity(trainer), others, log=first)
        own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate wraps it
        self._rows = Rows.of(trainer, self.rows_per_sample)
        loss = self._rows.loss if self.loss == "auto" else self.loss
        take = self._rows.a_sample if self._rows.a_sample > 1 else None
        self._start(trainer.model, own, trainer.accelerator.scaler, take=take)
        self._saver = SavedMeasurements(self._state, self._dropping_errors, trainer)
        self._rule = None if loss == "auto" else Rule(loss, items=True)
        self._search = RuleSearch() if loss == "auto" else None
        self._trainer = trainer
        packed = lambda: self._pass is not None and self._pass.starts is not None
        self._undo.enter_context(measured_head(trainer.model, packed))
        self._wrapped = {name: getattr(trainer, name) for name in WRAPPED}
        ours = {name: getattr(self, f"_{name}") for name in WRAPPED}
        self._undo.enter_context(replaced(trainer, **ours))

    @contextmanager
    def watching(self, trainer: Any) -> Iterator[None]:
        """Measure a loop of your own that calls ``trainer.training_step``.

        As in ``trainer.train()``, ``accelerator.sync_gradients`` marks the micro-batch that ends an
        update.
        """
        self._attach(trainer)
        try:
            yield
        finally:
            self._detach()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._detach()

    def _detach(self) -> None:
        """Leave the Trainer as it was before."""
        self._undo.close()
        self._trainer, self._wrapped, self._pass = None, {}, None

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's forward and backward pass; clipping comes after it."""
        assert self.gns is not None
        if self.first is not None:
            self.first(inputs, args[0] if args else kwargs.get("num_items_in_batch"))
            self.first = None
        self._saver.midway = True
        self._begin_update()
        with self._dropping_errors():
            self._pass = self._described(inputs)
        with self._measured_pass(self._pass) as this:
            try:
                loss = self._wrapped["training_step"](model, inputs, *args, **kwargs)
            finally:
                self._pass = None
            with self._dropping_errors():
                if this is not None and (this.losses != 1 or this.known > this.weighed):
                    raise ObservationError(
                        f"GNSCallback: training_step called compute_loss {this.losses} times and "
                        f"{'' if this.weighed else 'never '}called backward on its result. It must "
                        "call each once. For another Trainer, use gnsfast.GradientNoiseScale"
                    )
        if self._trainer.accelerator.sync_gradients:
            self._end_update()
            self._saver.midway = False
        return loss

    def _described(self, inputs: Any) -> "_Pass":
        """What is known of a micro-batch before it runs."""
        self._look(inputs)
        ids = None if self.ids is None else names_of(self._trainer, inputs, self.ids)
        starts, device = document_starts(inputs), self._trainer.args.device
        n = self._rows.samples(inputs, starts)
        if ids is not None and starts is not None and len(ids) != n:
            raise ValueError(
                f"GNSCallback(ids={self.ids!r}): the batch has {n} packed documents, but the "
                f"column names {len(ids)} rows. Leave ids out: a sample is then named by its "
                "update, process, micro-batch and place among the documents"
            )
        unknown = torch.full((n + 1,), torch.nan, dtype=torch.float64, device=device)
        return _Pass(n, unknown[:n], unknown[n], starts, ids)

    @contextmanager
    def _measured_pass(self, this: "_Pass | None") -> Iterator["_Pass | None"]:
        """The block of a micro-batch. It is plain torch where nothing is known of it."""
        assert self.gns is not None
        if this is None:
            yield None
            return
        samples = self._rule is not None and self._rule.loss == "samples"
        told: Any = dict(tokens=None if samples else this.counts_B, scale=this.scale)
        with self.gns.microbatch(this.num_samples, cu_seqlens=this.starts, ids=this.ids, **told):
            yield this

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        original, this, trainer = self._wrapped["compute_loss"], self._pass, self._trainer
        if this is None:  # evaluation
            return original(model, inputs, *args, **kwargs)
        this.losses += 1
        kept = dict(inputs)  # Trainer removes the labels if it computes the loss itself
        given = dict(zip(("return_outputs", "num_items_in_batch"), args)) | kwargs
        searches = self._search is not None and self._search.due
        if searches and takes_outputs(original):
            result = original(model, inputs, **{**given, "return_outputs": True})
        else:
            result = original(model, inputs, *args, **kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2
        loss = result[0] if isinstance(result, tuple) else result
        items = given.get("num_items_in_batch")
        with self._dropping_errors():
            if searches:
                if not is_pair:
                    raise ValueError(NO_OUTPUTS.format(type(trainer).__name__))
                self._find_rule(loss, result[1], kept, items)
            self._weigh(this, loss, kept, items)
            this.known = True
        return loss if searches and is_pair and not given.get("return_outputs") else result

    def _find_rule(self, loss: Tensor, outputs: Any, inputs: Any, items: Any) -> None:
        """Find out what a loss is a mean over."""
        assert self._search is not None
        smoother = self._trainer.label_smoother
        self._rule = self._search.compare(
            loss.detach() / self._copies(items),
            outputs,
            inputs,
            items,
            smoothing=0.0 if smoother is None else smoother.epsilon,
            first="causal" if getattr(self._trainer, "_loss_shifts_labels", True) else "tokens",
        )

    def _weigh(self, this: "_Pass", loss: Tensor, inputs: Any, num_items_in_batch: Any) -> None:
        """Note the tokens of the samples, and in backward the factor of the loss."""
        assert self._rule is not None
        each: Tensor | float = 1.0 / this.num_samples
        if self._rule.loss != "samples":
            counts = self._rule.counts(inputs, this.starts)
            this.counts_B.copy_(counts.unflatten(0, (-1, this.num_samples)).sum(0))
            items = num_items_in_batch if self._rule.items else None
            total = this.counts_B.sum() if items is None else items
            each = 1.0 / torch.as_tensor(total, dtype=torch.float64, device=this.scale.device)
        scaler, copies = self._trainer.accelerator.scaler, self._copies(num_items_in_batch)

        def weigh(grad: Tensor) -> None:
            factor = grad.detach().double().reshape(())
            if (s := loss_factors.loss_scale(scaler)) is not None:
                factor = factor / s  # the estimator divides by it
            this.scale.copy_(factor.to(this.scale.device) * (each * copies))
            this.weighed = True

        loss.register_hook(weigh)

    def _copies(self, num_items_in_batch: Any) -> int:
        """Trainer's factor for a loss that is divided by the items of all processes."""
        if num_items_in_batch is None or not self._trainer.args.average_tokens_across_devices:
            return 1
        return int(self._trainer.accelerator.num_processes)

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        if "loss" in logs:  # Trainer's log of training steps, not that of an evaluation
            seen = None
            if trainer.args.include_num_input_tokens_seen != "no":
                seen = int(trainer.state.num_input_tokens_seen)
            step, first = int(trainer.state.global_step), trainer.is_world_process_zero()
            found = self._found(step, {"loss": logs["loss"]}, first=first, tokens=seen)
            logs.update(found)
            if self._search is not None:
                self._search.again()
        return self._wrapped["log"](logs, *args, **kwargs)


@dataclass
class _Pass:
    """A micro-batch under way; its tensors are filled in while it runs."""

    num_samples: int
    counts_B: Tensor
    scale: Tensor
    starts: Tensor | None
    ids: Any = None
    losses: int = 0
    known: bool = False
    weighed: bool = False


def calling_frame() -> dict[str, Any]:
    """The variables of the Trainer's method that is calling a callback."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals
        frame = frame.f_back
    raise RuntimeError("GNSCallback: its methods were not called by a transformers.Trainer")


def _refuse(trainer: Any, metric: str | Sequence[str] | None) -> None:
    """Raise for what changes the scale of gradients or the shape of parameters."""
    reason, asked = None, {metric} if isinstance(metric, str) else {*(metric or ())}
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type
    parallel = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(parallel, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp")}
    if hasattr(trainer, "get_tp_size"):  # transformers' own, which Accelerate knows nothing of
        sizes["tp"] = max(sizes["tp"], trainer.get_tp_size())
    if sum(isinstance(c, GNSCallback) for c in trainer.callback_handler.callbacks) > 1:
        reason = "a second GNSCallback in one Trainer: remove one of them"
    elif hasattr(trainer, "num_generations"):
        reason = (
            f"{type(trainer).__name__}, whose answers to a prompt share their advantages, and "
            "which makes its batches inside of training_step: use gnsfast.GradientNoiseScale with "
            "clusters=, as docs/recipes/grpo.md does"
        )
    elif why := not_of_pairs(trainer):
        reason = why
    elif trainer.args.n_gpu > 1:
        reason = "torch.nn.DataParallel (several GPUs in one process): start it with torchrun"
    elif max(sizes["cp"], sizes["sp"]) > 1:
        reason = (
            f"samples split over processes ({sizes}), since squared norms of a sample's parts do "
            "not add up to the sample's: measure from a checkpoint, in a run with "
            "ParallelismConfig(cp_size=1, sp_size=1) and FSDP 2 where memory is short"
        )
    elif sizes["tp"] > 1:
        reason = f"a layer spread over processes ({sizes}): use DDP or FSDP 2"
    elif kind == DistributedType.FSDP:
        if getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
            reason = (
                "FSDP 1, which flattens parameters: use FSDP 2, by "
                "TrainingArguments(fsdp=True, fsdp_config={'version': 2, ...})"
            )
        elif asked:
            reason = (
                "noise scales of micro-batches under FSDP, where no process sees a whole gradient "
                "of its own: use DDP, or leave metric out"
            )
    elif kind != DistributedType.NO and not kind.name.startswith("MULTI_"):
        reason = f"{kind.name}, which does not leave gradients in .grad: use DDP or FSDP 2"
    if reason is not None:
        raise NotImplementedError(f"GNSCallback does not support {reason}")


def takes_outputs(compute_loss: Callable[..., Any]) -> bool:
    """Whether a ``compute_loss`` may return the model's outputs too."""
    names = inspect.signature(compute_loss).parameters
    return "return_outputs" in names or any(p.kind == p.VAR_KEYWORD for p in names.values())


NO_OUTPUTS = (
    "GNSCallback: compute_loss of {} does not return (loss, outputs) for return_outputs=True, so "
    "loss='auto' cannot tell what its loss is a mean over. Return both, or pass "
    "GNSCallback(loss='samples') for a mean over samples, and loss='tokens' or loss='causal' for a "
    "sum over labels divided by num_items_in_batch"
)


class SavedMeasurements(TrainerCallback, ExportableState):
    """Saves the measurements as ``FILE``, and in ``trainer_state.json`` that there is one.

    It is a callback of its own, because Trainer's ``restore_callback_states_from_checkpoint``
    would make a new GNSCallback, without its tracker. ``on_save`` is called on every process, as a
    state of sharded parameters needs it.
    """

    def __init__(
        self,
        measured: Callable[[], dict[str, Any]],
        dropping_errors: Callable[[], AbstractContextManager[None]],
        trainer: Any,
    ) -> None:
        self._measured, self._dropping_errors, self._trainer = measured, dropping_errors, trainer
        self.midway = False  # also what a train() that raised has left

    def state(self) -> dict[str, Any]:
        return {} if self.midway else {"args": {}, "attributes": {"file": FILE}}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._dropping_errors():
            self._save(args, state)

    def _save(self, args: Any, state: Any) -> None:
        if self.midway:
            return
        found = self._measured()
        if not args.should_save:
            return
        run = Path(self._trainer._get_output_dir(getattr(self._trainer, "_trial", None)))
        path = run / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE
        half = path.with_suffix(".half")
        torch.save(found, half)
        os.replace(half, path)


def load_measurements(
    load: Callable[[dict[str, Any]], None], state: Any, folder: str | None
) -> None:
    """Continue the measurements of the checkpoint that a run resumes from, if it holds any. If
    their file is lost, a warning says that they begin anew.
    """
    saved = state.stateful_callbacks.get(SavedMeasurements.__name__)
    if not state.global_step or not saved:
        return
    path = Path(folder or "") / FILE
    if not path.is_file():
        warnings.warn(
            f"GNSCallback: the checkpoint lacks {path}, which holds its measurements, so the "
            "window begins anew. Either the run ended while the checkpoint was saved, or the file "
            "was not copied",
            stacklevel=2,
        )
        return
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} cannot be read ({e}): remove it to begin the window anew") from e
    load(found)


def identity(trainer: Any) -> RunIdentity:
    """Of a Trainer's run; the data is known where it is a dataset of ``datasets`` with a name."""
    info = getattr(trainer.train_dataset, "info", None)
    parts = [getattr(info, name, None) for name in ("dataset_name", "config_name")]
    data = "/".join(part for part in parts if part) or None
    return RunIdentity.of(trainer.model, trainer.optimizer, data=data)


def refuse_undivided(who: str, trainer: Any, inputs: Any, items: Any) -> None:
    """Raise for a loss that should be divided by the items of the whole batch, and is not.

    Trainer adds up the losses of micro-batches. Without the division, loss and gradient grow with
    the accumulation, and batch sizes cannot be compared. A divided loss halves with twice as many
    items.
    """
    scaled_by_trainer = getattr(trainer, "loss_is_scaled_for_ga", None)
    scaled = trainer.model_accepts_loss_kwargs and items is not None
    if scaled_by_trainer is not None or not (scaled or trainer.compute_loss_func is not None):
        return
    divided = False
    if items is not None:
        model = trainer.model_wrapped
        model.eval()  # training_step sets it back
        with kept_chance(model), torch.no_grad(), trainer.compute_loss_context_manager():
            once, twice = (
                float(
                    trainer.compute_loss(
                        model, trainer._prepare_inputs(dict(inputs)), num_items_in_batch=k * items
                    )
                )
                for k in (1, 2)
            )
        divided = not abs(once - 2 * twice) > 0.02 * abs(once)  # a NaN tells nothing
    if not divided:
        raise ValueError(
            f"{who}: {type(trainer.model).__name__} does not divide its loss by "
            "num_items_in_batch. Trainer adds up the losses of micro-batches, so the loss grows "
            "with the batch. Set trainer.model_accepts_loss_kwargs = False before training, so "
            "that Trainer divides by the number of micro-batches, or divide your own loss by "
            "num_items_in_batch"
        )
