# SPDX-License-Identifier: Apache-2.0
"""Lines of code that move the learning rate with the batch size in other frameworks.

Most of their formats hold batch sizes alone. Without these lines a run keeps the learning rate of
its first batch size.
"""

from collections.abc import Mapping

from gnsfast.counts import exact_count
from gnsfast.critical_batch.laws.schedule import BatchSizeSchedule


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
    return "\n".join(
        (
            "from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler",
            "",
            f"FACTORS = {factors}  # samples trained: factor of the learning rate",
            "plain = OptimizerParamScheduler.get_lr",
            "OptimizerParamScheduler.get_lr = lambda self, group: plain(self, group) * (",
            "    FACTORS[max(samples for samples in FACTORS if samples <= self.num_steps)]",
            ")",
        )
    )


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
    by_epoch = '{"scheduler": scheduler, "interval": "epoch"}'
    return "\n".join(
        (
            f"FACTORS = {dict(lr_factors)}  # epoch: factor of the learning rate",
            "scheduler = torch.optim.lr_scheduler.LambdaLR(",
            "    optimizer, lambda epoch: FACTORS[max(e for e in FACTORS if e <= epoch)]",
            ")",
            f'return {{"optimizer": optimizer, "lr_scheduler": {by_epoch}}}',
        )
    )


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
    check_multiples(schedule)
    pairs = [(int(tokens), size) for tokens, size in schedule.thresholds]
    length, first = schedule.tokens_per_sample, schedule.thresholds[0][1]
    return "\n".join(
        (
            "from gnsfast.critical_batch import BatchSizeSchedule, ScheduledBatchSize",
            "from gnsfast.integrations.transformers import GNSCallback",
            "from gnsfast.integrations.transformers_batch_size import BatchSizeCallback",
            "",
            f"schedule = BatchSizeSchedule({pairs}, {int(schedule.total_tokens)}, "
            f"tokens_per_sample={length})",
            "batch = ScheduledBatchSize(",
            f'    schedule, lr="{lr}", data_parallel={processes}, micro_batch={micro_batch}',
            ")",
            "gns = GNSCallback()  # Trainer(model=gnsfast.convert(model), callbacks=callbacks)",
            "callbacks = [gns, BatchSizeCallback(batch, gns)]",
            f"# TrainingArguments(max_steps={hugging_face_max_steps(schedule)}, "
            f"per_device_train_batch_size={micro_batch},",
            f"#     gradient_accumulation_steps={first // (micro_batch * processes)})",
        )
    )


def hugging_face_max_steps(schedule: BatchSizeSchedule) -> int:
    """``TrainingArguments(max_steps=...)``, which counts steps of the first batch size.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, exports
    >>> schedule = BatchSizeSchedule([(0, 32), (10_000, 64)], 20_000, tokens_per_sample=10)
    >>> schedule.steps, exports.hugging_face_max_steps(schedule)
    (48, 63)
    """
    return -(
        -int(schedule.total_tokens) // (schedule.thresholds[0][1] * schedule.tokens_per_sample)
    )


def check_multiples(schedule: BatchSizeSchedule) -> None:
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
    rows = []
    for stage in schedule.stages:
        passes, rest = divmod(stage.batch_size, micro_batch * processes)
        if rest:
            raise ValueError(
                f"a batch of {stage.batch_size:,} samples must be a multiple of "
                f"{micro_batch * processes:,}, the samples of one forward pass"
            )
        if stage.steps:
            done = stage.tokens / first
            factor = schedule.lr_factor_at(stage.tokens, lr)
            row = stage.step, int(done) if done == int(done) else done, passes, factor
            rows.append(f"    {row},")
    return "\n".join(
        (
            f"max_iters = {schedule.steps - 1}  # its loop takes one more",
            f"lr_decay_iters = {-(-int(schedule.total_tokens) // first)}",
            "STAGES = (  # iteration, steps of the first batch so far, micro-batches, "
            "learning-rate factor",
            *rows,
            ")",
            "",
            "# in the loop",
            "    stage = max(stage for stage in STAGES if stage[0] <= iter_num)",
            "    begins, done, gradient_accumulation_steps, factor = stage",
            "    it = done + (iter_num - begins) * gradient_accumulation_steps / STAGES[0][2]",
            "    lr = factor * (get_lr(it) if decay_lr else learning_rate)",
        )
    )
