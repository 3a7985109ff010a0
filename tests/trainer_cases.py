# SPDX-License-Identifier: Apache-2.0
"""Small Trainers for tests of what drives them: a model with dropout, shuffled samples."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers as hf
from noise_cases import ALWAYS
from torch import Tensor, nn

from gnsfast.integrations.transformers import GNSCallback

V, T = 23, 5
TRAINERS = {"data_collator", "eval_dataset", "optimizers", "callbacks", "compute_loss_func"}
"""What is no training argument, but Trainer's own."""
Sample = dict[str, Tensor]


class Model(nn.Module):
    """With dropout and a loss that is the mean over the labels of the whole batch."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dropout, self.largest = dropout, float("inf")  # of a gradient, as a format has one
        self.embed, self.head, self.norm = nn.Embedding(V, 8), nn.Linear(8, V), nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
            self.seen += self.calls
        hidden = F.dropout(self.norm(self.embed(input_ids)), self.dropout, self.training)
        if self.training and self.largest < float("inf"):
            hidden.register_hook(lambda g: torch.where(g.abs() < self.largest, g, torch.inf))
        torch.rand(())  # in evaluation too
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        targets = labels.flatten()
        items = kwargs.get("num_items_in_batch", (targets != -100).sum())
        total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return {"loss": total / items, "logits": logits}


class Divided(Model):
    """Takes no loss kwargs, so that Trainer divides its losses by the micro-batches of a step."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


def samples(number: int, seed: int = 3, length: int = T, labelled: int = 2) -> list[Sample]:
    """Labels of unequal number, ``labelled`` or more, of few tokens: the gradient is far from
    zero.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        ids = torch.randint(0, 4, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - labelled + 1, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Deaf(Model):
    """As BERT does, takes num_items_in_batch and does not use it."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels)


def trainer_of(folder: Path, *, data: Any = None, model: Any = None, **options: Any) -> hf.Trainer:
    """13 micro-batches an epoch, the last one short, in steps of two; linear decay, clipping."""
    given = {name: options.pop(name) for name in TRAINERS & options.keys()}
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": 18,
        "warmup_steps": 4,
        "learning_rate": 3e-2,
        "logging_steps": 1000,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }
    args = hf.TrainingArguments(output_dir=str(folder), **options)
    model = Model() if model is None else model
    model = model() if isinstance(model, type) else model
    data = samples(25) if data is None else data
    return hf.Trainer(model=model, args=args, train_dataset=data, **given)


SCALED: dict[str, Any] = {"optim": "adamw_torch", "max_grad_norm": 0.0}
"""Options with which Accelerate sees a step that a scaler skips, and clips no scaled gradient."""


def scaled(trainer: hf.Trainer) -> hf.Trainer:
    """Skips steps at times. Accelerate has a scaler on GPUs alone, so it is handed one."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    trainer.model.largest = 2.0**11
    return trainer


def weights(trainer: hf.Trainer) -> dict[str, Tensor]:
    """Copies of all that is trained."""
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


def trained(trainer: hf.Trainer, **options: Any) -> dict[str, Tensor]:
    """The weights after ``trainer.train()``, which says nothing."""
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train(**options)
    return weights(trainer)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Begun(hf.TrainerCallback):
    """Stops ``trainer.train()`` before its first step; the data loader is what it raises."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise InterruptedError(kwargs["train_dataloader"])


def by_loop(trainer: hf.Trainer, controller: Any, epochs: int = 5) -> list[Any]:
    """The batch sizes of a controller by a loop over Trainer's own steps: of each the count of
    first steps, its loss and learning rate. Measured too, since a weight's gradient is rounded
    otherwise while it is.
    """
    with patch.object(trainer.callback_handler, "callbacks", [Begun()]):
        try:
            trainer.train()
        except InterruptedError as begun:
            loader = begun.args[0]
    grown = [(d.tokens, d.new) for d in controller.decisions if d.new != d.old]
    accumulation, steps, lag, groups = 2, [], 0, trainer.optimizer.param_groups
    per_epoch, device, args = len(loader), trainer.args.device, trainer.args
    of_epoch = -(-per_epoch // 2)
    with GNSCallback(**ALWAYS).watching(trainer):
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            batches, taken = iter(loader), 0
            while taken < per_epoch:
                before = epoch * of_epoch + taken // 2
                for group, scale in zip(groups, trainer.lr_scheduler.lr_lambdas):
                    group["lr"] = group["initial_lr"] * scale(before - lag)
                    group["lr"] *= (accumulation / 2) ** 0.5
                number = min(accumulation, per_epoch - taken)
                with patch.object(args, "gradient_accumulation_steps", accumulation):
                    inputs, items = trainer.get_batch_samples(batches, number, device)
                    trainer.current_gradient_accumulation_steps = number
                    losses = []
                    for k, each in enumerate(inputs, 1):
                        trainer.accelerator.gradient_state._set_sync_gradients(k == number)
                        losses.append(trainer.training_step(trainer.model_wrapped, each, items))
                if args.max_grad_norm > 0:
                    trainer._clip_grad_norm(trainer.model_wrapped)
                trainer.optimizer.step()
                trainer.model_wrapped.zero_grad()
                taken += number
                now = epoch * of_epoch + -(-taken // 2)
                lag += (now - before) * trainer.accelerator.optimizer_step_was_skipped
                loss = float(torch.stack(losses).double().sum())
                steps.append((now, loss, groups[0]["lr"]))
                tokens = (epoch * 25 + min(2 * taken, 25)) * T
                if grown and grown[0][0] == tokens:
                    accumulation = grown.pop(0)[1] // 2
    return steps
