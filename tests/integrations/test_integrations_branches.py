# SPDX-License-Identifier: Apache-2.0
"""A TrainerRun is ``trainer.train()``, bit for bit, and so is what it restores."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from trainer_cases import Divided, Model, T, same, samples, trained, trainer_of, weights

import gnsfast
from gnsfast.critical_batch.branches import measure_critical_batch
from gnsfast.integrations.transformers_branches import TrainerRun

EPOCH = 25 * T


def run_of(folder: Path, checkpoint: Any = None, **options: Any) -> TrainerRun:
    return TrainerRun(trainer_of(folder, **options), checkpoint, tokens_per_sample=T)


def base(run: TrainerRun, tokens: int) -> list[Any]:
    return list(run.train(tokens, batch_size=run.batch_size, lr_factor=1.0))


def masked(features: list[Any]) -> dict[str, Tensor]:
    """A collator that draws random numbers: from torch, NumPy and Python."""
    import random

    import numpy as np

    batch = hf.default_data_collator(features)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    hidden[:, np.random.randint(T)] = random.random() < 0.5
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "random collator": {"data_collator": masked},
    "order without a seed": {"accelerator_config": {"use_seedable_sampler": False}},
    "both": {"data_collator": masked, "train_sampling_strategy": "group_by_length"},
    "no clipping, dropped samples": {"max_grad_norm": 0.0, "dataloader_drop_last": True},
    "divided by Trainer": {"model": Divided},
    "workers": {"dataloader_num_workers": 1, "max_steps": 9},
}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_trainer_and_restores(tmp_path: Path, case: str) -> None:
    """Over the ends of two epochs, with a save and other branches at three places on the way."""
    options = CASES[case]
    truth = trained(trainer := trainer_of(tmp_path, **options))
    run = run_of(tmp_path, **options)
    last, losses = run._tokens_at_the_end(), []
    places = {3, 7, 11} if case != "workers" else {3}
    for k, step in enumerate(run.train(last, batch_size=4, lr_factor=1.0)):
        losses.append(step)
        if k in places:
            (folder := tmp_path / str(k)).mkdir()
            run.save(folder)
    assert run.tokens == last == sum(step.tokens for step in losses)
    assert same(weights(run.trainer), truth)
    for k in sorted(places, reverse=True):
        other = run_of(tmp_path, **options) if k == 7 or case == "workers" else run
        other.restore(tmp_path / str(k))
        done = sum(step.tokens for step in losses[: k + 1])
        assert other.tokens == done and other.trainer.state.global_step == k + 1
        other.save(tmp_path)
        list(other.train(30, batch_size=6, lr_factor=2.0))  # a branch, which leaves nothing
        other.restore(tmp_path)
        assert base(other, last - done) == losses[k + 1 :]
        assert same(weights(other.trainer), truth)
        assert torch.equal(other.trainer.model.seen, trainer.model.seen)


def test_losses_are_those_that_trainer_logs(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, logging_steps=1)
    trained(trainer)
    logged = [line for line in trainer.state.log_history if "learning_rate" in line]
    run = run_of(tmp_path)
    for k, step in enumerate(run.train(run._tokens_at_the_end(), batch_size=4, lr_factor=1.0)):
        assert step.loss == pytest.approx(logged[k]["loss"], rel=1e-6)
        assert run.trainer.optimizer.param_groups[0]["lr"] == logged[k]["learning_rate"]
        assert run.trainer.state.global_step == logged[k]["step"]
        assert run.trainer.state.epoch == pytest.approx(logged[k]["epoch"])
    assert k == 17


@pytest.mark.parametrize("step", [5, 7, 10])
def test_from_a_checkpoint(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, at its end, in the next one; as Trainer's own resume."""
    whole = trained(trainer_of(tmp_path, save_strategy="steps", save_steps=step))
    folder = tmp_path / f"checkpoint-{step}"
    assert same(trained(trainer_of(tmp_path), resume_from_checkpoint=str(folder)), whole)
    run = run_of(tmp_path, folder)
    assert run.tokens == {5: 20 * T, 7: EPOCH, 10: EPOCH + 12 * T}[step]
    (saved := tmp_path / "saved").mkdir()
    run.save(saved)
    for _ in range(2):
        base(run, run._tokens_at_the_end() - run.tokens)
        assert same(weights(run.trainer), whole)
        run.restore(saved)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("times", [2, 3])
