# SPDX-License-Identifier: Apache-2.0
"""``ChangingBatchSize``: a batch size that changes while a run trains, and what moves with it.
``ScheduledBatchSize`` changes it at thresholds in tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from gnsfast.arguments import check_format, finite_or_none, finite_or_text, whole_number
from gnsfast.counts import exact_count
from gnsfast.critical_batch.control.token_schedules import Shape, by_tokens
from gnsfast.critical_batch.critical_batch_factor import RunIdentity
from gnsfast.critical_batch.rules import Rules
from gnsfast.critical_batch.schedule import BatchSizeSchedule
from gnsfast.interval import NOT_KNOWN, Interval
from gnsfast.noise_scale import NoiseScale

OF_THE_MACHINE = ("data_parallel", "micro_batch")
"""Settings that may differ when a run is resumed."""

FIXED = ("batch_size", "tokens_per_sample", "lr", "betas", "weight_decay")
"""Settings that may not differ: past changes of learning rates and token counts depend on them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every batch size that changes, with all defaults filled in."""

    batch_size: int
    tokens_per_sample: int
    total_tokens: int
    lr: str
    betas: str
    weight_decay: str
    data_parallel: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("tokens_per_sample", "total_tokens"):
            whole_number(name, getattr(self, name))
        self.rules  # noqa: B018 - raises for a name that no rule has
        for size in (self.batch_size, *self.sizes):
            self.check_batch(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that the run may take."""
        return (self.batch_size,)

    @property
    def shrinks(self) -> bool:
        """Whether the run may go from a batch size to a smaller one."""
        return False

    @property
    def rules(self) -> Rules:
        """By which hyperparameters follow the batch size."""
        return Rules(self.lr, self.betas, self.weight_decay)

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro-batch over all processes."""
        return self.data_parallel * self.micro_batch

    def check_batch(self, batch_size: int) -> None:
        """Raise ValueError where the run, perhaps a resumed one, could not have this batch size."""
        if batch_size % self.samples_at_once:
            raise ValueError(
                f"a batch size of {batch_size} cannot be split into micro-batches of "
                f"{self.micro_batch} samples on {self.data_parallel} processes: it must be a "
                f"multiple of {self.samples_at_once}"
            )

    def state(self) -> dict[str, Any]:
        """All settings for JSON."""
        return asdict(self)

    def check_saved(self, saved: dict[str, Any], change: Collection[str]) -> None:
        """Raise ValueError where a saved setting differs that ``change`` does not name."""
        ours = self.state()
        if unknown := sorted(set(change) - set(ours)):
            raise ValueError(f"change names unknown settings: {', '.join(unknown)}")
        if fixed := sorted(set(change) & set(FIXED)):
            raise ValueError(f"a resumed run cannot change {', '.join(fixed)}")
        for name, value in ours.items():
            if saved.get(name) == value or name in change or name in OF_THE_MACHINE:
                continue
            remedy = "" if name in FIXED else f" (to change it, pass change=[{name!r}])"
            raise ValueError(
                f"the state was saved with {name}={saved.get(name)!r}, but this controller has "
                f"{name}={value!r}{remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    """The settings of ``ScheduledBatchSize``."""

    thresholds: list[list[int]]

    @property
    def shrinks(self) -> bool:
        sizes = [size for _, size in self.thresholds]
        return sizes != sorted(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({size for _, size in self.thresholds}))


def micro_batch_of(batch_size: int, data_parallel: int, micro_batch: int | None) -> int:
    """The samples of a micro-batch on each process, by default the first batch in one piece."""
    data_parallel = whole_number("data_parallel", data_parallel)
    if micro_batch is not None:
        return whole_number("micro_batch", micro_batch)
    if batch_size % data_parallel:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of data_parallel={data_parallel}"
        )
    return batch_size // data_parallel


@dataclass(frozen=True)
class Decision:
    """One change of batch size or phase, or a warning.

    Args:
        tokens: trained so far, at the end of an optimizer step.
        phase: from now on: ``"calibrate"``, ``"warm up"`` or ``"monitor"``; ``"schedule"`` where
            thresholds decide.
        old, new: batch sizes in samples, equal for a change of phase and for a warning.
        lr_factor: multiplies the learning rate.
        estimate: the critical batch size in samples (noise scale times factor), with the interval
            ``lower`` to ``upper``. NaN before the first measurement, infinite where the noise scale
            is infinite.
        warning: the batch exceeds the estimate by more than ``over`` allows, or is too small under
            a controller that does not make it larger than the first.
    """

    tokens: int
    phase: str
    old: int
    new: int
    lr_factor: float
    estimate: float
    lower: float
    upper: float
    reason: str
    warning: bool = False

    def record(self) -> dict[str, Any]:
        """A line for a JSON log, with null for numbers that are not finite."""
        return {"kind": "decision"} | {k: finite_or_none(v) for k, v in asdict(self).items()}

    def state(self) -> dict[str, Any]:
        """All fields for JSON without loss, with infinity and NaN as text."""
        return {k: finite_or_text(v) for k, v in asdict(self).items()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Decision":
        """The decision whose ``state()`` this is."""
        numbers = ("lr_factor", "estimate", "lower", "upper")
        return Decision(**state | {k: float(state[k]) for k in numbers})


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
        rules = self.settings.rules
        for size in self.settings.sizes:
            rules.check(optimizer, size / self.batch_size)
            if self.settings.shrinks and rules.floored(optimizer, size / self.batch_size):
                raise ValueError(
                    f"a batch of {size:,} samples puts beta2 on its floor, from which a batch that "
                    "shrinks again could not bring it back: pass betas='keep', or let the batch "
                    "only grow"
                )

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
        check_format("the state", state, self.KIND, self.FORMAT)
        self.settings.check_saved(state["settings"], change)
        self.settings.check_batch(state["batch_size"])
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
        lr_factor = self.settings.rules.lr_factor(new / old)
        decision = Decision(self.tokens, phase, old, new, lr_factor, *critical, reason, warning)
        self.decisions.append(decision)
        return decision


class ScheduledBatchSize(ChangingBatchSize):
    """Train a ``BatchSizeSchedule``: the batch size, and what moves with it, change at thresholds.

    It goes wherever a ``BatchSizeController`` goes, in your own loop and in both
    ``BatchSizeCallback``s, and needs no noise scale. In your own loop the steps are those that the
    schedule counts. A callback changes the batch size at the next step that the old and the new
    size both divide.

    Args:
        schedule: the batch sizes and their tokens. They may also fall.
        lr, betas, weight_decay: as for ``BatchSizeController``.
        data_parallel, micro_batch: as there. Every batch size is a multiple of their product.

    Raises:
        ValueError: for an invalid setting; the message names it.

    Source: the thresholds of the example are those of Merrill et al. 2025 (arXiv 2505.23971), who
    double the batch at 168B and 503B tokens and multiply the learning rate by √2 each time.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, ScheduledBatchSize
    >>> olmo = [(0, 1024), (168e9, 2048), (503e9, 4096)]
    >>> schedule = BatchSizeSchedule(olmo, total_tokens=658e9, tokens_per_sample=4096)
    >>> batch = ScheduledBatchSize(schedule, data_parallel=64, micro_batch=4)
    >>> batch.accumulation
    4
    >>> batch.update(168_000_000_000).reason
    'the schedule has 2,048 samples from 168B tokens on'
    >>> batch.accumulation, round(batch.lr_factor, 4)
    (8, 1.4142)
    """

    KIND: ClassVar[str] = "scheduled batch size"
    FORMAT: ClassVar[int] = 1
    settings: ScheduleSettings

    def __init__(
        self,
        schedule: BatchSizeSchedule,
        *,
        lr: str = "sqrt",
        betas: str = "keep",
        weight_decay: str = "keep",
        data_parallel: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        thresholds = [[int(tokens), size] for tokens, size in schedule.thresholds]
        super().__init__(
            ScheduleSettings(
                batch_size=thresholds[0][1],
                tokens_per_sample=schedule.tokens_per_sample,
                total_tokens=int(schedule.total_tokens),
                lr=lr,
                betas=betas,
                weight_decay=weight_decay,
                data_parallel=data_parallel,
                micro_batch=micro_batch_of(thresholds[0][1], data_parallel, micro_batch),
                thresholds=thresholds,
            )
        )

    def update(
        self, tokens: int, noise_scale: NoiseScale | Callable[[], NoiseScale] | None = None
    ) -> Decision | None:
        """Call it between optimizer steps with the tokens trained so far.

        Returns:
            A decision that holds from the next step on where a threshold is reached, or None.

        Raises:
            ValueError: for tokens that decrease.
        """
        self.tokens = self._checked(tokens)
        threshold, size = self._due(tokens)
        if size == self.batch_size:
            return None
        reason = f"the schedule has {size:,} samples from {exact_count(threshold)} tokens on"
        return self._decide("schedule", size, NOT_KNOWN, reason)

    def check_run(self, run: RunIdentity) -> None:
        """Thresholds go with any run: they were not measured in one."""

    def next_size(self, tokens: int) -> int:
        return self._due(tokens)[1]

    def _due(self, tokens: int) -> list[int]:
        return [entry for entry in self.settings.thresholds if entry[0] <= tokens][-1]
