# SPDX-License-Identifier: Apache-2.0
"""Schedules and shrinking batches in Trainer and Lightning; what their logs say."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from controller_cases import at_least, noise
from noise_cases import ALWAYS
from test_integrations_batch_size import EPOCH, STEPS, Told, controller_of
from test_integrations_lightning import QUIET, data
from test_integrations_lightning_batch_size import EPOCHS, PER_EPOCH, Epochs, Scheduled, fit
from trainer_cases import T, by_loop, same, samples, trained, trainer_of, weights

import gnsfast
from gnsfast import NoiseScale
from gnsfast.critical_batch import BatchSizeSchedule, ScheduledBatchSize, exports
from gnsfast.critical_batch.control import wsd
from gnsfast.critical_batch.laws import aligned_changes
from gnsfast.critical_batch.rules import Rules
from gnsfast.integrations.lightning import GNSMonitor
from gnsfast.integrations.trackers import JSONLTracker
from gnsfast.integrations.transformers import GNSCallback
from gnsfast.integrations.transformers_batch_size import BatchSizeCallback

MERRILLS = [(0, 4), (30, 8), (250, 16), (400, 8), (500, 4)]  # and back, as no paper does
CHANGES = [(40, 8), (250, 16), (455, 8), (500, 4)]  # at the steps that both sizes end


def scheduled(
    thresholds: Any = MERRILLS, total: int = 5 * EPOCH, **options: Any
) -> ScheduledBatchSize:
    schedule = BatchSizeSchedule(thresholds, total, tokens_per_sample=T)
    return ScheduledBatchSize(schedule, **{"micro_batch": 2, **options})


def following(folder: Path, batch: Any, gns: Any = None, **options: Any) -> Any:
    gns = GNSCallback(**ALWAYS) if gns is None else gns
    callbacks = [gns, BatchSizeCallback(batch, gns)]
    return trainer_of(folder, **{"max_steps": STEPS, "callbacks": callbacks, **options})


def changes(batch: Any) -> list[tuple[int, int]]:
    return [(d.tokens, d.new) for d in batch.decisions if d.new != d.old]


def test_trainer_trains_a_schedule(tmp_path: Path) -> None:
    """The steps and learning rates of a loop with these batch sizes; resumed, the same bits."""
    batch = scheduled()
    trainer = following(tmp_path, batch, save_strategy="steps", save_steps=5, logging_steps=1)
    found = trained(trainer)
    assert changes(batch) == CHANGES
    steps = by_loop(loop := trainer_of(tmp_path / "by-loop", max_steps=STEPS), batch)
    assert same(found, weights(loop))
    logs = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert [line["learning_rate"] for line in logs] == [rate for _, _, rate in steps]
    assert trainer.state.global_step == STEPS and logs[-1]["batch/size"] == 4.0
    places = sorted(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    assert len(places) > 4
    for place in places[::2]:
        again = scheduled()
        other = following(tmp_path, again)
        assert same(trained(other, resume_from_checkpoint=str(place)), found), place
        assert again.state_dict() == batch.state_dict()
    other = following(tmp_path, scheduled([(0, 4), (30, 8)]))
    with pytest.raises(
        ValueError, match=r"the state was saved with thresholds=.*change=\['thresholds'\]"
    ):
        other.train(resume_from_checkpoint=str(places[1]))


@pytest.mark.parametrize(
    "thresholds",
    [
        [(0, 4), (600, 8)],
        [(0, 4), (30, 8), (250, 16)],  # both come late
        [(0, 4), (50, 8), (70, 32)],  # at 80 tokens 32 is due, and waits until 160
        [(0, 4), (150, 12), (180, 8), (600, 4)],  # 12 still waits when 8 is due
        [(0, 4), (150, 12), (250, 8)],  # a step of 12 ends at 60 samples, but none of 8
    ],
)
def test_the_export_counts_as_trainer_does(
    tmp_path: Path, thresholds: list[tuple[int, int]]
) -> None:
    """Its max_steps trains all tokens, and its steps are those of the changes."""
    schedule = BatchSizeSchedule(thresholds, 1001, tokens_per_sample=T)
    made = [c for c in aligned_changes(schedule) if c.samples is not None]
    steps = exports.first_steps(schedule)
    scope: dict[str, Any] = {}
    exec(exports.lines("huggingface", schedule, micro_batch=2), scope)
    batch, gns = scope["batch"], scope["gns"]
    trainer = following(tmp_path, batch, gns, max_steps=steps, data=samples(4 * steps))
    trained(trainer)
    logs = [line for line in trainer.state.log_history if "batch/decision" in line]
    assert [(line["step"], line["batch/size"]) for line in logs] == [
        (c.samples // thresholds[0][1], c.new) for c in made
    ]
    assert changes(batch) == [(c.samples * T, c.new) for c in made]
    assert batch.tokens >= 1001 and steps == 51 > schedule.steps


WSD_CASES = [
    [(0, 4), (600, 8)],
    [(0, 4), (30, 8), (250, 16)],
    [(0, 4), (50, 8), (70, 32)],  # the last step of 32 goes beyond the total
]


def final_rates(scheduler: Any, rates: list[float], factor: float) -> None:
    """Warm-up, stable, decay: the rate after the last token is the final one, and that of the last
    step is not yet.
    """
    (peak,) = {*scheduler.base_lrs}
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 * peak * factor)
    assert 0.1 < rates[-1] / peak / factor < rates[0] / peak == 1


@pytest.mark.parametrize("thresholds", WSD_CASES)
def test_trainers_decay_ends_with_the_last_token(
    tmp_path: Path, thresholds: list[tuple[int, int]]
) -> None:
    schedule = BatchSizeSchedule(thresholds, 1001, tokens_per_sample=T)
    steps, scope = exports.first_steps(schedule), {}
    exec(exports.lines("huggingface", schedule, micro_batch=2), scope)
    decay = {"num_decay_steps": 30, "decay_type": "linear", "min_lr_ratio": 0.1}
    how = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": decay}
    how |= {"warmup_steps": 0, "logging_steps": 1, "data": samples(4 * steps)}
    trainer = following(tmp_path, scope["batch"], scope["gns"], max_steps=steps, **how)
    trained(trainer)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    final_rates(trainer.lr_scheduler, rates, scope["batch"].lr_factor)


class Wsd(Scheduled):
    def configure_optimizers(self) -> Any:
        shape = wsd(STEPS_IN_ALL, decay=STEPS_IN_ALL // 2, final=0.1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


STEPS_IN_ALL = 12 * EPOCHS // 2  # of 16 samples, two micro-batches each; no short one


@pytest.mark.parametrize("thresholds", [[(0, 16)], [(0, 16), (60, 32), (200, 64)]])
def test_lightnings_decay_ends_with_the_last_token(
    tmp_path: Path, thresholds: list[tuple[int, int]]
) -> None:
    schedule = BatchSizeSchedule(thresholds, 16 * STEPS_IN_ALL, 1)
    module, batch = Wsd("step"), ScheduledBatchSize(schedule, micro_batch=8)
    trainer, _ = fit(tmp_path, module, [], controller=batch, loader=Epochs(data(12)))
    assert exports.first_steps(schedule) == STEPS_IN_ALL
    final_rates(trainer.lr_scheduler_configs[0].scheduler, module.rates, batch.lr_factor)


def test_a_training_that_ends_before_its_schedule(tmp_path: Path) -> None:
    """Within the factor of two that a controller may be off, a third of the tokens."""
    schedule = BatchSizeSchedule([(0, 4), (300, 8)], 1001, tokens_per_sample=T)
    data, total = samples(240), int(schedule.total_tokens)
    for steps in (schedule.steps, 45, 57):
        batch = ScheduledBatchSize(schedule, micro_batch=2)
        said = f"total_tokens=1,001, but this training has {20 * steps:,}: .* are 51 steps of the"
        with pytest.raises(ValueError, match=said):
            following(tmp_path, batch, max_steps=steps, data=data).train()
    trained(following(tmp_path, scheduled([(0, 4)])))  # five epochs that end in half a micro-batch
    for steps in (49, 52):  # less than its largest step off
        batch = scheduled(schedule.thresholds, total)
        trained(following(tmp_path, batch, max_steps=steps, data=data))
        assert abs(batch.tokens - total) <= 8 * T


def test_decisions_in_trainers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gnsfast")
    batch = scheduled()
    trainer = following(tmp_path, batch, logging_steps=3)
    trained(trainer)
    entries = [line for line in trainer.state.log_history if "batch/decision" in line]
    assert [(line["step"], line["batch/size"]) for line in entries] == [
        (2, 8.0),
        (14, 16.0),
        (25, 8.0),
        (28, 4.0),
    ]
    said = "the schedule has 8 samples from 30 tokens on"
    assert entries[0]["batch/decision"] == said
    first, *decisions = caplog.records
    assert "of 5 parameters are measured" in first.getMessage()
    assert decisions[0].getMessage() == f"40 tokens: {said}"
    assert {r.levelname for r in decisions} == {"INFO"} and len(decisions) == 4


def test_a_decision_takes_no_logs_place(tmp_path: Path) -> None:
    """Step 3 falls into the step from 2 to 4, at whose end the batch grows again."""
    batch = scheduled([(0, 4), (30, 8), (60, 16)], 3 * EPOCH)
    trainer = following(tmp_path, batch, logging_steps=3, max_steps=21)
    trained(trainer)
    assert changes(batch) == [(40, 8), (80, 16)]
    steps = [line["step"] for line in trainer.state.log_history if "learning_rate" in line]
    assert steps[0] == 4


class Falling(Told):
    """The critical batch size falls below 4 samples from 300 tokens on."""

    def compute(self) -> NoiseScale:
        found = super().compute()
        return noise(1.0) if self.controller.tokens >= 300 else found


def test_trainer_shrinks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a loop does, and back: with betas and weight decay of the first batch size."""
    options: dict[str, Any] = {"betas": "half_life", "weight_decay": "timescale"}
    caplog.set_level(logging.INFO, "gnsfast")

    def made() -> tuple[Any, Any]:
        controller = controller_of(min_batch_size=4, **options)
        gns = Falling(controller, [20, 150])
        how = {"weight_decay": 0.3, "save_strategy": "steps", "save_steps": 6}
        return following(tmp_path, controller, gns, **how), controller

    trainer, controller = made()
    found = trained(trainer)
    assert [new for _, new in changes(controller)] == [8, 16, 8, 4]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    group = trainer.optimizer.param_groups[0]
    assert group["betas"] == (0.9, pytest.approx(0.999))
    assert group["weight_decay"] == pytest.approx(0.3)
    for place in sorted(tmp_path.glob("checkpoint-*")):
        other, again = made()
        assert same(trained(other, resume_from_checkpoint=str(place)), found), place
        assert again.state_dict() == controller.state_dict()


