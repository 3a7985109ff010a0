# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeCallback``: a batch size that grows while transformers' Trainer trains."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from gnsfast.critical_batch.control import BatchSizeController, Decision
from gnsfast.critical_batch.rules import set_lr
from gnsfast.integrations.transformers import GNSCallback, _calling_trainer
from gnsfast.integrations.transformers_start import refuse_undivided

try:
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    from transformers import DefaultFlowCallback, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as e:
    raise ImportError(
        "gnsfast.integrations.transformers_batch_size needs transformers and accelerate: "
        "pip install 'transformers[torch]'"
    ) from e


class BatchSizeCallback(TrainerCallback):
    """Let a ``BatchSizeController`` change ``gradient_accumulation_steps`` while Trainer trains.

    Trainer finds its place in an epoch by multiples of the accumulation. So the controller is asked
    only after steps that end at a multiple of the grown accumulation, and at the ends of epochs.
    Every sample is used once an epoch. Each step's loss is divided by its own
    ``num_items_in_batch``.

    ``state.global_step`` still counts steps of the first batch size, so a grown step counts as
    several. ``max_steps``, ``num_train_epochs``, ``logging_steps``, ``eval_steps``, ``save_steps``
    and the learning-rate schedule thus keep their meaning in tokens, a resumed run finds its place
    in the data, and the logged loss is the mean over the data between two logs. What falls due
    within a grown step, such as a log or the end at ``max_steps``, happens at its end.
    The learning rate is the schedule's times ``controller.lr_factor``. Betas and weight decay move
    by the controller's rules, each parameter group's from its own values; the optimizer's state
    holds them.

    The controller's state is saved in the checkpoint's ``trainer_state.json``. Start a resumed run
    with the ``gradient_accumulation_steps`` of the first batch size again.

    Args:
        controller: its ``micro_batch`` is ``per_device_train_batch_size``, its ``batch_size`` that
            of the Trainer's arguments, and ``data_parallel`` its processes.
        gns: among the Trainer's callbacks too. Its logs and its tracker also get
            ``controller.metrics()``; a tracker with a ``record`` method, such as ``JSONLTracker``,
            the decisions.

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

    def __init__(self, controller: BatchSizeController, gns: GNSCallback) -> None:
        self.controller, self.gns = controller, gns
        self._trainer: Any = None
        self._accumulation = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, loader = _calling_trainer(), kwargs["train_dataloader"]
        if self._trainer is not None:
            raise ValueError(
                "BatchSizeCallback: the last train() raised an error and left "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}: make the Trainer "
                f"and its callbacks again, with {self._accumulation}, and resume from a checkpoint"
            )
        _refuse(trainer, loader)
        self._accumulation = args.gradient_accumulation_steps
        self._check(trainer, len(loader))
        self._per_epoch = len(loader)
        self._steps_of_an_epoch = -(-self._per_epoch // self._accumulation)
        self._dropped = bool(args.dataloader_drop_last)
        epochs, s = state.max_steps / self._steps_of_an_epoch, self.controller.settings
        planned = round(epochs * self._per_epoch * s.samples_at_once * s.tokens_per_sample)
        if not planned / 2 <= s.total_tokens <= 2 * planned:
            raise ValueError(
                f"the controller's total_tokens={s.total_tokens:,} are not those of this training: "
                f"{epochs:g} epochs of {self._per_epoch * s.samples_at_once:,} samples of "
                f"{s.tokens_per_sample:,} tokens are {planned:,}"
            )
        self._start(state)
        self.controller.check_optimizer(trainer.optimizer)
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
        growth = controller.settings.growth
        if taken % (growth * controller.accumulation) == 0:
            tokens = self._samples(epoch, taken) * controller.settings.tokens_per_sample
            decision = controller.update(tokens, self.gns.compute)
            if decision is not None:
                self._decided(decision)
        self._set_learning_rates(now)
        return control

    def _decided(self, decision: Decision) -> None:
        trainer = self._trainer
        self.controller.apply(decision, trainer.optimizer, lr=False)
        trainer.args.gradient_accumulation_steps = self.controller.accumulation
        record = getattr(self.gns.tracker, "record", None)
        if record is not None and trainer.is_world_process_zero():
            record(decision.record())

    def _samples(self, epoch: int, taken: int) -> int:
        """Samples before a position; the last micro-batch of an epoch may be short."""
        at_once = self.controller.settings.samples_at_once
        whole = self._per_epoch * at_once
        if not self._dropped:
            whole = min(whole, len(self._trainer.train_dataset))
        return epoch * whole + taken * at_once

    def _set_learning_rates(self, step: int) -> None:
        """Set those of the next step: the schedule's, at a step of the first batch size."""
        scheduler, factor = self._trainer.lr_scheduler, self.controller.lr_factor
        scheduler.last_epoch = step - self._lag
        for group, scale in zip(self._trainer.optimizer.param_groups, scheduler.lr_lambdas):
            set_lr(group, group["initial_lr"] * scale(scheduler.last_epoch) * factor)
        scheduler._last_lr = [group["lr"] for group in self._trainer.optimizer.param_groups]

    def _start(self, state: Any) -> None:
        """Restore the controller from a checkpoint, or check that it is new."""
        saved = state.stateful_callbacks.get(_ControllerState.__name__)
        if state.global_step > 0 and saved:
            first = saved["attributes"]["accumulation"]
            if first != self._accumulation:
                raise ValueError(
                    f"the run began with gradient_accumulation_steps={first}, which its steps are "
                    f"counted in, and not {self._accumulation}: resume with that; the controller "
                    "knows what the batch size has grown to"
                )
            self.controller.load_state_dict(saved["attributes"]["controller"])
        elif self.controller.tokens:
            raise ValueError(
                f"the controller is at {self.controller.tokens:,} tokens of another run: make a "
                "new one, or resume from a checkpoint of this one"
            )

    def _check(self, trainer: Any, per_epoch: int) -> None:
        """Raise where the controller's settings differ from the Trainer's."""
        s, args = self.controller.settings, trainer.args
        settings = {
            "micro_batch": (s.micro_batch, args.per_device_train_batch_size),
            "data_parallel": (s.data_parallel, trainer.accelerator.num_processes),
            "batch_size": (s.batch_size, trainer.get_total_train_batch_size(args)),
        }
        for name, (own, trainers) in settings.items():
            if own != trainers:
                raise ValueError(f"the controller's {name} is {own}, and the Trainer's {trainers}")
        if s.max_batch_size // s.samples_at_once > per_epoch:
            raise ValueError(
                f"max_batch_size={s.max_batch_size} is more than an epoch's "
                f"{per_epoch * s.samples_at_once} samples: use at most that"
            )
        if self.gns not in trainer.callback_handler.callbacks:
            raise ValueError("the GNSCallback that measures must be among the Trainer's callbacks")


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
        reason = f"{kind.name}, whose accumulation is not Trainer's to change"
    elif args.n_gpu > 1:
        reason = "torch.nn.DataParallel (several GPUs in one process): start it with torchrun"
    elif not has_length(loader) or not has_length(trainer.train_dataset):
        reason = "data without a length: the end of an epoch is not known in advance"
    elif batches not in {"BatchSampler", "BatchSamplerShard", "SkipBatchSampler"}:
        reason = f"a {batches} in the data loader, whose batches may be of unequal sizes"
    elif args.auto_find_batch_size:
        reason = "auto_find_batch_size: pass the per_device_train_batch_size that it found"
    elif args.ignore_data_skip:
        reason = "ignore_data_skip: the count of steps would not be the place in the data"
    elif type(trainer.lr_scheduler) is not LambdaLR:
        reason = (
            f"the schedule {type(trainer.lr_scheduler).__name__}: use one of transformers' "
            "(lr_scheduler_type) or a LambdaLR"
        )
    elif not isinstance(getattr(trainer, "_tr_loss", None), Tensor):
        reason = "this version of transformers, whose Trainer adds up its loss elsewhere"
    if reason is not None:
        raise NotImplementedError(f"BatchSizeCallback does not support {reason}")
