# SPDX-License-Identifier: Apache-2.0
"""Stops a Trainer before its first step, refuses what cannot be trained from there, and reads its
micro-batches from any position of its data."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderShard,
    SeedableRandomSampler,
    skip_first_batches,
)
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from gnsfast.critical_batch.branches import random_state, set_random_state
from gnsfast.critical_batch.run_identity import RunIdentity

NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Files that a checkpoint must have. Trainer would start what a missing file holds anew."""


def begin(trainer: Any, checkpoint: str | os.PathLike[str] | None) -> Any:
    """Have ``trainer.train()`` set everything up, stop it there, and return its data loader.

    Model, optimizer, schedule and state are then as before its first step, or as its resume has
    them; random number generators are as after this set-up. No callback of the user's has run.
    """
    _refuse(trainer)
    folder = None if checkpoint is None else os.fspath(checkpoint)
    if folder is not None and (lacking := [n for n in NEEDED if not (Path(folder) / n).is_file()]):
        raise ValueError(
            f"{folder} has no {' and no '.join(lacking)}: pass a checkpoint-N folder that a "
            "Trainer wrote on one process, without save_only_model"
        )
    try:
        with patch.object(trainer.callback_handler, "callbacks", [_Stop()]):
            trainer.train(resume_from_checkpoint=folder)
    except _Begun as begun:
        loader = begun.args[0]
    _refuse_begun(trainer, loader)
    return loader


class _Begun(Exception):
    """Carries the data loader out of ``trainer.train()``."""