def test_sizes_that_a_trainer_cannot_count(tmp_path: Path) -> None:
    for batch, said in (
        (scheduled([(0, 8), (100, 4)]), "batch size of 4 is no multiple of the first one, 8"),
        (scheduled([(0, 8), (100, 12)]), "batch size of 12 is no multiple of the first one"),
    ):
        with pytest.raises(ValueError, match=said):
            following(tmp_path, batch, gradient_accumulation_steps=4).train()
    with pytest.raises(
        ValueError,
        match=r"begins with 8 samples, .* steps have 4: give the Trainer 4 .* be \(0, 4\)",
    ):
        following(tmp_path, scheduled([(0, 8), (100, 16)])).train()
    with pytest.raises(
        ValueError, match="a batch size of 32 is more than the 26 samples of an epoch"
    ):
        following(tmp_path, scheduled([(0, 4), (100, 32)])).train()


def test_old_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"total_tokens": 2 * EPOCH}
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 7, "max_steps": 7}
    trained(following(tmp_path, controller_of(**options), **how))
    place = tmp_path / "checkpoint-7" / "trainer_state.json"
    state = json.loads(place.read_text())
    saved = state["stateful_callbacks"]["_ControllerState"]["attributes"]["controller"]
    saved["format"] = 2
    place.write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match="is a 'batch size controller' of format 2, but this version"
    ):
        again = following(tmp_path, controller_of(**options), **how | {"max_steps": 14})
        again.train(resume_from_checkpoint=str(place.parent))


