# SPDX-License-Identifier: Apache-2.0
"""A batch size that grows in Trainer: the same steps as another loop's, counted in its data."""

import json
from pathlib import Path
from typing import Any

import controller_cases
import pytest
import torch
import transformers as hf
from controller_cases import noise
from noise_cases import ALWAYS
from processes import as_launched, spawn
from trainer_cases import (
    SCALED,
    Deaf,
    Model,
    T,
    by_loop,
    same,
    samples,
    scaled,
    trained,
    trainer_of,
    weights,
)

from gnsfast.critical_batch.control import BatchSizeController
from gnsfast.integrations.trackers import JSONLTracker
from gnsfast.integrations.transformers import GNSCallback
from gnsfast.integrations.transformers_batch_size import BatchSizeCallback

EPOCH, STEPS = 25 * T, 35  # five epochs of 7 steps of 4 samples; their last ones have one sample


class Told(controller_cases.Told, GNSCallback):
    at_first = 8.0


def controller_of(**changes: Any) -> BatchSizeController:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "factor": 1.0,
        "tokens_per_sample": T,
        "total_tokens": 5 * EPOCH,
        "max_batch_size": 16,
        "calibrate": 0.0,
        "patience": 1,
        "check_every": 1,
        "micro_batch": 2,
    }
    return BatchSizeController(**settings | changes)


class Seeing(hf.Trainer):
    """Notes what every micro-batch is trained with."""

    seen: list[Any]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        labels, given = inputs["labels"], num_items_in_batch
        self.seen.append((int((labels != -100).sum()), int(given), len(labels)))
        return super().training_step(model, inputs, num_items_in_batch)


def growing(
    folder: Path, places: list[int], tracker: Any = None, **options: Any
) -> tuple[Any, BatchSizeController]:
    changes = options.pop("controller", {})
    controller = controller_of(**changes)
    gns = Told(controller, places, tracker=tracker, **{**ALWAYS, **options.pop("gns", {})})
    callbacks = [BatchSizeCallback(controller, gns), gns]
    options = {"max_steps": STEPS, "callbacks": callbacks, **options}
    trainer = trainer_of(folder, **options)
    trainer.__class__ = Seeing
    trainer.seen = []
    return trainer, controller


def test_loss_that_is_not_divided(tmp_path: Path) -> None:
    """It grows with the accumulation; a run that does not grow is measured all the same."""
    model, gns = Deaf(), {"loss": "samples"}
    trainer, _ = growing(tmp_path, [0], model=model, gns=gns)
    with pytest.raises(ValueError, match="BatchSizeCallback: Deaf does not divide its loss"):
        trainer.train()
    alone, seen = GNSCallback(**ALWAYS, **gns), []
    alone.first = lambda inputs, items: seen.append(items)
    trainer_of(tmp_path, model=Deaf(), callbacks=[alone]).train()
    assert alone.compute().updates and len(seen) == 1  # the first micro-batch alone


@pytest.mark.parametrize(
    ("places", "grown"),
    [
        ([0], [(40, 8)]),
        ([30, 300], [(80, 8), (375, 16)]),  # in the middle of an epoch; at the end of one
        ([80, 81], [(120, 8), (125, 16)]),  # before an epoch's last step, of one sample
        ([120], [(125, 8)]),
    ],
)
def test_growth(tmp_path: Path, places: list[int], grown: list[Any]) -> None:
    trainer, controller = growing(tmp_path, places, logging_steps=1)
    found = trained(trainer)
    kinds = {type(c).__name__ for c in trainer.callback_handler.callbacks}
    assert kinds == {"BatchSizeCallback", "DefaultFlowCallback", "Told"}  # and no leftover
    assert [(d.tokens, d.new) for d in controller.decisions if d.new != d.old] == grown
    steps = by_loop(loop := trainer_of(tmp_path, max_steps=STEPS), controller)
    assert same(found, weights(loop))
    assert trainer.state.global_step == STEPS and trainer.state.epoch == 5.0
    assert trainer.args.gradient_accumulation_steps == 2
    assert trainer.lr_scheduler.last_epoch == STEPS
    logs = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert [line["step"] for line in logs] == [step for step, _, _ in steps]
    assert [line["learning_rate"] for line in logs] == [rate for _, _, rate in steps]
    assert [line["loss"] for line in logs] == pytest.approx([loss for _, loss, _ in steps], 1e-5)
    assert logs[-1]["batch/size"] == controller.batch_size
    # every sample once an epoch, and each micro-batch divided by the labels of its own step
    each_epoch = [trainer.seen[k : k + 13] for k in range(0, 65, 13)]
    total = sum(int((s["labels"] != -100).sum()) for s in samples(25))
    assert len(trainer.seen) == 65
    assert all(sum(own for own, _, _ in epoch) == total for epoch in each_epoch)
    done, step = 0, 0
    while done < 65:
        given = trainer.seen[done][1]
        count = next(
            n for n in range(1, 9) if sum(o for o, _, _ in trainer.seen[done : done + n]) == given
        )
        assert all(items == given for _, items, _ in trainer.seen[done : done + count])
        done, step = done + count, step + 1
    assert step == len(steps)


