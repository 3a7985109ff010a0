# SPDX-License-Identifier: Apache-2.0
"""The pattern of nanoGPT's train.py: accumulation, torch.compile, DDP."""

from pathlib import Path

import pytest
import torch
from clients.recipes import Ran, Recipe, against, compare
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("nanogpt")
FROZEN = {"LEARNING_RATE": 0.0, "STEPS": 16}


def loss(model: nn.Module, words: Tensor) -> Tensor:
    value: Tensor = model(words[None, :-1], words[None, 1:])[1]
    return value


def truth_of(ran: Ran) -> float:
    """Over as many new sequences, of the same distribution."""
    names, generator = ran.names, torch.Generator().manual_seed(7)
    words = (torch.rand(1024, names["T"] + 1, generator=generator).square() * 32).long()
    return gnsfast.brute_force_noise_scale(names["raw_model"], loss, words).noise_scale


def test_recipe() -> None:
    row = compare(RECIPE, "torch")
    ran = RECIPE.run(**FROZEN)
    against(row, ran.names["noise_scale"], truth_of(ran))


@pytest.mark.dist
def test_compiled_and_ddp(tmp_path: Path) -> None:
    """The same lines on two processes, and compiled."""
    truth = truth_of(RECIPE.run(LEARNING_RATE=0.0, STEPS=1))
    found = RECIPE.launch(tmp_path, 2, **FROZEN)
    assert abs(found.names["noise_scale"] / truth - 1) < 0.1
    eager = RECIPE.run(STEPS=4)
    compiled = RECIPE.run(STEPS=4, COMPILE=True)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.names["noise_scale"] == pytest.approx(eager.names["noise_scale"], rel=1e-4)
