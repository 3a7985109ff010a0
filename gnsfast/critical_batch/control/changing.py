# SPDX-License-Identifier: Apache-2.0
"""``ChangingBatchSize``: a batch size that changes while a run trains, and what moves with it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch

from gnsfast.arguments import whole_number
from gnsfast.critical_batch.control.decision import Decision
from gnsfast.critical_batch.control.settings import Settings
from gnsfast.critical_batch.control.token_schedules import Shape, by_tokens
from gnsfast.critical_batch.run_identity import RunIdentity
from gnsfast.interval import Interval
from gnsfast.noise_scale import NoiseScale


class ChangingBatchSize(ABC):
    """What ``BatchSizeController`` and ``ScheduledBatchSize`` have in common.

    They differ in what decides: a noise scale, or thresholds in tokens.
    """

    KIND: ClassVar[str]
    FORMAT: ClassVar[int]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.batch_size = settings.batch_size
        self.tokens = 0
        self.decisions: list[Decision] = []
        self.scheduled = False

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step on each process."""
        return self.batch_size // self.settings.samples_at_once

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.batch_size * self.settings.tokens_per_sample

    @property
    def lr_factor(self) -> float:
        """The factor by which all changes so far have multiplied the learning rate."""
        return self.settings.rules.lr_factor(self.batch_size / self.settings.batch_size)

    @abstractmethod
    def update(
        self, tokens: int, noise_scale: NoiseScale | Callable[[], NoiseScale]
    ) -> Decision | None:
        """The decision after ``tokens``, which holds from the next optimizer step on, or None."""

    @abstractmethod
    def next_size(self, tokens: int) -> int:
        """The batch size that ``update(tokens, ...)`` may change to, or the present one."""

    def metrics(self) -> dict[str, float]:
        """Numbers for a tracker, under flat names: ``batch/size``."""
        return {"batch/size": float(self.batch_size)}

    def stride(self, tokens: int) -> int:
        """The micro-batches at whose multiples an optimizer step ends both with the present batch
        size and with ``next_size(tokens)``.
        """
        return math.lcm(self.accumulation, self.next_size(tokens) // self.settings.samples_at_once)

    @abstractmethod
    def check_run(self, run: RunIdentity) -> None:
        """Raise ValueError where what decides was measured in a run that differs."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where an optimizer could not follow to all batch sizes to come."""
        for size in self.settings.sizes:
            self.settings.rules.check(optimizer, size / self.batch_size)

    def apply(
        self, decision: Decision, optimizer: torch.optim.Optimizer, *, lr: bool = True
    ) -> None:
        """Move the hyperparameters of every parameter group as a decision says, by the rules.

        Args:
            lr: False leaves the learning rate to the caller; so does an earlier ``lr_lambda``.

        Raises:
            ValueError: where an optimizer cannot follow (``check_optimizer`` says so before the
                first step); where the learning rate changes and a scheduler sets it, which would
                undo the change at its next step.
        """
        lr = lr and not self.scheduled and decision.lr_factor != 1
        if lr and any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                "a scheduler sets the learning rates (its initial_lr is in the parameter groups) "
                "and would undo this change: use LambdaLR(optimizer, controller.lr_lambda(shape)), "
                "or make the controller with lr='none'"
            )
        self.settings.rules.apply(optimizer, decision.new / decision.old, lr=lr)

    def lr_lambda(self, shape: Shape) -> Callable[[int], float]:
        """``shape`` at the controller's tokens, times ``lr_factor``, for ``LambdaLR``.

        Call ``scheduler.step()`` after ``update``, once per optimizer step; the scheduler's step
        number is ignored. From now on ``apply`` leaves the learning rate alone.

        >>> from gnsfast.critical_batch import BatchSizeController
        >>> from gnsfast.critical_batch.control import cosine
        >>> controller = BatchSizeController(
        ...     8, factor=4.0, tokens_per_sample=64, total_tokens=10**6, max_batch_size=64
        ... )
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
        >>> rate = controller.lr_lambda(cosine(10**6, warm_up=10**4))
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        """
        self.scheduled = True
        return by_tokens(lambda tokens: shape(tokens) * self.lr_factor, lambda: self.tokens)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain types that strict JSON can hold."""
        return {
            "kind": self.KIND,
            "format": self.FORMAT,
            "settings": self.settings.state(),
            "tokens": self.tokens,
            "batch_size": self.batch_size,
            "decisions": [decision.state() for decision in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any], *, change: Collection[str] = ()) -> None:
        """Continue from ``state_dict()``.

        Args:
            change: names of settings that may differ from the saved ones, such as ``"factor"`` once
                it was measured again. ``data_parallel`` and ``micro_batch`` may always differ, but
                must divide the first batch size too.

        Raises:
            ValueError: for a state with other settings (the message names the first), of another
                kind or format, or with a batch size that these processes and micro-batches cannot
                divide.
        """
        if state.get("kind") != self.KIND or state.get("format") != self.FORMAT:
            raise ValueError(
                f"the state is a {state.get('kind')!r} of format {state.get('format')!r}, but this "
                f"version of gnsfast reads a {self.KIND!r} of format {self.FORMAT}"
            )
        self.settings.check_saved(state["settings"], change)
        self.settings.check_size(state["batch_size"])
        self.batch_size, self.tokens = state["batch_size"], state["tokens"]
        self.decisions = [Decision.from_state(each) for each in state["decisions"]]

    def _checked(self, tokens: int) -> int:
        """``tokens``, the progress of the run.

        Raises:
            ValueError: where they decrease, or are counted in another unit.
        """
        tokens = whole_number("tokens", tokens, 0)
        risen, length = tokens - self.tokens, self.settings.tokens_per_sample
        if 0 < risen < length and 10 * risen < self.batch_tokens:
            raise ValueError(
                f"tokens rose by {risen:,} to {tokens:,}, but a step has about "
                f"{self.batch_tokens:,} tokens: pass the tokens trained so far to update(), not "
                "steps or samples"
            )
        if risen < 0:
            raise ValueError(
                f"tokens went back from {self.tokens:,} to {tokens:,}: where a run resumes from a "
                "checkpoint, call controller.load_state_dict(state) too"
            )
        return tokens

    def _decide(
        self, phase: str, new: int, critical: Interval, reason: str, *, warning: bool = False
    ) -> Decision:
        """Change to the batch size ``new``, which may be the present one, and note why."""
        old, self.batch_size = self.batch_size, new
        decision = Decision(
            *(self.tokens, phase, old, new),
            lr_factor=self.settings.rules.lr_factor(new / old),
            estimate=critical.value,
            lower=critical.lower,
            upper=critical.upper,
            reason=reason,
            warning=warning,
        )
        self.decisions.append(decision)
        return decision