@pytest.mark.parametrize(
    ("options", "end"), [({"num_train_epochs": 5, "max_steps": -1}, 35), ({"max_steps": 31}, 32)]
)
def test_where_training_ends(tmp_path: Path, options: Any, end: int) -> None:
    """With the epochs, or with the first step that reaches max_steps; logs every 4 steps' worth of
    data where a grown step goes over it.
    """
    trainer, _ = growing(tmp_path, [0, 200], logging_steps=4, **options)
    trained(trainer)
    steps = [line["step"] for line in trainer.state.log_history if "learning_rate" in line]
    assert steps == [4, 9, 13, 18, 21, 25, 28, 32] and trainer.state.global_step == end


def test_logs_between_steps_are_means_over_the_data(tmp_path: Path) -> None:
    trainer, controller = growing(tmp_path, [1], logging_steps=5)
    trained(trainer)
    steps = by_loop(trainer_of(tmp_path, max_steps=STEPS), controller)
    weighted, before = [], 0
    for step, loss, _ in steps:
        weighted.append((step, (step - before) * loss))
        before = step
    begun = 0
    for line in (line for line in trainer.state.log_history if "learning_rate" in line):
        own = [loss for step, loss in weighted if begun < step <= line["step"]]
        assert line["loss"] == pytest.approx(sum(own) / (line["step"] - begun), rel=1e-5)
        begun = line["step"]
    whole = sum(loss for _, loss in weighted) / STEPS
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(whole, rel=1e-5)


def test_steps_that_a_scaler_skips(tmp_path: Path) -> None:
    """The schedule waits for as much data as they had, in a resumed run too."""
    options: dict[str, Any] = {**SCALED, "save_strategy": "steps", "save_steps": 9}
    trainer, controller = growing(tmp_path, [0], **options)
    found = trained(scaled(trainer))
    assert 20 < trainer.lr_scheduler.last_epoch < trainer.state.global_step == STEPS
    by_loop(loop := scaled(trainer_of(tmp_path, max_steps=STEPS, **SCALED)), controller)
    assert same(found, weights(loop))
    checkpoint = str(tmp_path / "checkpoint-18")
    other = scaled(growing(tmp_path, [0], **SCALED)[0])
    assert same(trained(other, resume_from_checkpoint=checkpoint), found)


def test_resumed_at_every_checkpoint(tmp_path: Path) -> None:
    """The right batch size, place in the data, learning rate and beta2; the same bits."""
    options: dict[str, Any] = {
        "controller": {"betas": "half_life", "weight_decay": "timescale"},
        "weight_decay": 0.3,
        "save_strategy": "steps",
        "save_steps": 5,
        "restore_callback_states_from_checkpoint": True,
    }
    trainer, controller = growing(tmp_path, [60, 300], **options)
    whole = trained(trainer)
    decays = [pytest.approx(0.3 * 2), 0.0]  # Trainer spares biases and norms
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.999**2**2)
    assert [g["weight_decay"] for g in trainer.optimizer.param_groups] == decays
    places = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("checkpoint-*"))
    assert places == [5, 11, 16, 20, 25, 32, 35]
    for place in places[::2]:
        other, again = growing(tmp_path, [60, 300], **options | {"save_strategy": "no"})
        found = trained(other, resume_from_checkpoint=str(tmp_path / f"checkpoint-{place}"))
        assert same(found, whole)
        assert again.state_dict() == controller.state_dict()
        assert other.optimizer.param_groups[0]["betas"] == (0.9, 0.999**2**2)
        assert [g["weight_decay"] for g in other.optimizer.param_groups] == decays
        assert other.state.global_step == STEPS
        last = [line for line in other.state.log_history if "train_loss" in line][-1]
        assert last["step"] == STEPS


