# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeCallback``: a batch size that grows while Lightning's Trainer trains."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from gnsfast.critical_batch import RunIdentity
from gnsfast.critical_batch.control import ChangingBatchSize, Decision
from gnsfast.integrations.batch_sizes import check, check_callbacks, say, set_learning_rates, start
from gnsfast.integrations.lightning import Callback, GNSMonitor, is_measured

CHANGES_ACCUMULATION = {"GradientAccumulationScheduler", "StochasticWeightAveraging"}


class BatchSizeCallback(Callback):
    """Let a ``BatchSizeController`` or a ``ScheduledBatchSize`` change ``accumulate_grad_batches``
    while Lightning trains.

    Lightning takes a step after each batch of an epoch whose number is a multiple of the
    accumulation. So the callback asks the controller only after steps that end at a multiple of the
    accumulation to come, and at the ends of epochs. There no batch is counted twice, left out, or
    divided by the accumulation of another step. As always in Lightning, the last step of an epoch
    may have fewer batches, each divided by the whole accumulation.

    ``global_step`` counts optimizer steps, of which there are fewer as the batch grows. So do
    ``log_every_n_steps`` and a checkpoint's ``every_n_train_steps``. A ``LambdaLR`` with
    ``interval="step"`` keeps its meaning in data: it counts steps of the first batch size, and the
    callback multiplies its learning rate by ``controller.lr_factor``. Without a scheduler, each
    growth multiplies the learning rate itself. Betas and weight decay follow the controller's
    rules.

    Each decision is a line of the logger ``gnsfast``: INFO, or WARNING for a batch size that does
    not fit.

    The controller's state is part of Lightning's checkpoint. Start a resumed run with the
    ``accumulate_grad_batches`` of the first batch size again.

    Args:
        controller: with the data loader's batch size as ``micro_batch``, the number of processes as
            ``data_parallel``, and the product of both and ``accumulate_grad_batches`` as
            ``batch_size``. All other batch sizes are multiples of that.
        gns: the monitor, which must be among the Trainer's callbacks too. Its logs and its tracker
            also get ``controller.metrics()``. A tracker with a method ``record``, such as
            ``JSONLTracker``, also gets the decisions.

    Raises:
        ValueError: when training starts, for settings that are not the Trainer's, and for an
            optimizer that cannot follow the controller's rules.
        NotImplementedError: for manual optimization, DeepSpeed and other strategies that accumulate
            by themselves, data without a length, ``max_steps``, other callbacks that change the
            accumulation, schedules that are no ``LambdaLR``.

    >>> from gnsfast.critical_batch import BatchSizeController
    >>> from gnsfast.integrations.lightning import GNSMonitor
    >>> from gnsfast.integrations.lightning_batch_size import BatchSizeCallback
    >>> controller = BatchSizeController(
    ...     32, factor=8.0, tokens_per_sample=512, total_tokens=10**9, max_batch_size=512,
    ...     micro_batch=8,
    ... )
    >>> gns = GNSMonitor()
    >>> callbacks = [gns, BatchSizeCallback(controller, gns)]  # Trainer(callbacks=callbacks)
    """

    def __init__(self, controller: ChangingBatchSize, gns: GNSMonitor) -> None:
        self.controller, self.gns = controller, gns
        self._saved: dict[str, Any] | None = None
        self._first = 0  # accumulate_grad_batches of the first batch size, while it trains
        self._look = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go before all others: a checkpoint that one of them saves has this step's decision."""
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse(trainer, pl_module)
        self._check(trainer)
        saved, self._saved = self._saved, None
        start(self.controller, saved)
        self.controller.check_optimizer(trainer.optimizers[0])
        self.controller.check_run(RunIdentity.of(pl_module, trainer.optimizers[0]))
        self._first, self._look = trainer.accumulate_grad_batches, True
        self.gns.also = self.controller.metrics
        trainer.accumulate_grad_batches = self.controller.accumulation
        self._set_learning_rates(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._look and batch_idx + 1 < trainer.num_training_batches:  # the last may be short
            own, found = self.controller.settings.micro_batch, self.gns.samples(batch)
            if found != own:
                raise ValueError(
                    f"a batch of the data loader has {found} samples, but the controller has "
                    f"micro_batch={own}: make it with micro_batch={found}"
                )
            self._look = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        controller, taken = self.controller, batch_idx + 1
        ends = taken == trainer.num_training_batches
        if taken % controller.accumulation and not ends:
            return  # no step
        s = controller.settings
        batches = trainer.current_epoch * trainer.num_training_batches + taken
        tokens = batches * s.samples_at_once * s.tokens_per_sample
        if ends or taken % controller.stride(tokens) == 0:
            decision = controller.update(tokens, self.gns.compute)
            if decision is not None:
                self._decided(trainer, decision)
        self._set_learning_rates(trainer, taken)

    def _decided(self, trainer: Any, decision: Decision) -> None:
        scheduled = bool(trainer.lr_scheduler_configs)
        self.controller.apply(decision, trainer.optimizers[0], lr=not scheduled)
        trainer.accumulate_grad_batches = self.controller.accumulation
        if trainer.is_global_zero:
            say(decision, self.gns.tracker)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._first:
            trainer.accumulate_grad_batches = self._first
            self.gns.also, self._first = dict, 0

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The controller's; empty before a training has begun."""
        if self._saved is not None or not (self._first or self.controller.tokens):
            return self._saved or {}
        return self.controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None

    def _set_learning_rates(self, trainer: Any, taken: int | None = None) -> None:
        """Set those of the next step: the schedule's, at a step of the first batch size."""
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if taken is not None and config.interval == "step":
                per_epoch = trainer.num_training_batches
                steps = -(-per_epoch // self._first)
                done = steps if taken == per_epoch else taken // self._first
                scheduler.last_epoch = trainer.current_epoch * steps + done
            set_learning_rates(scheduler, self.controller.lr_factor)

    def _check(self, trainer: Any) -> None:
        """Raise where the controller's settings differ from the Trainer's."""
        s = self.controller.settings
        check_callbacks(self.gns, trainer.callbacks)
        if self.controller.scheduled:
            raise ValueError(
                "BatchSizeCallback multiplies the learning rate by the growth, and "
                "controller.lr_lambda does so too: give LambdaLR a plain function of the step, "
                "counted in steps of the first batch size"
            )
        trainers = {
            "data_parallel": trainer.world_size,
            "batch_size": s.samples_at_once * trainer.accumulate_grad_batches,
        }
        check(self.controller, trainers, trainer.num_training_batches, trainer.max_epochs)


def _refuse(trainer: Any, pl_module: Any) -> None:
    """Raise for what this callback does not support."""
    reason, strategy = None, trainer.strategy
    others = {c.__name__ for each in trainer.callbacks for c in type(each).__mro__}
    configs = trainer.lr_scheduler_configs
    if not pl_module.automatic_optimization:
        reason = "manual optimization: call controller.update and controller.apply yourself"
    elif not is_measured(strategy):
        reason = f"{type(strategy).__name__}, which accumulates by itself: use one device or DDP"
    elif found := sorted(CHANGES_ACCUMULATION & others):
        reason = f"{found[0]}, which sets accumulate_grad_batches too: remove it"
    elif trainer.num_training_batches == float("inf"):
        reason = "data without a length, because it must know where an epoch ends"
    elif trainer.max_steps != -1:
        reason = "max_steps, which counts steps of any size: set max_epochs or limit_train_batches"
    elif wrong := [c for c in configs if type(c.scheduler) is not LambdaLR]:
        reason = f"the schedule {type(wrong[0].scheduler).__name__}: use a LambdaLR"
    elif any(c.frequency != 1 for c in configs):
        reason = "a learning-rate schedule with a frequency other than 1: set frequency=1"
    if reason is not None:
        raise NotImplementedError(f"BatchSizeCallback does not support {reason}")
