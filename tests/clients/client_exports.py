# SPDX-License-Identifier: Apache-2.0
"""Schedules, exported, in the classes of Megatron-core and OLMo-core themselves, step by step."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clients.recipes import Recipe, version

from gnsfast.critical_batch import BatchSizeSchedule, exports

LENGTH = 10
RAMPS = [
    [(0, 8), (800, 12), (1600, 16)],
    [(0, 8), (1, 16), (160, 24)],
    [(0, 4), (333, 8), (666, 12), (999, 16), (1332, 20)],
    [(0, 1024), (5_000_000, 2048), (10_000_000, 3072)],
]
GROWTHS = [
    [(0, 4), (90, 16)],
    [(0, 4), (130, 8), (1000, 32), (3000, 64)],
    [(0, 8), (500, 24), (900, 12)],
    [(0, 16), (1600, 32)],
    [(0, 4), (50, 8), (70, 32)],
    [(0, 4), (50, 16), (90, 64)],
]


def scheduled(pairs: list[tuple[int, int]], total: int) -> tuple[BatchSizeSchedule, list[int]]:
    """A schedule, and the batch size of each step."""
    schedule = BatchSizeSchedule(pairs, total, tokens_per_sample=LENGTH)
    return schedule, [s.batch_size for s in schedule.stages for _ in range(s.steps)]


@pytest.mark.parametrize("pairs", RAMPS)
def test_megatron(pairs: list[tuple[int, int]]) -> None:
    """Its own calculator gives every step the size that the schedule gives it."""
    from megatron.core import num_microbatches_calculator as megatron

    assert version("megatron-core") == "0.16.1"
    assert not hasattr(megatron, "StepBatchsizeNumMicroBatchesCalculator")  # as the note says
    schedule, sizes = scheduled(pairs, 3 * pairs[-1][0])
    ramp = exports.megatron_ramp(schedule)
    given = [str(n) for n in (ramp.start, ramp.increment, ramp.ramp_samples)]
    megatron.init_num_microbatches_calculator(0, given, ramp.global_batch_size, 4, 1)
    taken, samples = [], 0
    try:
        while samples < ramp.train_samples:
            megatron.update_num_microbatches(samples, consistency_check=True)
            taken.append(megatron.get_current_global_batch_size())
            assert megatron.get_num_microbatches() == taken[-1] // 4
            samples += taken[-1]
    finally:
        megatron.unset_num_microbatches_calculator()
    assert taken == sizes and samples == ramp.train_samples


@pytest.mark.parametrize("pairs", GROWTHS)
def test_megatron_learning_rates(pairs: list[tuple[int, int]]) -> None:
    """Its own schedule, with the lines that we print, times √(batch size / first batch size)."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Rates

    schedule, sizes = scheduled(pairs, 3 * pairs[-1][0])
    plain = Rates.get_lr
    exec(exports.lines("megatron", schedule), {})
    try:
        group: dict[str, Any] = {"max_lr": 1.0, "min_lr": 0.1}
        total = int(schedule.total_tokens) // LENGTH
        given = (0.0, 1.0, 0.1, 20, total, "cosine", 0.1, 0.1, total, "constant")
        rates = Rates(SimpleNamespace(param_groups=[group]), *given)
        for size in sizes:
            wanted = plain(rates, group) * (size / pairs[0][1]) ** 0.5
            assert group["lr"] == pytest.approx(wanted)
            rates.step(size)
    finally:
        Rates.get_lr = plain


def with_delays(schedule: BatchSizeSchedule) -> list[int]:
    """The batch size of each step where changes come as late as ``olmo_core_late`` says."""
    taken: list[int] = []
    given = list(schedule.thresholds)
    old = given[0][1]
    for (threshold, new), late in zip(given[1:], exports.olmo_core_late(schedule)):
        if late is not None:
            while sum(taken) * LENGTH < threshold:
                taken.append(old)
            taken += [old] * late
            old = new
    while sum(taken) * LENGTH < schedule.total_tokens:
        taken.append(old)
    return taken


class Loader:
    """What a data loader of OLMo-core does with a new batch size, by its own setter."""

    def __init__(self, batch_size: int) -> None:
        from olmo_core.data.data_loader import DataLoaderBase

        self.set = DataLoaderBase.global_batch_size.fset
        self._global_batch_size, self.batches_processed = batch_size, 0
        self.rank_batch_size, self.dp_world_size = batch_size, 1

    @property
    def global_batch_size(self) -> int:
        return self._global_batch_size

    @global_batch_size.setter
    def global_batch_size(self, size: int) -> None:
        self.set(self, size)


@pytest.mark.parametrize("pairs", GROWTHS)
def test_olmo_core(pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own callback takes the fields, and its steps are the schedule's but for the late ones."""
    logging.disable(logging.INFO)
    from olmo_core.train.callbacks import BatchSizeSchedulerCallback
    from olmo_core.train.common import Duration

    schedule, _ = scheduled(pairs, 3 * pairs[-1][0])
    fields = exports.olmo_core(schedule)
    durations = [Duration(**entry) for entry in fields["schedule"]]
    callback = BatchSizeSchedulerCallback(batch_sizes=fields["batch_sizes"], schedule=durations)
    loader = Loader(fields["batch_sizes"][0])
    trainer: Any = SimpleNamespace(data_loader=loader, global_step=0, global_train_tokens_seen=0)
    trainer.epoch, trainer.train_module = 1, None
    callback.trainer = trainer

    def only_the_size(size: int) -> None:
        loader.global_batch_size = size

    monkeypatch.setattr(callback, "_update_batch_size_and_lr", only_the_size)
    taken = []
    while trainer.global_train_tokens_seen < schedule.total_tokens:
        callback.pre_load_batch()
        taken.append(loader.global_batch_size // LENGTH)
        trainer.global_train_tokens_seen += loader.global_batch_size
        trainer.global_step += 1
        loader.batches_processed += 1
    assert taken == with_delays(schedule)


SEEN = """
import torchtitan.trainer
from torchtitan.trainer import Trainer

class Seen(Trainer):
    def train_step(self, data_iterator):
        [plain], [optimizer] = self.lr_schedulers.schedulers[0].get_last_lr()[:1], self.optimizers
        factor = float(optimizer.param_groups[0]["lr"]) / plain if plain else 0.0
        self.seen = [*getattr(self, "seen", []), (self.gradient_accumulation_steps, factor)]
        super().train_step(data_iterator)

torchtitan.trainer.Trainer = Seen
"""


@pytest.mark.dist
def test_torchtitan(tmp_path: Path) -> None:
    """Its own trainer, in the lines that we print: passes and learning rates of each step."""
    schedule = BatchSizeSchedule([(0, 8), (1024, 16)], 5120, tokens_per_sample=64)
    lines = exports.lines("torchtitan", schedule, micro_batch=4, processes=2)
    build = "trainer = config.build()\n"
    edits = [(build, f"{SEEN}{lines}\ntrainer = Scheduled(config)\n")]
    edits += [('logged = written.Tags()["scalars"]\n', "logged = trainer.seen\n")]
    recipe = Recipe("torchtitan")
    ran = recipe.launch(tmp_path, 2, ours=False, edits=edits, STEPS=schedule.steps)
    passes, factors = zip(*ran.names["logged"])
    assert list(passes) == [1, 1, 2, 2, 2, 2] and schedule.steps == len(ran.losses)
    assert factors[1:] == pytest.approx([1.0, *[2**0.5] * 4])
