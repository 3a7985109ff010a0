# SPDX-License-Identifier: Apache-2.0
"""Stops a Trainer before its first step, and refuses what cannot be trained from there."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from gnsfast.critical_batch.branches import random_state, set_random_state

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
    handler = trainer.callback_handler
    callbacks, handler.callbacks = handler.callbacks, [_Stop()]
    try:
        trainer.train(resume_from_checkpoint=folder)
    except _Begun as begun:
        loader = begun.args[0]
    finally:
        handler.callbacks = callbacks
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
