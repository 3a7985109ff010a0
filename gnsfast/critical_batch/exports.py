# SPDX-License-Identifier: Apache-2.0
"""Writes schedules in the form of other tools: what they read, and the code for what they do not.

A tool that reads batch sizes does not move the learning rate with them: ``lines`` do.
"""

from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import check_choice, whole_number
from gnsfast.counts import exact_count
from gnsfast.critical_batch.schedule import BatchSizeSchedule, Stage, aligned_changes
from gnsfast.templates import template

TOOLS = ("megatron", "olmo-core", "torchtitan", "levanter", "huggingface", "lightning")
"""``lines`` has a template for each but OLMo-core, which moves the learning rate itself."""


def megatron(schedule: BatchSizeSchedule, *, unit: str = "tokens") -> str:
    """The value of Megatron-LM's ``--step-batch-size-schedule``.

    With ``--seq-length``, which must equal ``tokens_per_sample``, Megatron reads thresholds as
    tokens and rounds them down to whole samples. Without it they are samples, which
    ``unit="samples"`` writes. The batch size changes with the first step after that many samples,
    as in ``BatchSizeSchedule``. Suffixes K, M, B, T are used where they are exact. Megatron needs
    each batch size to be divisible by micro-batch size times data-parallel size.

    Raises:
        ValueError: where Megatron's rounding would move a change to another step.

    Source: NVIDIA/Megatron-LM, ``megatron/core/num_microbatches_calculator.py``,
    ``StepBatchsizeNumMicroBatchesCalculator``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 768), (250e9, 1536)], 500e9, tokens_per_sample=8192)
    >>> exports.megatron(schedule)
    '0:768 250B:1536'
    """
    check_choice("unit", unit, ("tokens", "samples"))
    length, stages = schedule.tokens_per_sample, schedule.stages
    if unit == "tokens":
        thresholds = [stage.threshold for stage in stages]
        _check_rounding(schedule, [t // length * length for t in thresholds])
    else:
        thresholds = [-(-stage.threshold // length) for stage in stages]
    sizes = dict(
        zip(thresholds, (stage.batch_size for stage in stages))
    )  # of equal thresholds, the last
    return " ".join(f"{exact_count(t)}:{size}" for t, size in sizes.items())


def _check_rounding(schedule: BatchSizeSchedule, rounded: list[int]) -> None:
    """Raise ValueError where ``rounded`` thresholds would move a change to another step."""
    sizes = [batch_size for _, batch_size in schedule.thresholds]
    if len(set(rounded)) == len(rounded):
        megatrons = BatchSizeSchedule(
            list(zip(rounded, sizes)), schedule.total_tokens, schedule.tokens_per_sample
        )
        if [s.tokens for s in megatrons.stages] == [s.tokens for s in schedule.stages]:
            return
    raise ValueError(
        "Megatron rounds thresholds down to whole samples, so it would change the batch size a "
        "step earlier than this schedule: pass unit='samples', or use thresholds that are "
        f"multiples of {schedule.tokens_per_sample:,} tokens"
    )


@dataclass(frozen=True)
class MegatronRamp:
    """Megatron-LM's ``--rampup-batch-size`` (start, increment, samples of the ramp),
    ``--global-batch-size`` and ``--train-samples``.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int
    train_samples: int

    def __str__(self) -> str:
        ramp = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples}"
        return f"{ramp} --global-batch-size {self.global_batch_size}"

    def batch_size_at(self, samples: int) -> int:
        """Of the step that begins after ``samples``, as Megatron computes it."""
        if samples > self.ramp_samples:
            return self.global_batch_size
        increments = (self.global_batch_size - self.start) // self.increment
        return self.start + int(samples / (self.ramp_samples / increments)) * self.increment


def megatron_ramp(schedule: BatchSizeSchedule) -> MegatronRamp:
    """The ramp that Megatron-LM knows in every version: equal increments after equal numbers of
    samples.

    Each step has the batch size that ``schedule`` gives it. ``train_samples`` is the end of the
    schedule's last step: of a part of a step Megatron trains nothing.

    Raises:
        ValueError: where no such ramp has the schedule's steps.

    Source: NVIDIA/Megatron-LM, ``megatron/core/num_microbatches_calculator.py``,
    ``RampupBatchsizeNumMicroBatchesCalculator``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 8), (800, 12), (1600, 16)], 4000, tokens_per_sample=10)
    >>> print(exports.megatron_ramp(schedule))
    --rampup-batch-size 8 4 160 --global-batch-size 16
    """
    length, stages = schedule.tokens_per_sample, schedule.stages
    sizes = [stage.batch_size for stage in stages]
    increments = {new - old for old, new in zip(sizes, sizes[1:])}
    if len(increments) != 1 or min(increments) <= 0 or not all(stage.steps for stage in stages):
        raise ValueError(
            "it grows by equal increments and has to reach every size, and this schedule's batch "
            f"sizes are {', '.join(f'{size:,}' for size in sizes)}"
        )
    last = len(stages) - 1
    changes = [stage.tokens // length for stage in stages[1:]]
    end = (stages[-1].tokens // length) + stages[-1].steps * sizes[-1]
    samples = min(change * last // k for k, change in enumerate(changes, 1))
    ramp = MegatronRamp(sizes[0], min(increments), samples, sizes[-1], end)
    for old, new, change in zip(stages, stages[1:], changes):
        ends = (change - old.batch_size, old.batch_size), (change, new.batch_size)
        if any(ramp.batch_size_at(at) != size for at, size in ends):
            raise ValueError(
                "it grows after equal numbers of samples, and this schedule grows after "
                f"{', '.join(f'{c:,}' for c in changes)} samples"
            )
    return ramp


def olmo_core(schedule: BatchSizeSchedule, *, lr: str = "sqrt") -> dict[str, Any]:
    """Fields of OLMo-core's ``BatchSizeSchedulerCallback``.

    ``batch_sizes`` are in tokens; each entry of ``schedule`` has the fields of a ``Duration``. The
    callback itself multiplies Adam's learning rate by √(new / old): leave out the controller's
    factor. It waits until the number of batches is divisible by new / old, so a change may come up
    to new / old - 1 steps later than in ``schedule``.

    Raises:
        ValueError: for two equal sizes in a row, or two of which neither is an integer multiple of
            the other: the callback refuses them. For another rule of the learning rate than
            ``"sqrt"``: the callback has no other.

    Source: allenai/OLMo-core, ``src/olmo_core/train/callbacks/batch_size_scheduler.py`` and
    ``src/olmo_core/train/common.py``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 1024), (168e9, 2048)], 500e9, tokens_per_sample=4096)
    >>> exports.olmo_core(schedule)["batch_sizes"]
    [4194304, 8388608]
    """
    sizes = [batch_size for _, batch_size in schedule.thresholds]
    if len(sizes) > 1 and lr != "sqrt":
        raise ValueError(
            f"OLMo-core multiplies the learning rate by √(new / old) at each change: lr={lr!r} "
            "cannot be had there, use lr='sqrt'"
        )
    for old, new in zip(sizes, sizes[1:]):
        if old == new or max(old, new) % min(old, new):
            raise ValueError(
                f"OLMo-core cannot go from batches of {old} samples to {new}: one must be a "
                "multiple of the other"
            )
    for change in aligned_changes(schedule):
        old, new = change.old, change.new
        if max(old, new) % min(old, new):
            raise ValueError(
                f"OLMo-core still trains {old} samples at {change.threshold:,} tokens, because it "
                f"waits to make the change before, and it cannot go from {old} to {new}: move the "
                "thresholds apart"
            )
    return {
        "batch_sizes": [size * schedule.tokens_per_sample for size in sizes],
        "schedule": [{"value": t, "unit": "tokens"} for t, _ in schedule.thresholds],
    }


def olmo_core_late(schedule: BatchSizeSchedule) -> list[int | None]:
    """How many steps after ``schedule`` OLMo-core makes each change, or None where it makes none.

    A growth waits until the batches so far, of this epoch, are a multiple of new / old. OLMo-core
    looks for the latest threshold each time: it leaves out a change that still waits when the next
    is due, or at the end of the run.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 4), (90, 16)], 2000, tokens_per_sample=10)
    >>> exports.olmo_core_late(schedule)  # due after 3 batches, and made after 4
    [1]
    >>> schedule = BatchSizeSchedule([(0, 4), (50, 8), (70, 32)], 2000, tokens_per_sample=10)
    >>> exports.olmo_core_late(schedule)  # from 4 to 32 after 8 batches, and never 8
    [None, 6]
    """
    changes = aligned_changes(schedule)
    return [None if change.samples is None else change.late for change in changes]


def levanter(schedule: BatchSizeSchedule) -> list[dict[str, int]]:
    """Levanter's ``train_batch_size``: the ``ScheduleStep(start, value)`` of each batch size, from
    the step on with which it begins. ``num_train_steps`` is ``schedule.steps``.

    Source: stanford-crfm/levanter, ``src/levanter/schedule.py``, ``BatchSchedule``, of release
    1.2.dev1644. Release 1.1 takes one size alone.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    >>> exports.levanter(schedule)
    [{'start': 0, 'value': 32}, {'start': 7, 'value': 64}]
    """
    return [{"start": stage.step, "value": stage.batch_size} for stage in _reached(schedule)]


def first_steps(schedule: BatchSizeSchedule) -> int:
    """The steps of a run in which all batches are as large as the first one: how both
    ``BatchSizeCallback``s count, also in ``TrainingArguments(max_steps=...)``.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (10_000, 64)], 20_000, tokens_per_sample=10)
    >>> schedule.steps, exports.first_steps(schedule)
    (48, 63)
    """
    first = schedule.thresholds[0][1] * schedule.tokens_per_sample
    return -(-int(schedule.total_tokens) // first)


def end_samples(schedule: BatchSizeSchedule) -> int:
    """The samples that the run has trained at its end: that of its last step, which is a full one.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> exports.end_samples(BatchSizeSchedule([(0, 32)], 5000, tokens_per_sample=10))
    512
    """
    return sum(stage.steps * stage.batch_size for stage in schedule.stages)


def lines(
    tool: str,
    schedule: BatchSizeSchedule,
    lr: str = "sqrt",
    *,
    micro_batch: int | None = None,
    processes: int = 1,
) -> str:
    """Code that trains the schedule, or moves the learning rate with the batches that a tool reads.

    Args:
        tool: one of ``TOOLS``; empty for ``"olmo-core"``.
        lr: the rule (``Rules``) of the learning rate.
        micro_batch: the samples of one forward pass of a process; torchtitan, huggingface and
            lightning need it.
        processes: that train other samples each.

    Raises:
        ValueError: for a batch size that is no multiple of the samples of one forward pass, and
            where a ``BatchSizeCallback`` would refuse it: one that is no multiple of the first.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 768), (250e9, 3072)], 500e9, tokens_per_sample=8192)
    >>> print(exports.lines("megatron", schedule))
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    <BLANKLINE>
    FACTORS = {0: 1.0, 30518016: 2.0}  # samples trained: factor of the learning rate
    plain = OptimizerParamScheduler.get_lr
    OptimizerParamScheduler.get_lr = lambda self, group: plain(self, group) * (
        FACTORS[max(samples for samples in FACTORS if samples <= self.num_steps)]
    )
    """
    check_choice("tool", tool, TOOLS)
    if tool == "olmo-core":
        return ""
    sizes, length = [size for _, size in schedule.thresholds], schedule.tokens_per_sample
    passes = {}
    if tool not in ("megatron", "levanter"):
        at_once = whole_number("micro_batch", micro_batch) * whole_number("processes", processes)
        _check_multiples(sizes, at_once, "the samples of one forward pass, micro_batch x processes")
        passes = {size: size // at_once for size in sizes}
    if tool in ("huggingface", "lightning"):
        why = "the first one, in which BatchSizeCallback counts steps"
        _check_multiples(sizes, sizes[0], why)
    factors = {s: schedule.lr_factor_at(s.tokens, lr) for s in _reached(schedule)}
    values = {
        "samples": {s.tokens // length: factor for s, factor in factors.items()},
        "steps": {s.step: factor for s, factor in factors.items()},
        "stages": {s.step: (passes.get(s.batch_size), f) for s, f in factors.items()},
        "pairs": [(int(tokens), size) for tokens, size in schedule.thresholds],
        "accumulation": passes.get(sizes[0]),
        "max_steps": first_steps(schedule),
    }
    own = {"lr": lr, "micro_batch": micro_batch, "processes": processes, "schedule": schedule}
    return template("gnsfast.critical_batch", f"{tool}.jinja").render(own | values)


def _reached(schedule: BatchSizeSchedule) -> list[Stage]:
    return [stage for stage in schedule.stages if stage.steps]


def _check_multiples(sizes: list[int], of: int, name: str) -> None:
    for size in sizes:
        if size % of:
            raise ValueError(
                f"a batch of {size:,} samples must be a multiple of {name}, which is {of:,}"
            )
