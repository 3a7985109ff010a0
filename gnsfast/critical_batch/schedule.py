# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeSchedule``: the batch size at each point of a run, and the steps that it saves."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import whole_number
from gnsfast.counts import exact_count, parse_count, rounded_percent
from gnsfast.critical_batch.json_lines import read_records
from gnsfast.critical_batch.rules import Rules

SAME_COMPUTE = "same tokens, same FLOPs: fewer steps, not less compute"


@dataclass(frozen=True)
class Stage:
    """``steps`` steps of ``batch_size`` samples.

    The first is step ``step``, counted from 0, and begins after ``tokens`` trained tokens. A stage
    that is never reached has no steps.
    """

    threshold: int
    tokens: int
    step: int
    batch_size: int
    steps: int


@dataclass(frozen=True)
class Saved:
    """Steps or seconds of a schedule, and those of a fixed batch size ``against``."""

    scheduled: float
    fixed: float
    against: int

    @property
    def saved(self) -> float:
        return self.fixed - self.scheduled

    @property
    def share(self) -> float:
        return 1 - self.scheduled / self.fixed


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The batch size in samples at every point of a run of ``total_tokens``.

    A step that begins after ``tokens`` trained tokens has the batch size of the last threshold that
    is at most ``tokens``: a step across a threshold keeps its size, and the next step changes. The
    last step is a full one, so the run may train up to one batch more than ``total_tokens``.

    Args:
        thresholds: pairs (tokens, batch size in samples) with rising tokens, the first at 0.
        total_tokens: of the whole run.
        tokens_per_sample: tokens of a sample, the sequence length.

    Raises:
        ValueError: for no thresholds, a first one that is not 0, others that do not rise, and
            numbers that are negative or not whole (the message names the number).

    Source: the thresholds of the example are those of Merrill et al. 2025 (arXiv 2505.23971):
    608B tokens of pretraining and 50B of annealing.

    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> olmo = [(0, 1024), (168e9, 2048), (503e9, 4096)]
    >>> schedule = BatchSizeSchedule(olmo, total_tokens=658e9, tokens_per_sample=4096)
    >>> print(schedule)
    89,229 steps, 43.1 % fewer than the 156,880 of 1,024 samples each
    (same tokens, same FLOPs: fewer steps, not less compute)
    from 0 tokens: 1,024 samples, 40,055 steps
    from 168B tokens: 2,048 samples, 39,935 steps
    from 503B tokens: 4,096 samples, 9,239 steps
    """

    thresholds: Sequence[tuple[float, int]]
    total_tokens: float
    tokens_per_sample: int

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise ValueError("a schedule needs at least one threshold: (0, batch_size)")
        clean: list[tuple[int, int]] = []
        for tokens, batch_size in self.thresholds:
            at = whole_number("a threshold", tokens, 0)
            if not clean and at:
                raise ValueError(f"the first threshold must be 0 tokens, not {at:,}")
            if clean and at <= clean[-1][0]:
                raise ValueError(
                    f"thresholds must rise, but {at:,} tokens come after {clean[-1][0]:,}"
                )
            clean.append((at, whole_number("a batch size", batch_size)))
        object.__setattr__(self, "thresholds", tuple(clean))
        for name in ("total_tokens", "tokens_per_sample"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))

    @staticmethod
    def parse(text: str, *, total_tokens: float, tokens_per_sample: int) -> "BatchSizeSchedule":
        """The schedule that "0:1024 168B:2048" means in Megatron-LM; thresholds are in tokens.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> text = "0:32 1M:64"
        >>> BatchSizeSchedule.parse(text, total_tokens=2e6, tokens_per_sample=100).steps
        469
        """
        pairs = []
        for entry in text.split():
            tokens, colon, batch_size = entry.partition(":")
            if not colon:
                raise ValueError(f"{entry!r} must be TOKENS:SAMPLES, such as 168B:2048")
            pairs.append(
                (parse_count(tokens, "a threshold"), parse_count(batch_size, "a batch size"))
            )
        return BatchSizeSchedule(pairs, total_tokens, tokens_per_sample)

    @staticmethod
    def from_decisions(
        decisions: Iterable[Any], *, total_tokens: float, tokens_per_sample: int
    ) -> "BatchSizeSchedule":
        """From a controller's decisions or their records; a change of phase is ignored.

        Where tokens decrease, the run was resumed: its later decisions replace the earlier ones
        from that point on.

        Raises:
            ValueError: for no decisions, and for one whose old batch size is not the new one of the
                decision before.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> doubled = {"kind": "decision", "tokens": 1_000_000, "old": 32, "new": 64}
        >>> BatchSizeSchedule.from_decisions(
        ...     [doubled], total_tokens=2e6, tokens_per_sample=100
        ... ).thresholds
        ((0, 32), (1000000, 64))
        """
        kept = _replayed([_change(decision) for decision in decisions])
        pairs = {0: kept[0][1]}
        for tokens, old, new in kept:
            if new != old:
                pairs[tokens] = new
        return BatchSizeSchedule(sorted(pairs.items()), total_tokens, tokens_per_sample)

    @staticmethod
    def from_log(
        path: str | os.PathLike[str], *, total_tokens: float, tokens_per_sample: int
    ) -> "BatchSizeSchedule":
        """From the decisions in a JSONL file or a run folder; other records are ignored.

        Raises:
            ValueError: where there is no decision, or a line is not JSON.
        """
        decisions = [r for r in read_records(path) if r.get("kind") == "decision"]
        if not decisions:
            raise ValueError(
                f"{path} holds no decision of a controller: log each one with tracker.record"
            )
        return BatchSizeSchedule.from_decisions(
            decisions, total_tokens=total_tokens, tokens_per_sample=tokens_per_sample
        )

    @property
    def stages(self) -> list[Stage]:
        """The steps of each threshold: 0 where one step passes it, or it is beyond the end."""
        ends = [int(tokens) for tokens, _ in self.thresholds[1:]] + [int(self.total_tokens)]
        stages, trained, step = [], 0, 0
        for (threshold, batch_size), end in zip(self.thresholds, ends):
            step_tokens = batch_size * self.tokens_per_sample
            left = min(end, int(self.total_tokens)) - trained
            steps = max(0, -(-left // step_tokens))
            stages.append(Stage(int(threshold), trained, step, batch_size, steps))
            trained += steps * step_tokens
            step += steps
        return stages

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(stage.steps for stage in self.stages)

    def batch_size_at(self, tokens: float) -> int:
        """Samples of the step that trains token number ``tokens``, or of the last step beyond it.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> schedule = BatchSizeSchedule([(0, 4), (50, 8)], total_tokens=200, tokens_per_sample=10)
        >>> [schedule.batch_size_at(t) for t in (0, 50, 79, 80)]  # the second step ends at 80
        [4, 4, 4, 8]
        """
        at = whole_number("tokens", tokens, 0)
        return [s.batch_size for s in self.stages if s.steps and s.tokens <= at][-1]

    def lr_factor_at(self, tokens: float, lr: str = "sqrt") -> float:
        """The factor of the learning rate there, by a rule of ``Rules``; 1 at the first batch size.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> schedule = BatchSizeSchedule([(0, 4), (80, 16)], total_tokens=500, tokens_per_sample=10)
        >>> [schedule.lr_factor_at(tokens) for tokens in (0, 80)]
        [1.0, 2.0]
        """
        return Rules(lr).lr_factor(self.batch_size_at(tokens) / self.thresholds[0][1])

    def steps_saved(self, against: int | None = None) -> Saved:
        """Steps of the schedule and of a fixed batch size ``against``, by default the first one.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> schedule = BatchSizeSchedule([(0, 4), (80, 8)], total_tokens=240, tokens_per_sample=10)
        >>> schedule.steps_saved(against=4)
        Saved(scheduled=4, fixed=6, against=4)
        """
        fixed = self._fixed(against)
        return Saved(self.steps, fixed.steps, fixed.thresholds[0][1])

    def seconds(self, step_seconds: Mapping[int, float]) -> float:
        """The time of the run, from the measured time of a step at each of its batch sizes.

        Raises:
            ValueError: for a batch size that was not measured: times are not interpolated, because
                the time of a step is not linear in its samples.
        """
        used = [stage for stage in self.stages if stage.steps]
        for batch_size in sorted({stage.batch_size for stage in used}):
            took = step_seconds.get(batch_size)
            if took is None:
                raise ValueError(
                    f"step_seconds has no time for a step of {batch_size} samples: measure and add "
                    "it"
                )
            if not 0 < took < math.inf:
                raise ValueError(
                    f"the seconds of a step of {batch_size} samples must be positive, not {took}"
                )
        return sum(stage.steps * step_seconds[stage.batch_size] for stage in used)

    def seconds_saved(self, step_seconds: Mapping[int, float], against: int | None = None) -> Saved:
        """The time of the schedule and of a fixed batch size, from measured step times.

        >>> from gnsfast.critical_batch import BatchSizeSchedule
        >>> schedule = BatchSizeSchedule([(0, 4), (80, 8)], total_tokens=240, tokens_per_sample=10)
        >>> schedule.seconds_saved({4: 1.0, 8: 1.5}, against=4)
        Saved(scheduled=5.0, fixed=6.0, against=4)
        """
        fixed = self._fixed(against)
        seconds = self.seconds(step_seconds), fixed.seconds(step_seconds)
        return Saved(*seconds, fixed.thresholds[0][1])

    def _fixed(self, against: int | None) -> "BatchSizeSchedule":
        size = whole_number("against", self.thresholds[0][1] if against is None else against)
        return BatchSizeSchedule([(0, size)], self.total_tokens, self.tokens_per_sample)

    def __str__(self) -> str:
        lines = [headline(self.steps_saved()), f"({SAME_COMPUTE})"]
        for stage in self.stages:
            lines.append(
                f"from {exact_count(stage.threshold)} tokens: {stage.batch_size:,} samples, "
                + (f"{stage.steps:,} steps" if stage.steps else "never reached")
            )
        return "\n".join(lines)


def headline(saved: Saved) -> str:
    """The steps, and how many per cent fewer or more they are than at the fixed batch size."""
    percent = rounded_percent(abs(saved.share))
    return (
        f"{saved.scheduled:,} steps, {percent} {'fewer' if saved.saved >= 0 else 'more'} than the "
        f"{saved.fixed:,} of {saved.against:,} samples each"
    )


def _change(decision: Any) -> tuple[int, int, int]:
    """Tokens, old and new batch size of a ``Decision`` or its record."""
    record = decision if isinstance(decision, Mapping) else getattr(decision, "__dict__", {})
    if (kind := record.get("kind", "decision")) != "decision":
        raise ValueError(f"this record has kind {kind!r}, and is not a decision")
    tokens, old, new = (record.get(name) for name in ("tokens", "old", "new"))
    if tokens is None or old is None or new is None:
        raise ValueError(f"a decision needs tokens, old and new, and this lacks one: {decision!r}")
    return (
        whole_number("tokens of a decision", tokens, 0),
        whole_number("old", old),
        whole_number("new", new),
    )


def _replayed(changes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Changes in the order of tokens, without those that a resumed run replaced."""
    if not changes:
        raise ValueError("a schedule needs at least one decision")
    kept: list[tuple[int, int, int]] = []
    for tokens, old, new in changes:
        last = kept[-1] if kept else (0, changes[0][1], changes[0][1])
        if tokens < last[0] or (tokens == last[0] and old != last[2]):
            kept = [k for k in kept if k[0] < tokens]
            while kept and kept[-1][2] != old:
                kept.pop()
        before = kept[-1][2] if kept else changes[0][1]
        if before != old:
            raise ValueError(
                f"the decision at {tokens:,} tokens changes {old:,} samples, but the batch size "
                f"was {before:,}: decisions are missing, or several runs share the log"
            )
        kept.append((tokens, old, new))
    return kept


