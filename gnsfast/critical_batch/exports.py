# SPDX-License-Identifier: Apache-2.0
"""Writes schedules in the form of other frameworks, and rounds only where asked to.

Most of these forms hold batch sizes alone. The ``*_lines`` are code that moves the learning rate
with them: without these lines a run keeps that of its first batch size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import check_choice, whole_number
from gnsfast.counts import exact_count
from gnsfast.critical_batch.rules import Rules
from gnsfast.critical_batch.schedule import BatchSizeSchedule, aligned_changes
from gnsfast.templates import template


def megatron(schedule: BatchSizeSchedule, *, unit: str = "tokens") -> str:
    """The value of Megatron-LM's ``--step-batch-size-schedule``.

    With ``--seq-length``, which must equal ``tokens_per_sample``, Megatron reads thresholds as
    tokens and rounds them down to whole samples. Without it they are samples, which
    ``unit="samples"`` writes. The batch size changes with the first step after that many samples,
    as in ``BatchSizeSchedule``. Suffixes K, M, B, T are used where they are exact. Megatron needs
    each batch size to be divisible by micro-batch size times data-parallel size. It does not change
    the learning rate: ``megatron_lines`` do.

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


def megatron_lines(schedule: BatchSizeSchedule, lr: str = "sqrt") -> str:
    """For a script that calls Megatron-LM's ``pretrain``, above that call.

    Megatron counts the steps of its learning-rate schedule in samples, with ``--train-samples`` and
    the options that go with it.

    Source: NVIDIA/Megatron-LM, ``megatron/core/optimizer_param_scheduler.py``.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 768), (250e9, 3072)], 500e9, tokens_per_sample=8192)
    >>> print(exports.megatron_lines(schedule))
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    <BLANKLINE>
    FACTORS = {0: 1.0, 30518016: 2.0}  # samples trained: factor of the learning rate
    plain = OptimizerParamScheduler.get_lr
    OptimizerParamScheduler.get_lr = lambda self, group: plain(self, group) * (
        FACTORS[max(samples for samples in FACTORS if samples <= self.num_steps)]
    )
    """
    length = schedule.tokens_per_sample
    factors = {
        stage.tokens // length: schedule.lr_factor_at(stage.tokens, lr)
        for stage in schedule.stages
        if stage.steps
    }
    return _lines("megatron", factors=factors)


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


@dataclass(frozen=True)
class LightningAccumulation:
    """``scheduling`` for ``GradientAccumulationScheduler``; ``moved`` says what was rounded.

    It does not change the learning rate: ``lightning_lines(lr_factors)`` do, from the same epochs.
    """

    scheduling: dict[int, int]
    moved: tuple[str, ...]
    lr_factors: dict[int, float]


def lightning(
    schedule: BatchSizeSchedule,
    *,
    samples_per_batch: int,
    samples_per_epoch: int,
    round_to_epochs: bool = False,
    lr: str = "sqrt",
) -> LightningAccumulation:
    """``scheduling={epoch: factor}`` for Lightning's ``GradientAccumulationScheduler``.

    Epochs count from 0, and a factor holds from the start of its epoch. The last step of an epoch
    is shorter where the factor does not divide the epoch's batches.

    Args:
        samples_per_batch: of one forward pass, over all processes.
        samples_per_epoch: over all processes.
        round_to_epochs: move a change within an epoch to the start of the next epoch; ``moved``
            lists these changes. Of two changes at the same epoch the later one holds.
        lr: the rule (``Rules``) of ``lr_factors``.

    Raises:
        ValueError: for a batch size that is no multiple of ``samples_per_batch``, and for a change
            within an epoch without ``round_to_epochs``.

    Source: ``lightning.pytorch.callbacks.GradientAccumulationScheduler``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 128)], 5000, tokens_per_sample=10)
    >>> exports.lightning(schedule, samples_per_batch=16, samples_per_epoch=100)
    LightningAccumulation(scheduling={0: 2, 2: 8}, moved=(), lr_factors={0: 1.0, 2: 2.0})
    """
    epoch_tokens = whole_number("samples_per_epoch", samples_per_epoch) * schedule.tokens_per_sample
    scheduling: dict[int, int] = {}
    moved, lr_factor, lr_factors = [], Rules(lr).lr_factor, {}
    for stage in schedule.stages:
        epoch, inside = divmod(stage.threshold, epoch_tokens)
        if inside and not round_to_epochs:
            raise ValueError(
                f"the change at {stage.threshold:,} tokens lies within epoch {epoch}, and "
                f"Lightning changes the accumulation only between epochs of {epoch_tokens:,} "
                "tokens: pass round_to_epochs=True (--round-to-epochs)"
            )
        if inside:
            epoch += 1
            moved.append(
                f"{stage.batch_size:,} samples from {epoch * epoch_tokens:,} tokens "
                f"(epoch {epoch}) instead of {stage.threshold:,}"
            )
        scheduling[epoch] = _factor(stage.batch_size, "samples_per_batch", samples_per_batch)
        lr_factors[epoch] = lr_factor(stage.batch_size / schedule.stages[0].batch_size)
    return LightningAccumulation(scheduling, tuple(moved), lr_factors)


