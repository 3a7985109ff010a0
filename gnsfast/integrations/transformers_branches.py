# SPDX-License-Identifier: Apache-2.0
"""``TrainerRun``: a run of transformers' Trainer that branches can continue. The Trainer is stopped
before its first step, and its micro-batches are read from any position of its data.
"""

import math
import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
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
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, RandomSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from gnsfast.arguments import integer
from gnsfast.critical_batch import RunIdentity
from gnsfast.critical_batch.branches import (
    BranchStep,
    load_state,
    random_state,
    set_random_state,
    state_of,
)
from gnsfast.critical_batch.rules import Rules, set_lr
from gnsfast.estimator import fitting_metrics
from gnsfast.integrations.transformers import GNSCallback, identity, refuse_undivided
from gnsfast.kept import kept_chance, kept_state
from gnsfast.noise_scale import NoiseScale

FILE, FORMAT = "trainer_run.pt", 2


class TrainerRun:
    """The training that ``trainer.train()`` does, from its start or from a ``checkpoint-N``, as a
    ``BranchRun`` for ``gnsfast.critical_batch``.

    ``train(tokens, batch_size=run.batch_size, lr_factor=1.0)`` takes the optimizer steps of
    ``trainer.train()``, or of ``trainer.train(resume_from_checkpoint=checkpoint)``, bit for bit.
    The Trainer sets everything up and is stopped before its first step; from then on its own
    ``training_step``, clipping and optimizer are called. Other batch sizes accumulate more or fewer
    micro-batches, as a Trainer with other ``gradient_accumulation_steps`` does; an epoch's last
    step may be short. The learning rate follows the data: it is the schedule's at the optimizer
    step, whole or fractional, that the unbranched run would have reached, times ``lr_factor``.
    Callbacks do not run, and nothing is logged or evaluated on the way (in ``trainer.train()`` an
    evaluation draws a random number).

    ``noise_scale()`` measures the data that comes next, in training mode. ``evaluate()`` is
    ``trainer.evaluate()["eval_loss"]``; without a single ``eval_dataset``, ``evaluate`` is None.
    Neither changes the run. Restored runs continue bit for bit, unless workers of the data loader
    draw random numbers (datasets and collators in this process may). ``save`` writes plain tensors
    and numbers into ``trainer_run.pt``, without the schedule, which is a function of the position.
    To restore, make a TrainerRun of a Trainer with the same arguments and data.

    Args:
        trainer: a Trainer that has not trained yet. The run owns it from now on.
        checkpoint: a folder that a Trainer with the same arguments wrote. The run starts there.
        tokens_per_sample: the tokens that a sample counts for.
        loss: what the loss is a mean over, for ``noise_scale()``, as for ``GNSCallback``.
        betas, weight_decay: the rules (``Rules``) by which a branch changes them.
        updates: how many steps of ``batch_size`` samples ``noise_scale()`` measures, at the present
            weights.

    Raises:
        NotImplementedError: for several processes or GPUs, DeepSpeed, FSDP, datasets and loaders
            without a position that can be found again, schedules that are not functions of the
            step (``LambdaLR``), optimizers that step elsewhere than in ``step()``.
        ValueError: for a checkpoint that lacks a file or comes from other arguments, for a batch
            that is not a whole number of micro-batches, and for training past the end of the
            schedule. In the first step, for a loss that ignores ``num_items_in_batch``.

    >>> import tempfile
    >>> from transformers import Trainer, TrainingArguments
    >>> from gnsfast.integrations.transformers_branches import TrainerRun
    >>> class Model(torch.nn.Linear):
    ...     def forward(self, x, labels):
    ...         return {"loss": (super().forward(x) - labels).square().mean()}
    >>> data = [{"x": torch.randn(3), "labels": torch.randn(1)} for _ in range(64)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = TrainingArguments(folder, report_to=[], use_cpu=True)  # micro-batches of 8
    ...     run = TrainerRun(Trainer(Model(3, 1), args, train_dataset=data), tokens_per_sample=1)
    ...     [step.tokens for step in run.train(32, batch_size=16, lr_factor=2**0.5)]
    [16, 16]
    """

    def __init__(
        self,
        trainer: Any,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        tokens_per_sample: int,
        loss: str = "auto",
        updates: int = 32,
        betas: str = "keep",
        weight_decay: str = "keep",
    ) -> None:
        self.tokens_per_sample = integer("tokens_per_sample", tokens_per_sample)
        self._updates = integer("updates", updates)
        self._gns = GNSCallback(loss=loss, window=updates)
        self.trainer = trainer
        self._device: torch.device = trainer.args.device
        self._batches = TrainerBatches(begin(trainer, checkpoint), self._device)
        self._accumulation: int = trainer.args.gradient_accumulation_steps
        self.batch_size = self._batches.micro_batch * self._accumulation
        self.batch_multiple = self._batches.micro_batch
        one = trainer.eval_dataset is not None and not isinstance(trainer.eval_dataset, dict)
        self.evaluate = self._evaluate if one else None
        self._lag, self._divided = Fraction(0), False
        self._skipped = (0, 0)  # micro-batches and samples before the position, not trained on
        self.rules = Rules("keep", betas, weight_decay)  # train() is told the learning rate's
        self.rules.check(trainer.optimizer, 1.0)
        if checkpoint is not None:
            self._go_to(os.fspath(checkpoint))

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        return (self._batches.samples - self._skipped[1]) * self.tokens_per_sample

    def identity(self) -> RunIdentity:
        """Model, optimizer, and the name of the training data where it is one of ``datasets``."""
        return identity(self.trainer)

    def branch_settings(self) -> dict[str, str]:
        """Settings that must be the same whenever a folder of branches is continued."""
        return {"betas": self.rules.betas, "weight_decay": self.rules.weight_decay}

    def check_branch(self, k: float) -> None:
        """Raise ValueError where the optimizer cannot follow to ``k`` times the batch."""
        self.rules.check(self.trainer.optimizer, k)

    def train(self, tokens: int, *, batch_size: int, lr_factor: float) -> Iterator[BranchStep]:
        """Train at least ``tokens`` tokens, in steps of ``batch_size`` samples."""
        micro_batches, rest = divmod(
            integer("batch_size", batch_size), micro := self._batches.micro_batch
        )
        if rest:
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of the micro-batch of {micro} "
                f"samples: use per_device_train_batch_size={math.gcd(micro, batch_size)}, with "
                "more gradient_accumulation_steps for the same batch"
            )
        if not (math.isfinite(lr_factor) and lr_factor > 0):
            raise ValueError(f"lr_factor must be a positive number, not {lr_factor!r}")
        end, last = self.tokens + integer("tokens", tokens), self._tokens_at_the_end()
        if end > last:
            raise ValueError(
                f"the run ends at {last} tokens (max_steps={self.trainer.state.max_steps}), so it "
                f"cannot train {tokens} more after {self.tokens}: branch earlier, or give the "
                "Trainer more max_steps or num_train_epochs"
            )
        return self._steps(end, micro_batches, lr_factor)

    def skip(self, tokens: int) -> None:
        """Go on with the data after whole steps of at least ``tokens`` tokens; nothing is loaded.

        Weights, ``tokens`` and learning rates stay as they are.
        """
        data, size = self._batches, self._accumulation
        end = data.samples + math.ceil(integer("tokens", tokens) / self.tokens_per_sample)
        epoch, taken = data.epoch, data.taken
        while data.samples_at(epoch, taken) < end:
            taken += size
            if taken >= data.per_epoch:
                epoch, taken = epoch + 1, 0
        micro_batches, samples = self._skipped
        micro_batches += (epoch - data.epoch) * data.per_epoch + taken - data.taken
        samples += data.samples_at(epoch, taken) - data.samples
        data.skip_to(epoch, taken)
        self._skipped = (micro_batches, samples)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all that further training depends on into ``folder``."""
        trainer = self.trainer
        scaler = trainer.accelerator.scaler
        state = {
            **self._identity(),
            **state_of(trainer.model, trainer.optimizer),
            "scaler": None if scaler is None else scaler.state_dict(),
            "lag": self._lag.as_integer_ratio(),
            "skipped": self._skipped,
            **self._position(),
        }
        path = Path(folder) / FILE
        torch.save(state, part := path.with_suffix(".part"))
        os.replace(part, path)  # so that the file is never half written

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Restore what ``save`` wrote.

        Raises:
            ValueError: for a run of other arguments or data, naming the difference.
        """
        state = torch.load(Path(folder) / FILE, map_location="cpu", weights_only=True)
        for key, ours in self._identity().items():
            if (theirs := state.get(key)) != ours:
                raise ValueError(
                    f"{folder} was saved by another run ({key}: {theirs} there, {ours} here). Make "
                    "the Trainer with the arguments and the data of that run"
                )
        trainer = self.trainer
        load_state(trainer.model, trainer.optimizer, state)
        if state["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(state["scaler"])
        trainer.model_wrapped.zero_grad()
        self._lag, self._skipped = Fraction(*state["lag"]), state["skipped"]
        self._return_to(state)
        self._write_state()

    @property
    def noise_scale_reason(self) -> str | None:
        """Why ``noise_scale()`` is None."""
        if any(p.requires_grad for p in self.trainer.model.parameters()):
            return None
        return "the model has no trainable parameter"

    def noise_scale(self) -> NoiseScale | None:
        """The noise scale at the present weights, also in the metrics that fit the optimizer, as
        ``TorchRun.noise_scale`` measures them.

        The data is what comes next, in training mode; the run is the same afterwards. The other
        metrics compare micro-batches, so on a single process each batch has two or more.
        """
        if self.noise_scale_reason is not None:
            return None
        trainer, position = self.trainer, self._position()
        metric = self._gns.metric = fitting_metrics(trainer.model, trainer.optimizer.optimizer)
        alone = bool(metric) and trainer.args.world_size == 1
        passes = max(self._accumulation, 2) if alone else self._accumulation
        try:
            with kept_state(trainer.model), self._gns.watching(trainer):
                for _ in range(self._updates):
                    self._pass(passes)
                    trainer.model_wrapped.zero_grad()
                return self._gns.compute()
        finally:
            trainer.model_wrapped.zero_grad()
            self._return_to(position)

    def _evaluate(self) -> float:
        trainer = self.trainer
        logged, handler = [*trainer.state.log_history], trainer.callback_handler
        with patch.object(handler, "callbacks", []), kept_chance(trainer.model):
            with patch.object(trainer.state, "log_history", logged):
                found = trainer.evaluate()
        if "eval_loss" not in found:
            raise ValueError(
                f"trainer.evaluate() returned {', '.join(found) or 'nothing'}, but no eval_loss: "
                "give the Trainer an eval_dataset with labels"
            )
        return float(found["eval_loss"])

    def _steps(self, end: int, micro_batches: int, lr_factor: float) -> Iterator[BranchStep]:
        while self.tokens < end:
            yield self._step(micro_batches, lr_factor)

    def _step(self, micro_batches: int, lr_factor: float) -> BranchStep:
        trainer, before, start = self.trainer, self.tokens, self._base_step()
        self._set_learning_rates(start - self._lag, lr_factor)
        loss = self._pass(micro_batches)
        if trainer.args.max_grad_norm > 0:
            trainer._clip_grad_norm(trainer.model_wrapped)
        k = micro_batches / self._accumulation
        with self.rules.moved(trainer.optimizer, k, lr_factor, lr=False):
            trainer.optimizer.step()
        now = self._base_step()
        if trainer.accelerator.optimizer_step_was_skipped:  # Trainer then skips the schedule's too
            self._lag += now - start
        trainer.model_wrapped.zero_grad()
        self._write_state()
        return BranchStep(self.tokens - before, float(loss))

    def _pass(self, micro_batches: int) -> Tensor:
        """Forward and backward over a batch; its loss."""
        trainer, number = self.trainer, min(micro_batches, self._batches.left)
        # A Trainer subclass may read it.
        with patch.object(trainer.args, "gradient_accumulation_steps", micro_batches):
            batches, items = trainer.get_batch_samples(self._batches, number, self._device)
            if not self._divided:
                refuse_undivided("TrainerRun", trainer, batches[0], items)
                self._divided = True
            trainer.current_gradient_accumulation_steps = len(batches)
            losses = []
            for k, inputs in enumerate(batches):
                last = k == len(batches) - 1
                trainer.accelerator.gradient_state._set_sync_gradients(last)
                losses.append(trainer.training_step(trainer.model_wrapped, inputs, items))
        return torch.stack(losses).double().sum()

    def _set_learning_rates(self, step: Fraction, lr_factor: float) -> None:
        at = int(step) if step.denominator == 1 else float(step)
        groups = self.trainer.optimizer.param_groups
        for group, scale in zip(groups, self.trainer.lr_scheduler.lr_lambdas):
            set_lr(group, group["initial_lr"] * scale(at) * lr_factor)

    def _base_step(self) -> Fraction:
        """The optimizer steps that the unbranched run takes for as many micro-batches."""
        data, size = self._batches, self._accumulation
        trained = data.epoch * data.per_epoch + data.taken - self._skipped[0]
        epoch, taken = divmod(trained, data.per_epoch)
        done, rest = divmod(taken, size)
        this = min(size, data.per_epoch - done * size)  # an epoch's last step may be short
        return epoch * self._steps_of_an_epoch() + done + Fraction(rest, this)

    def _steps_of_an_epoch(self) -> int:
        return -(-self._batches.per_epoch // self._accumulation)

    def _tokens_at_the_end(self) -> int:
        epoch, step = divmod(self.trainer.state.max_steps, self._steps_of_an_epoch())
        samples = self._batches.samples_at(epoch, step * self._accumulation)
        return samples * self.tokens_per_sample

    def _go_to(self, checkpoint: str) -> None:
        """Go to the position and the generators' states of Trainer's own resume."""
        trainer, data = self.trainer, self._batches
        epoch, step = divmod(trainer.state.global_step, self._steps_of_an_epoch())
        taken = step * self._accumulation
        here, there = epoch + taken / data.per_epoch, trainer.state.epoch or 0.0
        if abs(here - there) > 0.5 / data.per_epoch:
            raise ValueError(
                f"{checkpoint} was written {there:.4f} epochs into the data, but with this Trainer "
                f"its {trainer.state.global_step} steps of {self.batch_size} samples are "
                f"{here:.4f} epochs: give the Trainer the dataset, per_device_train_batch_size and "
                "gradient_accumulation_steps of that run"
            )
        data.go_to(epoch, taken)
        self._lag = Fraction(trainer.state.global_step - trainer.lr_scheduler.last_epoch)
        trainer._load_rng_state(checkpoint)

    def _write_state(self) -> None:
        """Write the position into the Trainer's state, which a subclass may read."""
        state, data = self.trainer.state, self._batches
        state.global_step = int(self._base_step())
        state.epoch = data.epoch + data.taken / data.per_epoch

    def _position(self) -> dict[str, Any]:
        return {"data": self._batches.state_dict(), "random": random_state({self._device})}

    def _return_to(self, position: dict[str, Any]) -> None:
        self._batches.go_to(**position["data"])
        set_random_state(position["random"], {self._device})

    def _identity(self) -> dict[str, Any]:
        """What a saved state must share with the run that continues it."""
        return {
            "format": FORMAT,
            "micro-batch": self._batches.micro_batch,
            "batch size": self.batch_size,
            "tokens_per_sample": self.tokens_per_sample,
            "samples of an epoch": self._batches.samples_per_epoch,
            "data seed": getattr(self._batches.sampler, "initial_seed", None),
            "max_steps": self.trainer.state.max_steps,
        }


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
    """Raise for what shows only after the set-up: also data whose position cannot be restored."""
    reason, optimizer = None, trainer.optimizer.optimizer
    name, kind = type(optimizer).__name__, trainer.args.optim
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler, batches = getattr(batch_sampler, "sampler", None), type(batch_sampler).__name__
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
    elif isinstance(getattr(loader, "dataset", None), IterableDataset):
        reason = "an IterableDataset, which has no position: use a dataset with a length"
    elif type(loader) is not DataLoaderShard:
        reason = (
            f"a get_train_dataloader() that returns a {type(loader).__name__}: return "
            "self.accelerator.prepare(DataLoader(...)), as Trainer does"
        )
    elif batches != "BatchSampler":
        reason = (
            f"a {batches} in the data loader, because its batches may differ in size: remove it"
        )
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
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
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
            skipping.batch_sampler = _setting(skipping.batch_sampler, taken, ahead, self.device)
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


def _setting(
    batches: Iterable[list[int]], index: int, state: dict[str, Any], device: torch.device
) -> Iterator[list[int]]:
    """The batches of an order, with the generators set just before one of them is fetched."""
    for k, indices in enumerate(batches):
        if k == index:
            set_random_state(state, {device})
        yield indices
