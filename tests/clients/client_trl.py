# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer with packing: its fused head is measured, a document is a sample."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients.recipes import Recipe, against, compare, squared_variation
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("trl")


def document_loss(mean_tokens: float) -> Any:
    def loss(model: nn.Module, document: Tensor) -> Tensor:
        logits = model(input_ids=document[None], use_cache=False).logits
        return F.cross_entropy(logits[0, :-1], document[1:], reduction="sum") / mean_tokens

    return loss


def test_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = compare(RECIPE, "trl")
    ran = RECIPE.run(LEARNING_RATE=0.0, STEPS=16)
    trainer, found = ran.names["trainer"], ran.names["found"]
    documents = [torch.tensor(d) for d in ran.names["documents"]]
    predicted = [len(d) - 1 for d in documents]
    loss = document_loss(sum(predicted) / len(predicted))
    truth = gnsfast.brute_force_noise_scale(trainer.model, loss, documents)
    against(row, found.noise_scale, truth.noise_scale - squared_variation(predicted))