def lightning_lines(lr_factors: Mapping[int, float]) -> str:
    """For the end of ``configure_optimizers``.

    >>> from gnsfast.critical_batch import exports
    >>> print(exports.lightning_lines({0: 1.0, 2: 2.0}))
    FACTORS = {0: 1.0, 2: 2.0}  # epoch: factor of the learning rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: FACTORS[max(e for e in FACTORS if e <= epoch)]
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
    """
    return _lines("lightning", factors=dict(lr_factors))


def hugging_face(
    schedule: BatchSizeSchedule,
    *,
    per_device_train_batch_size: int,
    processes: int = 1,
    lr: str = "sqrt",
) -> list[dict[str, float]]:
    """The values that ``TrainingArguments`` must have, and the step from which each holds.

    ``step`` is ``state.global_step`` at the change, and ``tokens`` the tokens trained by then.
    ``lr_factor`` is the factor of the learning rate, by a rule of ``Rules``. Trainer reads the
    accumulation only when training starts; a checkpoint resumed with another one skips the wrong
    number of samples. So change both by ``BatchSizeCallback``: ``hugging_face_lines`` has it. With
    it Trainer counts steps of the first batch size, and needs ``hugging_face_max_steps``. It
    changes the batch size only where a step of either size would end, here in an epoch that holds
    the run; at the end of an epoch a change may come earlier. Changes that it never makes are left
    out.

    Raises:
        ValueError: for a batch size that is no multiple of the samples of one forward pass, and for
            one that is no multiple of the first batch size: the callback refuses it.

    Source: transformers, ``TrainingArguments``: a step takes per-device batch size x processes x
    gradient accumulation steps samples.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    >>> plan = exports.hugging_face(schedule, per_device_train_batch_size=4, processes=8)
    >>> plan[1]["step"], plan[1]["tokens"], plan[1]["gradient_accumulation_steps"]
    (8, 2560, 2)
    """
    samples = whole_number("per_device_train_batch_size", per_device_train_batch_size)
    samples *= whole_number("processes", processes)
    _check_multiples(schedule)
    first, lr_factor = schedule.thresholds[0][1], Rules(lr).lr_factor
    changes = [(c.samples, c.new) for c in aligned_changes(schedule) if c.samples is not None]
    return [
        {
            "step": trained // first,
            "tokens": trained * schedule.tokens_per_sample,
            "per_device_train_batch_size": per_device_train_batch_size,
            "gradient_accumulation_steps": _factor(
                size, "per-device batch size x processes", samples
            ),
            "lr_factor": lr_factor(size / first),
        }
        for trained, size in [(0, first), *changes]
    ]


