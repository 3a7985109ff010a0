# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeCallback``: a batch size that grows while transformers' Trainer trains."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from gnsfast.critical_batch.control import ChangingBatchSize, Decision
from gnsfast.integrations.batch_sizes import check, check_callbacks, say, set_learning_rates, start
from gnsfast.integrations.needed import needed
from gnsfast.integrations.transformers import (
    GNSCallback,
    calling_frame,
    identity,
    refuse_undivided,
)

with needed(__name__, "transformers and accelerate", "'transformers[torch]'"):
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    from transformers import DefaultFlowCallback, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length


class BatchSizeCallback(TrainerCallback):
    """Let a ``BatchSizeController`` or a ``ScheduledBatchSize`` change
    ``gradient_accumulation_steps`` while Trainer trains.

    Trainer finds its place in an epoch by multiples of the accumulation. So the callback asks the
    controller only after steps that end at a multiple of the accumulation to come, and at the ends
    of epochs. Each epoch uses every sample once, and each step's loss is divided by its own
    ``num_items_in_batch``.

    ``state.global_step`` still counts steps of the first batch size, so a grown step counts as
    several. ``max_steps``, ``num_train_epochs``, ``logging_steps``, ``eval_steps``, ``save_steps``
    and the learning-rate schedule thus keep their meaning in tokens, a resumed run finds its place
    in the data, and the logged loss is the mean over the data between two logs. A log, or the end
    at ``max_steps``, that is due within a grown step happens at the end of that step.
    The learning rate is the schedule's times ``controller.lr_factor``. Betas and weight decay
    follow the controller's rules, in each parameter group from its own values. The optimizer's
    state holds them.

    Each decision is an entry of Trainer's log, ``batch/decision``, and a line of the logger
    ``gnsfast``: INFO, or WARNING for a batch size that does not fit.

    The controller's state is saved in the checkpoint's ``trainer_state.json``. Start a resumed run
    with the ``gradient_accumulation_steps`` of the first batch size again.

    Args:
        controller: with ``per_device_train_batch_size`` as ``micro_batch``, the number of processes
            as ``data_parallel``, and the product of both and ``gradient_accumulation_steps`` as
            ``batch_size``. All other batch sizes are multiples of that.
        gns: the callback that measures, which must be among the Trainer's callbacks too. Its logs
            and its tracker also get ``controller.metrics()``. A tracker with a method ``record``,
            such as ``JSONLTracker``, also gets the decisions.

    Raises:
        ValueError: at the start of training, for settings that are not the Trainer's and for an
            optimizer that cannot follow the controller's rules; in its first step, for a loss that
            grows with the accumulation, as of a model that takes ``num_items_in_batch`` and does
            not divide by it.
        NotImplementedError: for DeepSpeed and other engines that accumulate by themselves, data
            without a length, ``auto_find_batch_size``, ``ignore_data_skip``, batches of unequal
            sizes, schedules that are no ``LambdaLR`` (transformers' are).

    >>> from gnsfast.critical_batch import BatchSizeController
    >>> from gnsfast.integrations.transformers import GNSCallback
    >>> from gnsfast.integrations.transformers_batch_size import BatchSizeCallback
    >>> controller = BatchSizeController(
    ...     32, factor=8.0, tokens_per_sample=512, total_tokens=10**9, max_batch_size=512,
    ...     micro_batch=8,
    ... )
    >>> gns = GNSCallback()
    >>> callbacks = [gns, BatchSizeCallback(controller, gns)]  # Trainer(callbacks=callbacks)
    """

    def __init__(self, controller: ChangingBatchSize, gns: GNSCallback) -> None:
        self.controller, self.gns = controller, gns
        self._trainer: Any = None
        self._accumulation = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, loader = calling_frame()["self"], kwargs["train_dataloader"]
        if self._trainer is not None:
            raise ValueError(
                "BatchSizeCallback: the last train() raised an error and left "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Make the Trainer "
                "and its callbacks anew with gradient_accumulation_steps="
                f"{self._accumulation}, and resume from a checkpoint"
            )
        _refuse(trainer, loader)
        self._accumulation = args.gradient_accumulation_steps
        self._per_epoch = len(loader)
        self._steps_of_an_epoch = -(-self._per_epoch // self._accumulation)
        self._dropped = bool(args.dataloader_drop_last)
        self._check(trainer, state.max_steps / self._steps_of_an_epoch)
        self._start(state)
        self.controller.check_optimizer(trainer.optimizer)
        self.controller.check_run(identity(trainer))
        self._lag = state.global_step - trainer.lr_scheduler.last_epoch
        self._trainer, self._saver = trainer, _ControllerState(self)
        state.stateful_callbacks[_ControllerState.__name__] = {}  # Trainer's save expects the key
        # First, as DefaultFlowCallback reads the count of steps; in a new list, as Trainer is
        # iterating over the old one.
        handler = trainer.callback_handler
        others = [c for c in handler.callbacks if c is not self]
        handler.callbacks = [self, *others, self._saver]
        self.gns.also = self.controller.metrics
        self.gns.first = partial(refuse_undivided, "BatchSizeCallback", trainer)
        args.gradient_accumulation_steps = self.controller.accumulation
        self._set_learning_rates(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is not None:
            args.gradient_accumulation_steps = self._accumulation
            self._trainer.remove_callback(self._saver)
            self.gns.also, self.gns.first, self._trainer = dict, None, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self._trainer._tr_loss.clone()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        trainer, controller = self._trainer, self.controller
        before, micro_batches = state.global_step - 1, round(state.epoch * self._per_epoch)
        epoch, taken = divmod(micro_batches, self._per_epoch)
        now = epoch * self._steps_of_an_epoch + taken // self._accumulation
        for step in range(before + 1, now):  # what is due in between is due now
            state.global_step = step
            control = _FLOW.on_step_end(args, state, control)
        state.global_step = now
        trainer._tr_loss += (now - before - 1) * (trainer._tr_loss - self._before)
        if trainer.accelerator.optimizer_step_was_skipped:
            self._lag += now - before
        tokens = self._samples(epoch, taken) * controller.settings.tokens_per_sample
        if taken % controller.stride(tokens) == 0:
            decision = controller.update(tokens, self.gns.compute)
            if decision is not None:
                self._decided(decision)
        self._set_learning_rates(now)
        return control

    def _decided(self, decision: Decision) -> None:
        trainer = self._trainer
        self.controller.apply(decision, trainer.optimizer, lr=False)
        trainer.args.gradient_accumulation_steps = self.controller.accumulation
        if trainer.is_world_process_zero():
            say(decision, self.gns.tracker)
        due = trainer.control.should_log  # an extra log would take its place
        trainer.log({"batch/size": float(decision.new), "batch/decision": decision.reason})
        trainer.control.should_log = due

    def _samples(self, epoch: int, taken: int) -> int:
        """Samples before a position; the last micro-batch of an epoch may be short."""
        at_once = self.controller.settings.samples_at_once
        whole = self._per_epoch * at_once
        if not self._dropped:
            whole = min(whole, len(self._trainer.train_dataset))
        return epoch * whole + taken * at_once

    def _set_learning_rates(self, step: int) -> None:
        """Set those of the next step: the schedule's, at a step of the first batch size."""
        scheduler = self._trainer.lr_scheduler
        scheduler.last_epoch = step - self._lag
        set_learning_rates(scheduler, self.controller.lr_factor)

    def _start(self, state: Any) -> None:
        """Restore the controller from a checkpoint, or check that it is new."""
        saved = state.stateful_callbacks.get(_ControllerState.__name__)
        if not state.global_step or not saved:
            return start(self.controller, None)
        first = saved["attributes"]["accumulation"]
        if first != self._accumulation:
            raise ValueError(
                f"the run began with gradient_accumulation_steps={first} and counts its steps by "
                f"that, but the Trainer has {self._accumulation}: resume with {first}. The "
                "controller restores the batch size that the run had come to"
            )
        start(self.controller, saved["attributes"]["controller"])

    def _check(self, trainer: Any, epochs: float) -> None:
        """Raise where the controller's settings differ from the Trainer's."""
        args = trainer.args
        trainers = {
            "micro_batch": args.per_device_train_batch_size,
            "data_parallel": trainer.accelerator.num_processes,
            "batch_size": trainer.get_total_train_batch_size(args),
        }
        check(self.controller, trainers, self._per_epoch, epochs)
        check_callbacks(self.gns, trainer.callback_handler.callbacks)


class _ControllerState(TrainerCallback, ExportableState):
    """Saves the controller in ``trainer_state.json``.

    It is a callback of its own, because Trainer's ``restore_callback_states_from_checkpoint``
    would make a new BatchSizeCallback, without its controller.
    """

    def __init__(self, callback: BatchSizeCallback) -> None:
        self.callback = callback

    def state(self) -> dict[str, Any]:
        controller, first = self.callback.controller.state_dict(), self.callback._accumulation
        return {"args": {}, "attributes": {"controller": controller, "accumulation": first}}


_FLOW = DefaultFlowCallback()


def _refuse(trainer: Any, loader: Any) -> None:
    """Raise for what this callback does not support."""
    reason, args = None, trainer.args
    kind = trainer.accelerator.distributed_type
    batches = type(getattr(loader, "batch_sampler", None)).__name__
    if kind != DistributedType.NO and not kind.name.startswith("MULTI_"):
        reason = f"{kind.name}, which accumulates by itself: use one device or DDP"
    elif args.n_gpu > 1:
        reason = "torch.nn.DataParallel (several GPUs in one process): start with torchrun"
    elif not has_length(loader) or not has_length(trainer.train_dataset):
        reason = "data without a length, because it must know where an epoch ends"
    elif batches not in {"BatchSampler", "BatchSamplerShard", "SkipBatchSampler"}:
        reason = f"a {batches} in the data loader, because its batches may differ in size"
    elif args.auto_find_batch_size:
        reason = "auto_find_batch_size: pass the per_device_train_batch_size that it found"
    elif args.ignore_data_skip:
        reason = "ignore_data_skip, because the count of steps must give the place in the data"
    elif type(trainer.lr_scheduler) is not LambdaLR:
        reason = (
            f"the schedule {type(trainer.lr_scheduler).__name__}: use one of transformers' "
            "(lr_scheduler_type) or a LambdaLR"
        )
    elif not isinstance(getattr(trainer, "_tr_loss", None), Tensor):
        reason = "this version of transformers, whose Trainer adds up its loss in another place"
    if reason is not None:
        raise NotImplementedError(f"BatchSizeCallback does not support {reason}")
