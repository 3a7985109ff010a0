# SPDX-License-Identifier: Apache-2.0
"""What a TrainerRun refuses, by name; steps that a gradient scaler skips."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch.utils.data import DataLoader, IterableDataset
from trainer_cases import (
    SCALED,
    Deaf,
    Model,
    T,
    same,
    samples,
    scaled,
    trained,
    trainer_of,
    weights,
)

from gnsfast.integrations.transformers import GNSCallback
from gnsfast.integrations.transformers_branches import TrainerRun


def run_of(folder: Path, checkpoint: Any = None, **options: Any) -> TrainerRun:
    return TrainerRun(trainer_of(folder, **options), checkpoint, tokens_per_sample=T)


def test_steps_that_a_scaler_skips(tmp_path: Path) -> None:
    """Trainer's schedule waits for them; the scaler's state is saved."""

    trainer = scaled(trainer_of(tmp_path, **SCALED, save_strategy="steps", save_steps=6))
    truth = trained(trainer)
    assert 10 < trainer.lr_scheduler.last_epoch < trainer.state.global_step == 18
    for checkpoint in (None, tmp_path / "checkpoint-6"):
        run = TrainerRun(scaled(trainer_of(tmp_path, **SCALED)), checkpoint, tokens_per_sample=T)
        list(run.train(9 * 4 * T - run.tokens, batch_size=4, lr_factor=1.0))
        run.save(tmp_path)
        left = run._tokens_at_the_end() - run.tokens
        for _ in range(2):
            list(run.train(left, batch_size=4, lr_factor=1.0))
            assert same(weights(run.trainer), truth)
            run.restore(tmp_path)


def mean_of_a_micro_batch(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_loss_that_is_not_divided(tmp_path: Path) -> None:
    steps = run_of(tmp_path, model=Deaf()).train(T, batch_size=4, lr_factor=1.0)
    with pytest.raises(ValueError, match="Deaf does not divide its loss by num_items_in_batch"):
        next(steps)
    trainer = trainer_of(tmp_path, model=Deaf())
    trainer.model_accepts_loss_kwargs = False  # the remedy
    run = TrainerRun(trainer, tokens_per_sample=T)
    first = next(run.train(T, batch_size=4, lr_factor=1.0))
    assert 2 < first.loss < 5  # log(23), with a random head
    own = run_of(tmp_path, compute_loss_func=mean_of_a_micro_batch)
    with pytest.raises(ValueError, match="divide your own loss by num_items_in_batch"):
        next(own.train(T, batch_size=4, lr_factor=1.0))


def test_restored_after_a_step_that_failed(tmp_path: Path) -> None:
    truth = trained(trainer_of(tmp_path))
    run = run_of(tmp_path)
    run.save(tmp_path)
    step, left = run.trainer.training_step, [None]

    def failing(*args: Any) -> Any:
        found = step(*args)
        if left:
            raise MemoryError(left.pop())
        return found

    run.trainer.training_step = failing
    with pytest.raises(MemoryError):
        next(run.train(T, batch_size=4, lr_factor=1.0))
    run.restore(tmp_path)
    list(run.train(330, batch_size=4, lr_factor=1.0))
    assert same(weights(run.trainer), truth)


def test_train_refuses(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for tokens, batch_size, factor, match in (
        (
            T,
            5,
            1.0,
            r"must be a multiple of the micro-batch of 2 samples: use per_device_.*=1, with more",
        ),
        (T, 0, 1.0, "batch_size"),
        (0, 4, 1.0, "tokens"),
        (T, 4, 0.0, "lr_factor must be a positive number, not 0.0"),
        (T, 4, float("nan"), "lr_factor"),
        (
            331,
            4,
            1.0,
            r"the run ends at 330 tokens \(max_steps=18\), so it cannot train 331 more after 0",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            run.train(tokens, batch_size=batch_size, lr_factor=factor)
    with pytest.raises(ValueError, match="tokens_per_sample"):
        TrainerRun(trainer_of(tmp_path), tokens_per_sample=0)
    with pytest.raises(ValueError, match="loss must be 'auto'"):
        TrainerRun(trainer_of(tmp_path), tokens_per_sample=T, loss="mean")


def test_restore_refuses_another_run(tmp_path: Path) -> None:
    run_of(tmp_path).save(tmp_path)
    for options, match in (
        ({"data": samples(24)}, "samples of an epoch: 25 there, 24 here"),
        ({"gradient_accumulation_steps": 4}, "batch size: 4 there, 8 here"),
        ({"max_steps": 20}, "max_steps: 18 there, 20 here"),
        ({"data_seed": 7}, "data seed: 42 there, 7 here"),
    ):
        with pytest.raises(ValueError, match=match):
            run_of(tmp_path, **options).restore(tmp_path)


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    trained(trainer_of(tmp_path, save_strategy="steps", save_steps=5, max_steps=5))
    folder = tmp_path / "checkpoint-5"
    with pytest.raises(
        ValueError, match="was written 0.7692 epochs into the data, but .* its 5 steps"
    ):
        run_of(tmp_path, folder, gradient_accumulation_steps=1)
    for options, kind in (
        ({"accelerator_config": {"use_seedable_sampler": False}}, "RandomSampler"),
        ({"train_sampling_strategy": "group_by_length"}, "LengthGroupedSampler"),
    ):
        with pytest.raises(NotImplementedError, match=rf"the order of its samples \({kind}\)"):
            run_of(tmp_path, folder, **options)
    with pytest.raises(NotImplementedError, match="ignore_data_skip"):
        run_of(tmp_path, folder, ignore_data_skip=True)
    shutil.copytree(folder, other := tmp_path / "other")
    (other / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="other has no optimizer.pt: pass a checkpoint-N"):
        run_of(tmp_path, other)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from samples(25)


class OwnLoader(hf.Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2)


def fsdp(trainer: hf.Trainer) -> None:
    trainer.is_fsdp_enabled = True


def two_gpus(trainer: hf.Trainer) -> None:
    trainer.args._n_gpu = 2


def own_loader(trainer: hf.Trainer) -> None:
    trainer.__class__ = OwnLoader


def lbfgs(trainer: hf.Trainer) -> None:
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())


def eval_mode(trainer: hf.Trainer) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer.eval = lambda: None


@pytest.mark.parametrize(
    ("options", "change", "match"),
    [
        ({"data": Endless()}, None, "an IterableDataset, which has no position"),
        ({"auto_find_batch_size": True}, None, "auto_find_batch_size"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, None, "schedule"),
        ({"train_sampling_strategy": "batch_rebalance"}, None, "BatchRebalanceSampler"),
        (
            {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
            None,
            "dataloader_persistent_workers",
        ),
        ({}, fsdp, "DeepSpeed or FSDP"),
        ({}, two_gpus, "several GPUs"),
        ({}, own_loader, "get_train_dataloader.. that returns a DataLoader"),
        ({}, lbfgs, "LBFGS"),
        ({}, eval_mode, "SGD, whose weights differ between training and evaluation"),
    ],
)
def test_refusals(
    tmp_path: Path, options: Any, change: Callable[[hf.Trainer], None] | None, match: str
) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=samples(2), **options)
    if change is not None:
        change(trainer)
    with pytest.raises(NotImplementedError, match=f"TrainerRun does not support .*{match}"):
        TrainerRun(trainer, tokens_per_sample=T)


def test_what_a_run_lacks(tmp_path: Path) -> None:
    run = run_of(tmp_path, model=Model())
    assert run.noise_scale() is not None
    assert run.evaluate is None
    assert run_of(tmp_path, eval_dataset={"a": samples(2), "b": samples(2)}).evaluate is None
    unlabelled = [{"input_ids": s["input_ids"]} for s in samples(2)]
    evaluate = run_of(tmp_path, eval_dataset=unlabelled).evaluate
    assert evaluate is not None
    with pytest.raises(ValueError, match="but no eval_loss: give the Trainer an eval_dataset"):
        evaluate()
    with pytest.raises(ValueError, match="the dataset of 1 samples has no full micro-batch"):
        run_of(tmp_path, data=samples(1), dataloader_drop_last=True)


def test_callback_under_adams_metric(tmp_path: Path) -> None:
    callback = GNSCallback(metric="adam")
    trainer = trainer_of(tmp_path, model=Model(0.0), callbacks=[callback], logging_steps=18)
    trained(trainer)
    adam = callback.compute().adam
    assert adam is not None and adam.updates == 15  # the first has no v, two have one pass
    assert trainer.state.log_history[0].get("gns/adam", float("inf")) == adam.noise_scale