def test_trainer_flags_without_a_controller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gnsfast.GradientNoiseScale, "compute", lambda gns: at_least(40.0))
    trainer = trainer_of(tmp_path, logging_steps=6, callbacks=[GNSCallback(**ALWAYS, factor=2.0)])
    trained(trainer)
    logs = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert [(line["batch/flag"], line["cbs/estimate_lo"]) for line in logs] == [(-1.0, 80.0)] * 3
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "the batch size is too small: the critical batch size is at least 80, 5 times the batch "
        "size of 16"
    )
    with pytest.raises(ValueError, match="factor must be positive"):
        GNSCallback(**ALWAYS, factor=0.0)


def test_lightning_trains_a_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The batches, losses and learning rates of a loop; decisions in the tracker and the logger."""
    caplog.set_level(logging.INFO, "gnsfast")
    total = 8 * PER_EPOCH * EPOCHS
    schedule = BatchSizeSchedule([(0, 16), (60, 32), (200, 64), (320, 16)], total, 1)
    rules = vars(Rules("sqrt", "half_life", "timescale"))
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    module = Scheduled("step")
    batch = ScheduledBatchSize(schedule, micro_batch=8, **rules)
    trainer, _ = fit(tmp_path, module, [], controller=batch, tracker=tracker)
    tracker.close()
    assert [(d.tokens // 8, d.new // 8) for d in batch.decisions] == [(8, 4), (26, 8), (47, 2)]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [r["new"] for r in lines if r.get("kind") == "decision"] == [32, 64, 16]
    assert [r.getMessage() for r in caplog.records if r.name == "gnsfast"][1] == (
        "64 tokens: the schedule has 32 samples from 60 tokens on"
    )
    group = trainer.optimizers[0].param_groups[0]
    assert group["betas"] == (0.9, pytest.approx(0.999))
    log = BatchSizeSchedule.from_log(tmp_path, total_tokens=total, tokens_per_sample=1)
    assert log.thresholds == ((0, 16), (64, 32), (208, 64), (376, 16))


def test_lightning_flags_without_a_controller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gnsfast.GradientNoiseScale, "compute", lambda gns: noise(1.0))
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    options = {**QUIET, "max_epochs": 1, "log_every_n_steps": 5, "default_root_dir": tmp_path}
    trainer = pl.Trainer(callbacks=[GNSMonitor(**ALWAYS, factor=1.0, tracker=tracker)], **options)
    trainer.fit(Scheduled(), Epochs(data(PER_EPOCH)))
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["batch/flag"] for line in lines] == [1.0, 1.0]
    [said] = [r.getMessage() for r in caplog.records if r.name == "gnsfast"]
    assert said.startswith("the batch size is too large: the critical batch size is at most 3")
