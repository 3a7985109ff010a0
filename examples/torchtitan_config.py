# SPDX-License-Identifier: Apache-2.0
"""Measures torchtitan's own training from its command line:

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config --config llama3_8b

The other options of torchtitan follow, and those of ``Measured.Config``.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

import gnsfast
from gnsfast.integrations.trackers import metrics


class HeadLoss(ChunkedLossWrapper):
    """A single backward pass of the head, which keeps no logits either."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    def set_lm_head(self, lm_head: Any) -> None:
        super().set_lm_head(lm_head)
        loss = gnsfast.functional.linear_cross_entropy
        lm_head.cross_entropy = lambda h, y: loss(h, lm_head.weight, y, reduction="sum")
        register_fsdp_forward_method(lm_head, "cross_entropy")

    def __call__(
        self, hidden: Tensor, labels: Tensor, global_valid_tokens: Any = None, **others: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(hidden, labels, global_valid_tokens, **others)
        loss = self.lm_head.cross_entropy(hidden, labels)
        return loss / global_valid_tokens, {}


class Measured(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        window: int = 64
        """How many updates the noise scale is a mean over."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        ids = torch.arange(4 * 64, device=self.device).view(4, 64)
        self.gns = gnsfast.GradientNoiseScale(
            self.model_parts[0],
            gnsfast.learn(self.model_parts[0], ids, run=self.logits),
            loss_reduction="sum",
            window=config.window,
        )
        self.passes, self.update = 0, ExitStack()

    def logits(self, ids: Tensor) -> Tensor:
        inputs, _, others = self.post_dataloading_process({"input": ids}, ids)
        model: Any = self.model_parts[0]
        found: Tensor = model(inputs, **others)
        return model.lm_head(found) if model._skip_lm_head else found  # HeadLoss calls it

    def forward_backward_step(self, **given: Any) -> Tensor:
        labels, scale = given["labels"], 1 / given["global_valid_tokens"]
        if self.passes % self.gradient_accumulation_steps == 0:
            self.update.enter_context(self.gns.update())
        with self.gns.microbatch(len(labels), tokens=(labels != -100).sum(1), scale=scale):
            loss = super().forward_backward_step(**given)
        self.passes += 1
        if self.passes % self.gradient_accumulation_steps == 0:
            self.update.close()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.logger.log(metrics(self.gns.compute()), self.step)


def measured(config: Trainer.Config) -> Measured.Config:
    """The same training, measured."""
    found = derive(config, Measured.Config)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        found.loss = derive(config.loss, HeadLoss.Config)
    return found


def llama3_debugmodel() -> Measured.Config:
    return measured(config_registry.llama3_debugmodel())


def llama3_8b() -> Measured.Config:
    return measured(config_registry.llama3_8b())
