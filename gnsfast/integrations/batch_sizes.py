# SPDX-License-Identifier: Apache-2.0
"""What both ``BatchSizeCallback``s do: check, start, set learning rates, and say decisions."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from gnsfast.critical_batch.control import ChangingBatchSize, Decision, ScheduledBatchSize
from gnsfast.critical_batch.rules import set_lr
from gnsfast.integrations.measuring import LOG, Measuring


def check(
    controller: ChangingBatchSize, trainers: Mapping[str, int], per_epoch: int, epochs: float
) -> None:
    """Raise ValueError where a controller is not one of this training.

    A controller's tokens may be half or twice the training's. Those of a schedule must be the same,
    but for its largest step and the short last micro-batch of each epoch.

    Args:
        trainers: settings of the Trainer, by the controller's names.
        per_epoch: micro-batches of an epoch.
        epochs: 0 where their number is not known.
    """
    s, schedule = controller.settings, isinstance(controller, ScheduledBatchSize)
    for name, value in trainers.items():
        if (own := getattr(s, name)) != value:
            if schedule and name == "batch_size":
                raise ValueError(
                    f"the schedule begins with {own} samples, but the Trainer's steps have "
                    f"{value}: give the Trainer {own // s.samples_at_once} accumulation steps, or "
                    f"let the schedule's first threshold be (0, {value})"
                )
            raise ValueError(
                f"the controller has {name}={own}, but the Trainer has {value}: make the "
                f"controller with {name}={value}"
            )
    for size in s.sizes:
        if size % s.batch_size:
            raise ValueError(
                f"a batch size of {size} is no multiple of the first one, {s.batch_size}, in which "
                "a Trainer's steps are counted: begin with one that divides all others"
            )
    samples = per_epoch * s.samples_at_once
    if s.sizes[-1] > samples:
        raise ValueError(
            f"a batch size of {s.sizes[-1]} is more than the {samples} samples of an epoch: use at "
            "most that"
        )
    planned = round(epochs * samples * s.tokens_per_sample)
    needed = s.total_tokens / (samples * s.tokens_per_sample)
    steps = math.ceil(needed * math.ceil(samples / s.batch_size))
    slack = (s.sizes[-1] + math.ceil(epochs) * s.samples_at_once) * s.tokens_per_sample
    least, most = planned / 2, 2 * planned
    if schedule:
        least, most = planned - slack, planned + slack
    if epochs > 0 and not least <= s.total_tokens <= most:
        kind = "schedule" if schedule else "controller"
        raise ValueError(
            f"the {kind} has total_tokens={s.total_tokens:,}, but this training has "
            f"{planned:,}: {epochs:.4g} epochs of {samples:,} samples with "
            f"tokens_per_sample={s.tokens_per_sample:,}. Train {needed:.4g} epochs, which are "
            f"{steps:,} steps of the first batch size (Trainer's max_steps), or make the {kind} "
            f"with total_tokens={planned:_}"
        )


def check_callbacks(gns: Measuring, callbacks: Sequence[Any]) -> None:
    """Raise ValueError where the callback that measures does not hear of the training."""
    if gns not in callbacks:
        raise ValueError(
            f"the {type(gns).__name__} is not among the Trainer's callbacks: pass "
            "Trainer(callbacks=[gns, BatchSizeCallback(controller, gns)])"
        )


def start(controller: ChangingBatchSize, saved: dict[str, Any] | None) -> None:
    """Continue from the state of a checkpoint, or check that the controller is new."""
    if saved is not None:
        controller.load_state_dict(saved)
    elif controller.tokens:
        raise ValueError(
            f"the controller is at {controller.tokens:,} tokens, so it has controlled another run: "
            f"make a new {type(controller).__name__}, or resume this run from a checkpoint"
        )


def set_learning_rates(scheduler: LambdaLR, factor: float) -> None:
    """Set those of the scheduler's present step, times ``factor``."""
    groups = scheduler.optimizer.param_groups
    for group, scale in zip(groups, scheduler.lr_lambdas):
        set_lr(group, group["initial_lr"] * scale(scheduler.last_epoch) * factor)
    scheduler._last_lr = [group["lr"] for group in groups]


def say(decision: Decision, tracker: Any) -> None:
    """Log a decision's words with the level INFO, or WARNING, and record it where the tracker
    takes records.
    """
    level = logging.WARNING if decision.warning else logging.INFO
    LOG.log(level, "%s tokens: %s", f"{decision.tokens:,}", decision.reason)
    record = getattr(tracker, "record", None)
    if record is not None:
        record(decision.record())