def test_larger_batch_is_a_trainer_that_accumulates_more(
    tmp_path: Path, times: int, kind: str
) -> None:
    """To the bit where the schedule is constant; else with that of the data's position."""
    options: dict[str, Any] = {"lr_scheduler_type": kind, "warmup_steps": 0}
    factor, run = times**0.5, run_of(tmp_path, **options)
    rates = []
    for _ in run.train((25 + 4) * T, batch_size=4 * times, lr_factor=factor):
        rates.append(run.trainer.optimizer.param_groups[0]["lr"])
    # 13 micro-batches: at k = 2 steps begin at 0, 4, 8, 12 of them, the last one is short
    begun = {2: [0, 2, 4, 6, 7], 3: [0, 3, 6, 7]}[times]
    truth = trainer_of(tmp_path, **options)
    lr = truth.args.learning_rate
    truth.create_optimizer_and_scheduler(18)
    schedule = truth.lr_scheduler.lr_lambdas[0]
    assert rates == [lr * schedule(b) * factor for b in begun]
    if kind == "constant":
        more = trainer_of(
            tmp_path,
            **options | {"gradient_accumulation_steps": 2 * times, "max_steps": len(begun)},
            learning_rate=lr * factor,
        )
        assert same(trained(more), weights(run.trainer))


