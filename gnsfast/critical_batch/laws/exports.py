# SPDX-License-Identifier: Apache-2.0
"""A schedule in the form that other frameworks take; nothing is rounded unless it says so."""

from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import whole
from gnsfast.critical_batch.counts import exact_count
from gnsfast.critical_batch.laws.schedule import BatchSizeSchedule


def megatron(schedule: BatchSizeSchedule, *, unit: str = "tokens") -> str:
    """The value of Megatron-LM's ``--step-batch-size-schedule``.

    Megatron takes thresholds as tokens where it is given ``--seq-length`` (that must be
    ``tokens_per_sample``) and divides them down to whole samples; without, they are samples, which
    ``unit="samples"`` writes. A change comes with the first step after so many consumed samples, as
    here. Suffixes K, M, B, T stand where they are exact. Megatron wants each batch size to be
    divisible by micro-batch size times data-parallel size, and changes no learning rate.

    Raises:
        ValueError: where Megatron's whole samples would move a change to another step.

    Source: NVIDIA/Megatron-LM, ``megatron/core/num_microbatches_calculator.py``,
    ``StepBatchsizeNumMicroBatchesCalculator``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 768), (250e9, 1536)], 500e9, tokens_per_sample=8192)
    >>> exports.megatron(schedule)
    '0:768 250B:1536'
    """
    if unit not in ("tokens", "samples"):
        raise ValueError(f"unit is {unit!r}, but must be 'tokens' or 'samples'")
    of_a_sample = schedule.tokens_per_sample
    stages = schedule.stages
    if unit == "tokens":
        thresholds = [stage.threshold for stage in stages]
        _check_whole_samples(schedule, [t // of_a_sample * of_a_sample for t in thresholds])
    else:
        thresholds = [-(-stage.threshold // of_a_sample) for stage in stages]
    sizes = dict(zip(thresholds, (stage.batch_size for stage in stages)))  # the last of equal ones
    return " ".join(f"{exact_count(t)}:{size}" for t, size in sizes.items())


def _check_whole_samples(schedule: BatchSizeSchedule, down: list[int]) -> None:
    """Whether thresholds divided down to whole samples leave every change at its step."""
    sizes = [batch_size for _, batch_size in schedule.thresholds]
    if len(set(down)) == len(down):
        there = BatchSizeSchedule(
            list(zip(down, sizes)), schedule.total_tokens, schedule.tokens_per_sample
        )
        if [s.tokens for s in there.stages] == [s.tokens for s in schedule.stages]:
            return
    raise ValueError(
        "Megatron divides thresholds down to whole samples, and would change the batch size a step "
        "earlier than here: use unit='samples', or thresholds that are multiples of "
        f"{schedule.tokens_per_sample:,} tokens"
    )


def olmo_core(schedule: BatchSizeSchedule) -> dict[str, Any]:
    """Fields of OLMo-core's ``BatchSizeSchedulerCallback``: ``batch_sizes`` in tokens and
    ``schedule``, each entry the fields of a ``Duration``.

    The callback multiplies Adam's learning rate with √(new / old) itself: leave the controller's
    factor out. It waits until the batches seen are divisible by new / old, so a change may come up
    to new / old - 1 steps after the one here.

    Raises:
        ValueError: for two sizes in a row of which neither is an integer multiple of the other, or
            that are equal: the callback refuses them.

    Source: allenai/OLMo-core, ``src/olmo_core/train/callbacks/batch_size_scheduler.py`` and
    ``src/olmo_core/train/common.py``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 1024), (168e9, 2048)], 500e9, tokens_per_sample=4096)
    >>> exports.olmo_core(schedule)["batch_sizes"]
    [4194304, 8388608]
    """
    sizes = [batch_size for _, batch_size in schedule.thresholds]
    for old, new in zip(sizes, sizes[1:]):
        if old == new or max(old, new) % min(old, new):
            raise ValueError(f"OLMo-core cannot go from {old} to {new}: no other integer multiple")
    return {
        "batch_sizes": [size * schedule.tokens_per_sample for size in sizes],
        "schedule": [{"value": t, "unit": "tokens"} for t, _ in schedule.thresholds],
    }


@dataclass(frozen=True)
class LightningAccumulation:
    """``scheduling`` for ``GradientAccumulationScheduler``; what was ``moved`` to fit epochs."""

    scheduling: dict[int, int]
    moved: tuple[str, ...]


def lightning(
    schedule: BatchSizeSchedule,
    *,
    samples_per_batch: int,
    samples_per_epoch: int,
    round_to_epochs: bool = False,
) -> LightningAccumulation:
    """``scheduling={epoch: factor}`` for Lightning's ``GradientAccumulationScheduler``.

    Epochs count from 0 and a factor holds from the start of its epoch. The last step of an epoch
    is shorter where the factor does not divide its batches.

    Args:
        samples_per_batch: of one forward pass, over all processes.
        samples_per_epoch: over all processes.
        round_to_epochs: move a change inside of an epoch to the start of the next one; ``moved``
            says which. Two that fall together leave the later one.

    Raises:
        ValueError: for a batch size that is no multiple of ``samples_per_batch``, and, without
            ``round_to_epochs``, for a change inside of an epoch.

    Source: ``lightning.pytorch.callbacks.GradientAccumulationScheduler``.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    >>> exports.lightning(schedule, samples_per_batch=16, samples_per_epoch=100)
    LightningAccumulation(scheduling={0: 2, 2: 4}, moved=())
    """
    of_an_epoch = whole("samples_per_epoch", samples_per_epoch) * schedule.tokens_per_sample
    scheduling: dict[int, int] = {}
    moved = []
    for stage in schedule.stages:
        epoch, inside = divmod(stage.threshold, of_an_epoch)
        if inside and not round_to_epochs:
            raise ValueError(
                f"{stage.threshold:,} tokens are inside of epoch {epoch}: Lightning changes "
                f"accumulation at epochs of {of_an_epoch:,} tokens alone; allow round_to_epochs"
            )
        if inside:
            epoch += 1
            moved.append(
                f"{stage.batch_size:,} samples from {epoch * of_an_epoch:,} tokens (epoch {epoch}) "
                f"instead of {stage.threshold:,}"
            )
        scheduling[epoch] = _factor(stage.batch_size, "samples_per_batch", samples_per_batch)
    return LightningAccumulation(scheduling, tuple(moved))


def hugging_face(
    schedule: BatchSizeSchedule, *, per_device_train_batch_size: int, processes: int = 1
) -> list[dict[str, int]]:
    """A plan of gradient accumulation: what ``TrainingArguments`` has to say from which step on.

    ``step`` is ``state.global_step`` and ``tokens`` what is trained when the change comes.
    Trainer reads accumulation when training starts, and where a checkpoint is resumed with another
    one it skips the wrong number of samples: change it by a callback, as ``BatchSizeCallback`` in
    ``gnsfast.integrations.transformers_batch_size`` does. Stages that are never reached are left
    out.

    Raises:
        ValueError: for a batch size that is no multiple of the samples of one forward pass.

    Source: transformers, ``TrainingArguments``: a step takes per-device batch size x processes x
    gradient accumulation steps samples.

    >>> from gnsfast.critical_batch import exports
    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> schedule = BatchSizeSchedule([(0, 32), (2000, 64)], 5000, tokens_per_sample=10)
    >>> plan = exports.hugging_face(schedule, per_device_train_batch_size=4, processes=8)
    >>> plan[1]["step"], plan[1]["tokens"], plan[1]["gradient_accumulation_steps"]
    (7, 2240, 2)
    """
    samples = whole("per_device_train_batch_size", per_device_train_batch_size) * whole(
        "processes", processes
    )
    return [
        {
            "step": stage.step,
            "tokens": stage.tokens,
            "per_device_train_batch_size": per_device_train_batch_size,
            "gradient_accumulation_steps": _factor(
                stage.batch_size, "per-device batch size x processes", samples
            ),
        }
        for stage in schedule.stages
        if stage.steps
    ]


def _factor(batch_size: int, name: str, samples: int) -> int:
    """Forward passes of a step."""
    factor, rest = divmod(batch_size, whole(name, samples))
    if rest:
        raise ValueError(f"a batch of {batch_size:,} samples is no multiple of {name} = {samples}")
    return factor