@dataclass(frozen=True)
class AlignedChange:
    """What becomes of a threshold.

    Args:
        threshold, new: of the schedule.
        old: samples of a step before it.
        samples: trained at the change, or None where there is none: the next threshold or the end
            of the run comes first, or ``old`` is ``new``.
        late: steps of ``old`` samples from the threshold to the change.
    """

    threshold: int
    old: int
    new: int
    samples: int | None
    late: int


def aligned_changes(schedule: BatchSizeSchedule) -> list[AlignedChange]:
    """Every threshold but the first, in an epoch that holds the whole run, in trainers that change
    the batch size only where a step of either size would end.

    OLMo-core and our ``BatchSizeCallback``s do so, because they find their place in the data by
    counting batches. A change may then come late, and one that still waits when the next is due is
    left out.

    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> from gnsfast.critical_batch.laws import aligned_changes
    >>> schedule = BatchSizeSchedule([(0, 4), (90, 16)], 2000, tokens_per_sample=10)
    >>> aligned_changes(schedule)  # due after 12 samples, and made after 16
    [AlignedChange(threshold=90, old=4, new=16, samples=16, late=1)]
    """
    thresholds, length = schedule.thresholds, schedule.tokens_per_sample
    ends = [*(int(tokens) for tokens, _ in thresholds[2:]), math.inf]
    found, old = [], thresholds[0][1]
    for (tokens, new), end in zip(thresholds[1:], ends):
        due = _next_multiple(-(-int(tokens) // length), old)
        at = _next_multiple(due, math.lcm(old, new))
        made = old != new and at * length < min(end, schedule.total_tokens)
        late = (at - due) // old
        found.append(AlignedChange(int(tokens), old, new, at if made else None, late))
        old = new if made else old
    return found


def _next_multiple(samples: int, of: int) -> int:
    return -(-samples // of) * of