def test_tracker_gets_decisions(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path / "run.jsonl")
    how = dict(logging_steps=7, max_steps=14, controller={"total_tokens": 400})
    trained(growing(tmp_path, [0], tracker, **how)[0])
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    decisions = [line for line in lines if line.get("kind") == "decision"]
    assert [(d["old"], d["new"]) for d in decisions] == [(4, 8)]
    logged = [line for line in lines if "kind" not in line]
    assert [line["batch/size"] for line in logged] == [8.0, 8.0]
    assert logged[0].keys() >= {"loss", "cbs/estimate_lo", "gns/b_simple_lo"}


def test_refusals(tmp_path: Path) -> None:
    for changes, match in (
        ({"total_tokens": 10**6}, "has 650: 5 epochs of 26 samples with tokens_per_sample=5"),
        ({"micro_batch": 1}, "micro_batch=1, but the Trainer has 2"),
        ({"batch_size": 8}, "batch_size=8, but the Trainer has 4"),
        ({"data_parallel": 2}, "data_parallel=2, but the Trainer has 1"),
        ({"max_batch_size": 32}, "a batch size of 32 is more than the 26 samples of an epoch"),
    ):
        with pytest.raises(ValueError, match=match):
            growing(tmp_path, [1], controller=changes)[0].train()
    for options, match in (
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"train_sampling_strategy": "batch_rebalance"}, "BatchRebalanceSampler"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "the schedule ReduceLROnPlateau"),
    ):
        if "lr_scheduler_type" in options:
            options |= {"eval_strategy": "steps", "eval_dataset": samples(2)}
        with pytest.raises(NotImplementedError, match=f"not support.*{match}"):
            growing(tmp_path, [1], **options)[0].train()
    trainer, _ = growing(tmp_path, [1], controller={"betas": "sde"}, optim="sgd")
    with pytest.raises(ValueError, match="has no betas to change: pass betas='keep'"):
        trainer.train()
    assert trainer.seen == []  # before the first step, not at the first growth
    used = controller_of()
    used.update(100, noise(1.0))
    gns = GNSCallback(**ALWAYS)
    with pytest.raises(
        ValueError, match="the controller is at 100 tokens, so it has controlled another"
    ):
        trainer_of(tmp_path, callbacks=[gns, BatchSizeCallback(used, gns)]).train()
    with pytest.raises(ValueError, match="is not among the Trainer's callbacks"):
        trainer_of(tmp_path, callbacks=[BatchSizeCallback(controller_of(), gns)]).train()


def two_processes(rank: int, folder: str) -> None:
    as_launched(rank)
    options = {"gradient_accumulation_steps": 1, "ddp_backend": "gloo", **OF_TWO}
    model = Model(0.0)
    trainer, controller = growing(
        Path(folder), [0], controller={"data_parallel": 2}, model=model, **options
    )
    found = trained(trainer)
    torch.save((found, controller.state_dict()["decisions"]), f"{folder}/{rank}.pt")


OF_TWO: dict[str, Any] = {"data": samples(24), "max_steps": 18}


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive")
def test_two_processes(tmp_path: Path) -> None:
    """As one that accumulates twice as many micro-batches."""
    spawn(two_processes, 2, (str(tmp_path),), method="fork")
    trainer, controller = growing(tmp_path, [0], model=Model(0.0), **OF_TWO)
    truth = trained(trainer)
    for rank in range(2):
        found, decisions = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert decisions == controller.state_dict()["decisions"] and len(decisions) == 1
        for name in truth.keys() - {"calls"}:
            torch.testing.assert_close(found[name], truth[name], rtol=1e-4, atol=1e-5)


class Fails(hf.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 6:
            raise MemoryError("here")


def test_after_an_error(tmp_path: Path) -> None:
    """Trainer would look for its place in the data with the grown accumulation."""
    trainer, _ = growing(tmp_path, [1], save_strategy="steps", save_steps=5)
    trainer.add_callback(Fails)
    with pytest.raises(MemoryError):
        trainer.train()
    with pytest.raises(ValueError, match="error and left gradient_accumulation_steps=4"):
        trainer.train(resume_from_checkpoint=True)
    checkpoint = str(next(tmp_path.glob("checkpoint-*")))
    other, _ = growing(tmp_path, [1], gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="=4, but the Trainer has 8"):
        other.train(resume_from_checkpoint=checkpoint)
    other, _ = growing(tmp_path, [1], gradient_accumulation_steps=4, controller={"batch_size": 8})
    with pytest.raises(ValueError, match="the run began with gradient_accumulation_steps=2"):
        other.train(resume_from_checkpoint=checkpoint)