def test_branch_moves_betas_and_weight_decay(tmp_path: Path) -> None:
    """As a Trainer with these arguments, to the bit; the run has its own again afterwards."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer = trainer_of(tmp_path, **options, weight_decay=0.3)
    rules = {"betas": "half_life", "weight_decay": "timescale"}
    run = TrainerRun(trainer, tokens_per_sample=T, **rules)
    steps = list(run.train(25 * T, batch_size=8, lr_factor=2**0.5))
    more = trainer_of(
        tmp_path,
        **options | {"gradient_accumulation_steps": 4, "max_steps": len(steps)},
        learning_rate=trainer.args.learning_rate * 2**0.5,
        adam_beta2=0.999**2,
        weight_decay=0.3 * (2 / 2**0.5),
    )
    assert same(trained(more), weights(run.trainer))
    assert [g["weight_decay"] for g in trainer.optimizer.param_groups] == [0.3, 0.0]
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert run.branch_settings() == rules


def test_smaller_batch_between_two_steps_of_the_schedule(tmp_path: Path) -> None:
    """In an epoch's last, short step of the unbranched run too: 13 micro-batches by 2, 14 by 4."""
    run = run_of(tmp_path, data=samples(28), gradient_accumulation_steps=4, max_steps=4)
    rates = []
    for _ in run.train(28 * T, batch_size=2, lr_factor=1.0):
        rates.append(run.trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([3e-2 * s / 4 for s in [k / 4 for k in range(12)] + [3.0, 3.5]])
    run, rates = run_of(tmp_path, max_steps=14), []
    for step in run.train(EPOCH + 4 * T, batch_size=2, lr_factor=0.5):
        rates.append(run.trainer.optimizer.param_groups[0]["lr"])
        assert step.tokens == (T if run.tokens == EPOCH else 2 * T)
    at = [k / 2 for k in range(13)] + [7.0, 7.5]
    linear = [min(s / 4, (14 - s) / (14 - 4)) for s in at]
    assert rates == pytest.approx([3e-2 * 0.5 * f for f in linear], rel=1e-12)


def test_noise_scale_and_evaluation_leave_nothing(tmp_path: Path) -> None:
    truth = trained(trainer_of(tmp_path))
    run = run_of(tmp_path, eval_dataset=samples(7))
    base(run, 8 * 4 * T)
    assert run.evaluate is not None
    first, loss = run.noise_scale(), run.evaluate()
    assert first is not None and first.updates + first.skipped == 32 and first.adam is not None
    assert first.adam.noise_scale > 0 and first.adam.noise_scale != first.noise_scale
    assert run.noise_scale() == first and run.evaluate() == loss
    assert run.trainer.state.log_history == []
    base(run, run._tokens_at_the_end() - run.tokens)
    assert same(weights(run.trainer), truth)


def test_noise_scale_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Under both metrics, in the order of the data, across the end of an epoch."""
    model = Model(dropout=0.0)
    trainer = trainer_of(tmp_path, model=model)
    run = TrainerRun(trainer, tokens_per_sample=T, updates=4)
    base(run, 5 * 4 * T)
    found = run.noise_scale()
    optimizer = trainer.optimizer.optimizer
    gns = gnsfast.GradientNoiseScale(
        model, loss_reduction="sum", metric="adam", optimizer=optimizer
    )
    loader = trainer.get_train_dataloader()
    micro_batches = [batch for epoch in (0, 1) for batch in loader]  # it goes on by itself
    for first, last in ((10, 12), (12, 13), (13, 15), (15, 17)):
        update = micro_batches[first:last]
        items = sum(int((batch["labels"] != -100).sum()) for batch in update)
        for batch in update:
            counts = (batch["labels"] != -100).sum(1)
            with gns.microbatch(len(counts), tokens=counts, scale=1 / items):
                model(**batch, num_items_in_batch=items)["loss"].backward()
        gns.update()
        model.zero_grad()
    truth = gns.compute()
    assert found is not None and found.adam is not None and truth.adam is not None
    for name in ("noise_scale", "trace", "grad_sqnorm"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-5)
        assert getattr(found.adam, name) == pytest.approx(getattr(truth.adam, name), rel=1e-5)
    assert (found.samples, found.updates, found.skipped) == (4 + 4 + 4, 3, 1)  # one of 1 sample


def test_critical_batch_of_a_trainer(tmp_path: Path) -> None:
    """What is measured with it: branches, noise scales, evaluation; the run is back afterwards."""
    run = run_of(tmp_path, data=samples(64), eval_dataset=samples(8))
    base(run, 2 * 4 * T)
    before = weights(run.trainer)
    found = measure_critical_batch(
        run, folder=tmp_path / "cbs", k=(0.5, 1, 2), delta_tokens=24 * T, loss="evaluate"
    )
    assert [(b.batch_size, b.steps) for b in found.branches] == [(2, 12), (4, 6), (8, 3)]
    assert found.noise_scale is not None and found.adam is not None
    assert same(weights(run.trainer), before) and run.tokens == 2 * 4 * T
    with pytest.raises(ValueError, match="multiple of 2"):
        measure_critical_batch(run, folder=tmp_path / "odd", k=(0.75, 1), delta_tokens=24 * T)


def test_a_subclass_reads_the_accumulation_of_a_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the branch's steps that of the branch, and afterwards the run's own."""
    run, seen = run_of(tmp_path), []
    step, args = run.trainer.training_step, run.trainer.args
    own = args.gradient_accumulation_steps

    def training_step(*given: Any) -> Tensor:
        seen.append(args.gradient_accumulation_steps)
        return step(*given)

    monkeypatch.setattr(run.trainer, "training_step", training_step)
    list(run.train(6 * T, batch_size=6, lr_factor=1.0))
    assert seen == [6 // run.batch_multiple] * (6 // run.batch_multiple) != [own]
    assert args.gradient_accumulation_steps == own


class Evaluations(hf.TrainerCallback):
    """Counts them, as a callback of the user's may."""

    seen = 0

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.seen += 1


def test_evaluations_of_a_run_are_not_those_of_training(tmp_path: Path) -> None:
    """No callback hears of them, and no log holds them."""
    callback = Evaluations()
    run = run_of(tmp_path, callbacks=[callback], eval_dataset=samples(4))
    assert run.evaluate is not None
    run.evaluate()
    assert callback.seen == 0 and run.trainer.state.log_history == []
    run.trainer.evaluate()
    assert callback.seen == 1 and len(run.trainer.state.log_history) == 1
