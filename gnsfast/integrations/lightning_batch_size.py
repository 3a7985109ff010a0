# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeCallback``: a batch size that grows while Lightning's Trainer trains."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from gnsfast.critical_batch.control import BatchSizeController, Decision
from gnsfast.critical_batch.rules import set_lr
from gnsfast.integrations.lightning import STRATEGIES, Callback, GNSMonitor

CHANGES_ACCUMULATION = {"GradientAccumulationScheduler", "StochasticWeightAveraging"}


class BatchSizeCallback(Callback):
    """Let a ``BatchSizeController`` change ``accumulate_grad_batches`` while Lightning trains.

    Lightning steps where the number of an epoch's batches is a multiple of the accumulation. So the
    controller is asked only after steps that end at a multiple of the grown accumulation, and at
    the ends of epochs: there no batch is counted twice, left out, or divided by the accumulation
    of another step. As ever in Lightning, an epoch's last step may be of fewer batches, each
    divided by the whole accumulation.

    ``global_step`` counts optimizer steps, which become fewer, and with it ``log_every_n_steps``
    and a checkpoint's ``every_n_train_steps``. A ``LambdaLR`` with ``interval="step"`` keeps its
    meaning in data: its step is that of the first batch size, and its learning rate is multiplied
    by ``controller.lr_factor``. Without a scheduler the growth itself multiplies the learning rate.
    Betas and weight decay move by the controller's rules.

    The controller's state is part of Lightning's checkpoint. Start a resumed run with the
    ``accumulate_grad_batches`` of the first batch size again.

    Args:
        controller: its ``micro_batch`` is the data loader's batch size, its ``batch_size`` that
            times ``accumulate_grad_batches`` and the processes, its ``data_parallel`` their number.
        gns: among the Trainer's callbacks too. Its logs and its tracker also get
            ``controller.metrics()``; a tracker with a ``record`` method, such as ``JSONLTracker``,
            the decisions.

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

    def __init__(self, controller: BatchSizeController, gns: GNSMonitor) -> None:
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
        if saved is not None:
            self.controller.load_state_dict(saved)
        elif self.controller.tokens:
            raise ValueError(
                f"the controller is at {self.controller.tokens:,} tokens of another run: make a "
                "new one, or resume from a checkpoint of this one"
            )
        self.controller.check_optimizer(trainer.optimizers[0])
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
                raise ValueError(f"the controller's micro_batch is {own}, and a batch has {found}")
            self._look = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        controller, taken = self.controller, batch_idx + 1
        ends = taken == trainer.num_training_batches
        if taken % controller.accumulation and not ends:
            return  # no step
        s = controller.settings
        if ends or taken % (s.growth * controller.accumulation) == 0:
            batches = trainer.current_epoch * trainer.num_training_batches + taken
            tokens = batches * s.samples_at_once * s.tokens_per_sample
            decision = controller.update(tokens, self.gns.compute)
            if decision is not None:
                self._decided(trainer, decision)
        self._set_learning_rates(trainer, taken)

    def _decided(self, trainer: Any, decision: Decision) -> None:
        scheduled = bool(trainer.lr_scheduler_configs)
        self.controller.apply(decision, trainer.optimizers[0], lr=not scheduled)
        trainer.accumulate_grad_batches = self.controller.accumulation
        record = getattr(self.gns.tracker, "record", None)
        if record is not None and trainer.is_global_zero:
            record(decision.record())

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
            groups = scheduler.optimizer.param_groups
            for group, scale in zip(groups, scheduler.lr_lambdas):
                rate = group["initial_lr"] * scale(scheduler.last_epoch)
                set_lr(group, rate * self.controller.lr_factor)
            scheduler._last_lr = [group["lr"] for group in groups]

    def _check(self, trainer: Any) -> None:
        """Raise where the controller's settings differ from the Trainer's."""
        s, per_epoch = self.controller.settings, trainer.num_training_batches
        if self.gns not in trainer.callbacks:
            raise ValueError("the GNSMonitor that measures must be among the Trainer's callbacks")
        if self.controller.scheduled:
            raise ValueError(
                "controller.lr_lambda has the growth's factor already: give LambdaLR a function of "
                "the step, which is that of the first batch size"
            )
        settings = {
            "data_parallel": (s.data_parallel, trainer.world_size),
            "batch_size": (s.batch_size, s.samples_at_once * trainer.accumulate_grad_batches),
        }
        for name, (own, trainers) in settings.items():
            if own != trainers:
                raise ValueError(f"the controller's {name} is {own}, and the Trainer's {trainers}")
        if s.max_batch_size // s.samples_at_once > per_epoch:
            raise ValueError(
                f"max_batch_size={s.max_batch_size} is more than an epoch's "
                f"{per_epoch * s.samples_at_once} samples: use at most that"
            )
        planned = trainer.max_epochs * per_epoch * s.samples_at_once * s.tokens_per_sample
        if trainer.max_epochs > 0 and not planned / 2 <= s.total_tokens <= 2 * planned:
            raise ValueError(
                f"the controller's total_tokens={s.total_tokens:,} are not those of this training: "
                f"{trainer.max_epochs} epochs of {per_epoch * s.samples_at_once:,} samples of "
                f"{s.tokens_per_sample:,} tokens are {planned:,}"
            )


def _refuse(trainer: Any, pl_module: Any) -> None:
    """Raise for what this callback does not support."""
    reason, strategy = None, trainer.strategy
    known = STRATEGIES & {c.__name__ for c in type(strategy).__mro__}  # of either package
    others = {c.__name__ for each in trainer.callbacks for c in type(each).__mro__}
    configs = trainer.lr_scheduler_configs
    if not pl_module.automatic_optimization:
        reason = "manual optimization: there your own loop calls controller.update and apply"
    elif not known or strategy.handles_gradient_accumulation:
        reason = f"{type(strategy).__name__}, whose accumulation is not Lightning's to change"
    elif found := sorted(CHANGES_ACCUMULATION & others):
        reason = f"{found[0]}, which sets accumulate_grad_batches too"
    elif trainer.num_training_batches == float("inf"):
        reason = "data without a length: the end of an epoch is not known in advance"
    elif trainer.max_steps != -1:
        reason = "max_steps, which counts steps of any size: use max_epochs, limit_train_batches"
    elif wrong := [c for c in configs if type(c.scheduler) is not LambdaLR]:
        reason = f"the schedule {type(wrong[0].scheduler).__name__}: use a LambdaLR"
    elif any(c.frequency != 1 for c in configs):
        reason = "a schedule's frequency other than 1"
    if reason is not None:
        raise NotImplementedError(f"BatchSizeCallback does not support {reason}")