class _Stop(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise _Begun(kwargs["train_dataloader"])


def _refuse(trainer: Any) -> None:
    """Raise for what cannot be begun."""
    reason, args = None, trainer.args
    kind = trainer.accelerator.distributed_type
    if trainer.accelerator.num_processes > 1 or kind != DistributedType.NO:
        reason = f"several processes ({kind.name}): start one process"
    elif args.n_gpu > 1:
        reason = "torch.nn.DataParallel (several GPUs): set CUDA_VISIBLE_DEVICES to one GPU"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        reason = "DeepSpeed or FSDP: switch it off"
    elif args.auto_find_batch_size:
        reason = "auto_find_batch_size: pass the per_device_train_batch_size that it found"
    elif args.ignore_data_skip:
        reason = "ignore_data_skip, because it restores the position in the data: leave it out"
    if reason is not None:
        raise NotImplementedError(f"TrainerRun does not support {reason}")


def _refuse_begun(trainer: Any, loader: Any) -> None:
    """Raise for what shows only after the set-up."""
    reason, optimizer = None, trainer.optimizer.optimizer
    name, kind = type(optimizer).__name__, trainer.args.optim
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    unseeded = isinstance(sampler, (RandomSampler, LengthGroupedSampler)) and not isinstance(
        sampler, SeedableRandomSampler
    )
    if isinstance(optimizer, torch.optim.LBFGS):
        reason = "LBFGS, which calls its closure several times per step: use another optimizer"
    elif "lomo" in kind or "layerwise" in kind:
        reason = f"{kind}, which steps inside of the backward pass and so cannot accumulate"
    elif hasattr(optimizer, "eval"):
        reason = f"{name}, whose weights differ between training and evaluation"
    elif type(trainer.lr_scheduler) is not LambdaLR:
        reason = (
            f"the schedule {type(trainer.lr_scheduler).__name__}, which has no value between two "
            "steps: use one of transformers' (lr_scheduler_type) or a LambdaLR"
        )
    elif trainer.state.global_step and unseeded:
        reason = (
            f"a checkpoint that does not hold the order of its samples ({type(sampler).__name__}): "
            "branch the run from its start, or train with use_seedable_sampler in "
            "accelerator_config and without grouping by length"
        )
    if reason is not None:
        raise NotImplementedError(f"TrainerRun does not support {reason}")


def refuse_undivided(who: str, trainer: Any, inputs: Any, items: Any) -> None:
    """Raise for a loss that should be divided by the items of the whole batch, and is not.

    Trainer adds up the losses of micro-batches. Without the division, loss and gradient grow with
    the accumulation, and batch sizes cannot be compared. A divided loss halves with twice as many
    items.
    """
    scaled_by_trainer = getattr(trainer, "loss_is_scaled_for_ga", None)
    scaled = trainer.model_accepts_loss_kwargs and items is not None
    if scaled_by_trainer is not None or not (scaled or trainer.compute_loss_func is not None):
        return
    divided = False
    if items is not None:
        random, model = random_state({trainer.args.device}), trainer.model_wrapped
        model.eval()  # training_step sets it back
        with torch.no_grad(), trainer.compute_loss_context_manager():
            once, twice = (
                float(
                    trainer.compute_loss(
                        model, trainer._prepare_inputs(dict(inputs)), num_items_in_batch=k * items
                    )
                )
                for k in (1, 2)
            )
        set_random_state(random, {trainer.args.device})
        divided = not abs(once - 2 * twice) > 0.02 * abs(once)  # a NaN tells nothing
    if not divided:
        raise ValueError(
            f"{who}: {type(trainer.model).__name__} does not divide its loss by "
            "num_items_in_batch. Trainer adds up the losses of micro-batches, so the loss grows "
            "with the batch. Set trainer.model_accepts_loss_kwargs = False before training, so "
            "that Trainer divides by the number of micro-batches, or divide your own loss by "
            "num_items_in_batch"
        )


class TrainerBatches:
    """An iterator over micro-batches; after the last one of an epoch comes the next epoch's first.

    Equals iterating the ``get_train_dataloader()`` of a Trainer on one process as ``train()`` does,
    which fetches each micro-batch when the one before is handed out. Random numbers are the same,
    also after ``go_to``: those of the order and, with ``num_workers=0``, of datasets and
    collators (masked language models). Workers that draw random numbers of their own get the same
    order, but not the same numbers.

    ``trainer.train(resume_from_checkpoint=...)`` does not do that. Within an epoch, a collator that
    draws random numbers gets others, and an order without a seed is a new one.

    Args:
        loader: what ``trainer.get_train_dataloader()`` returned.
        device: ``trainer.args.device``, whose generator is saved too.

    Raises:
        NotImplementedError: for data without a position, for micro-batches of unequal sizes.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        _refuse_data(loader)
        self.loader, self.device = loader, device
        self.sampler = loader.batch_sampler.sampler
        self.micro_batch: int = loader.batch_sampler.batch_size
        self.per_epoch = len(loader)
        dropped = loader.batch_sampler.drop_last
        self.samples_per_epoch = self.per_epoch * self.micro_batch if dropped else len(self.sampler)
        self.epoch = self.taken = 0
        self._iterator: Iterator[Any] | None = None
        self._before_ahead: dict[str, Any] = {}

    @property
    def left(self) -> int:
        """Micro-batches of the epoch that remain."""
        return self.per_epoch - self.taken

    @property
    def samples(self) -> int:
        """Samples before the position."""
        return self.samples_at(self.epoch, self.taken)

    def samples_at(self, epoch: int, taken: int) -> int:
        """Samples before another position: ``taken`` is less than ``per_epoch``."""
        return epoch * self.samples_per_epoch + taken * self.micro_batch

    def go_to(self, epoch: int, taken: int, **before: dict[str, Any]) -> None:
        """Go to micro-batch ``taken`` of an epoch and load none before it. It moves the generators.

        With the rest of ``state_dict()`` the epoch has its order, and the micro-batch its random
        numbers, again. Without it the order is drawn now.
        """
        self.epoch, self.taken, self._iterator = epoch, taken, None
        if not taken:
            return
        loader = skip_first_batches(self.loader, taken)
        if before:
            set_random_state(before["before_order"], {self.device})
            skipping, ahead = loader.batch_sampler, before["before_ahead"]
            skipping.batch_sampler = _SetsState(skipping.batch_sampler, taken, ahead, self.device)
        self._start(loader)
        self._before_ahead = before.get("before_ahead", self._before_ahead)

    def skip_to(self, epoch: int, taken: int) -> None:
        """Go forward and load none of the micro-batches between.

        In an epoch that has begun the order stays; that of a later one without a seed is a new one.
        """
        begun = self.state_dict() if epoch == self.epoch else {}
        self.go_to(**begun | {"epoch": epoch, "taken": taken})

    def __iter__(self) -> "TrainerBatches":
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._start(self.loader)
        batch = self._ahead
        self.taken += 1
        if self.left:
            self._fetch()
        else:
            self.epoch, self.taken, self._iterator = self.epoch + 1, 0, None
        return batch

    def _start(self, loader: Any) -> None:
        self.loader.set_epoch(self.epoch)
        self._before_order = random_state({self.device})
        self._iterator = iter(loader.base_dataloader)
        self._fetch()

    def _fetch(self) -> None:
        assert self._iterator is not None
        self._before_ahead = random_state({self.device})
        self._ahead = next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the generators from before the order and the next batch were drawn."""
        state: dict[str, Any] = {"epoch": self.epoch, "taken": self.taken}
        if self._iterator is not None:
            state |= {"before_order": self._before_order, "before_ahead": self._before_ahead}
        return state


class _SetsState(BatchSampler):
    """Sets the generators when the order is drawn, and just before a micro-batch is fetched."""

    def __init__(
        self, batch_sampler: BatchSampler, index: int, state: dict[str, Any], device: torch.device
    ) -> None:
        self.batch_sampler, self.index = batch_sampler, index
        self.state, self.device = state, device

    def __iter__(self) -> Iterator[list[int]]:
        for k, indices in enumerate(self.batch_sampler):
            if k == self.index:
                set_random_state(self.state, {self.device})
            yield indices

    def __len__(self) -> int:
        return len(self.batch_sampler)


def _refuse_data(loader: Any) -> None:
    """Raise for data whose position cannot be restored."""
    reason = None
    kind = type(getattr(loader, "batch_sampler", None)).__name__
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        reason = "an IterableDataset, which has no position: use a dataset with a length"
    elif type(loader) is not DataLoaderShard:
        reason = (
            f"a get_train_dataloader() that returns a {type(loader).__name__}: return "
            "self.accelerator.prepare(DataLoader(...)), as Trainer does"
        )
    elif kind != "BatchSampler":
        reason = f"a {kind} in the data loader, because its batches may differ in size: remove it"
    elif loader.persistent_workers:
        reason = (
            "dataloader_persistent_workers, which draw random numbers in the first epoch only: set "
            "dataloader_persistent_workers=False"
        )
    if reason is not None:
        raise NotImplementedError(f"TrainerRun does not support {reason}")
    if len(loader) == 0:
        raise ValueError(
            f"TrainerRun: the dataset of {len(loader.dataset)} samples has no full micro-batch, "
            "and dataloader_drop_last drops the rest: use a smaller per_device_train_batch_size"
        )


def identity(trainer: Any) -> RunIdentity:
    """Of a Trainer's run; the data is known where it is a dataset of ``datasets`` with a name."""
    info = getattr(trainer.train_dataset, "info", None)
    parts = [getattr(info, name, None) for name in ("dataset_name", "config_name")]
    data = "/".join(part for part in parts if part) or None
    return RunIdentity.of(trainer.model, trainer.optimizer, data=data)