def hugging_face_lines(
    schedule: BatchSizeSchedule, lr: str = "sqrt", *, micro_batch: int, processes: int = 1
) -> str:
    """For a script that makes a Trainer: callbacks that train the schedule, learning rates too.

    Raises:
        ValueError: for a batch size that is no multiple of the first one: the callback refuses it.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    >>> print(exports.hugging_face_lines(schedule, micro_batch=4).splitlines()[4])
    schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    """
    _check_multiples(schedule)
    pairs = [(int(tokens), size) for tokens, size in schedule.thresholds]
    return _lines(
        "hugging_face",
        pairs=pairs,
        total_tokens=int(schedule.total_tokens),
        length=schedule.tokens_per_sample,
        lr=lr,
        processes=processes,
        micro_batch=micro_batch,
        max_steps=hugging_face_max_steps(schedule),
        accumulation=pairs[0][1] // (micro_batch * processes),
    )


def hugging_face_max_steps(schedule: BatchSizeSchedule) -> int:
    """``TrainingArguments(max_steps=...)``, which counts steps of the first batch size.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (10_000, 64)], 20_000, tokens_per_sample=10)
    >>> schedule.steps, exports.hugging_face_max_steps(schedule)
    (48, 63)
    """
    first = schedule.thresholds[0][1] * schedule.tokens_per_sample
    return -(-int(schedule.total_tokens) // first)


def _check_multiples(schedule: BatchSizeSchedule) -> None:
    """Raise ValueError for a batch size of which ``BatchSizeCallback`` cannot count the steps."""
    first = schedule.thresholds[0][1]
    for tokens, size in schedule.thresholds:
        if size % first:
            raise ValueError(
                f"BatchSizeCallback counts Trainer's steps in the first batch size, {first:,} "
                f"samples, and refuses the {size:,} samples from {exact_count(int(tokens))} tokens "
                "on: begin with a batch size that divides all others"
            )


def nanogpt_lines(
    schedule: BatchSizeSchedule, lr: str = "sqrt", *, micro_batch: int, processes: int = 1
) -> str:
    """For nanoGPT's ``train.py``: settings, and what replaces ``lr = get_lr(...)`` in its loop.

    ``warmup_iters`` and ``lr_decay_iters`` count steps of the first batch size, so that the decay
    keeps its meaning in tokens. ``micro_batch`` is nanoGPT's ``batch_size``.

    Raises:
        ValueError: for a batch size that is no multiple of the samples of one forward pass.

    Source: karpathy/nanoGPT, ``train.py``.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (640, 128)], 5120, tokens_per_sample=10)
    >>> print(exports.nanogpt_lines(schedule, micro_batch=16))
    max_iters = 5  # its loop takes one more
    lr_decay_iters = 16
    STAGES = (  # iteration, steps of the first batch so far, micro-batches, learning-rate factor
        (0, 0, 2, 1.0),
        (2, 2, 8, 2.0),
    )
    <BLANKLINE>
    # in the loop
        stage = max(stage for stage in STAGES if stage[0] <= iter_num)
        begins, done, gradient_accumulation_steps, factor = stage
        it = done + (iter_num - begins) * gradient_accumulation_steps / STAGES[0][2]
        lr = factor * (get_lr(it) if decay_lr else learning_rate)
    """
    first = schedule.stages[0].batch_size * schedule.tokens_per_sample
    stages = []
    for stage in schedule.stages:
        passes = _factor(stage.batch_size, ONE_PASS, micro_batch * processes)
        if stage.steps:
            done, factor = stage.tokens / first, schedule.lr_factor_at(stage.tokens, lr)
            stages.append((stage.step, int(done) if done == int(done) else done, passes, factor))
    return _lines(
        "nanogpt",
        max_iters=schedule.steps - 1,
        lr_decay_iters=hugging_face_max_steps(schedule),
        stages=stages,
    )


ONE_PASS = "the samples of one forward pass"


def _factor(batch_size: int, name: str, samples: int) -> int:
    """The number of forward passes of ``samples`` samples in a step."""
    factor, rest = divmod(batch_size, whole_number(name, samples))
    if rest:
        raise ValueError(
            f"a batch of {batch_size:,} samples must be a multiple of {name}, which is {samples:,}"
        )
    return factor


def _lines(framework: str, **values: Any) -> str:
    """Code for a framework, from its template."""
    return template("gnsfast.critical_batch", f"{framework}.jinja").render(values)
