# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer: the rollouts of a prompt are a cluster."""

from pathlib import Path
from typing import Any

import pytest
import torch
from clients.recipes import Ran, Recipe, against, compare
from torch import Tensor

import gnsfast

RECIPE = Recipe("grpo")
KEPT = (
    "    block.enter_context(measured)",
    "    globals().setdefault('kept', []).append(inputs)\n    block.enter_context(measured)",
)
"""Keeps what TRL has generated."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def grads_of(ran: Ran, inputs: Any) -> Tensor:
    """[B, parameters]: TRL's own loss of each rollout alone, for the batch's number of tokens."""
    trainer, rows = ran.names["trainer"], len(inputs["prompt_ids"])
    parameters = [*trainer.model.parameters()]
    found = []
    for b in range(rows):
        own = {
            k: v[b : b + 1] if isinstance(v, Tensor) and v.ndim and len(v) == rows else v
            for k, v in inputs.items()
        }
        loss = ran.names["their_loss"](trainer.model, own) * inputs["num_items_in_batch"]
        g = torch.autograd.grad(loss, parameters)
        found.append(torch.cat([t.flatten() for t in g]).double())
    return torch.stack(found)


def of_pairs(ran: Ran, parts: int = 1) -> tuple[float, float]:
    """The noise scale of prompts and the correlation, from pairs of rollouts of each update, those
    of its micro-batches alone.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    size = counts = 0.0
    for inputs in ran.names["kept"]:
        g = grads_of(ran, inputs)
        prompts = inputs["prompt_ids"].unique(dim=0, return_inverse=True)[1]
        same, itself = prompts[:, None] == prompts, torch.eye(len(g), dtype=torch.bool)
        products = g @ g.T
        kinds = ~same, same & ~itself, itself
        sums += torch.stack([products[kind].mean() for kind in kinds])
        size, counts = size + float(same.sum() / len(g)), counts + 1
    apart, within, alone = (sums / counts).tolist()
    correlation = (within - apart) / (alone - apart)
    effect = 1 + (size / counts - 1) * correlation
    return effect * (alone - apart) / apart, correlation


def test_recipe() -> None:
    row = compare(RECIPE, "trl")
    ran = RECIPE.run(edits=[KEPT], LEARNING_RATE=0.0, STEPS=16)
    truth, correlation = of_pairs(ran)
    against(row, ran.names["noise_scale"], truth)
    found = ran.names["gns"].compute().clusters
    assert abs(found.correlation.value - correlation) < 0.01
    assert (found.size, found.clusters) == (8, 8 * 16)


ACCUMULATED = (
    "        num_generations=ROLLOUTS,",
    "        num_generations=ROLLOUTS,\n        gradient_accumulation_steps=2,",
)


def test_a_prompt_in_two_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="are in two micro-batches of an update"):
        RECIPE.run(edits=[ACCUMULATED], STEPS=2)


@pytest.mark.parametrize(
    "edits",
    [
        [ACCUMULATED, ('loss_reduction="sum"', 'loss_reduction="sum", source="local"')],
        [(ACCUMULATED[0], f"{ACCUMULATED[1]}\n        steps_per_generation=1,")],
    ],
    ids=["each micro-batch by itself", "a generation for each micro-batch"],
)
def test_accumulation(edits: list[tuple[str, str]]) -> None:
    ran = RECIPE.run(edits=edits, STEPS=4)
    found: gnsfast.ClusterNoiseScale = ran.names["gns"].compute().clusters
    assert found.updates == 4 and found.samples == 4 * 2 * 64


def test_means_over_rollouts() -> None:
    edits = [
        ('loss_reduction="sum"', ""),
        ("scale=divided, ", ""),
        ("        num_generations", "        loss_type='grpo',\n        num_generations"),
    ]
    found = RECIPE.run(edits=edits, STEPS=4).names["gns"].compute().clusters
    assert found.updates == 4 and found.independent.trace > 0
