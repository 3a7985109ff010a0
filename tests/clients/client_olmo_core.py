# SPDX-License-Identifier: Apache-2.0
"""OLMo-core's trainer with a callback of ours: its metrics hold the noise scale."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from clients.recipes import Ran, Recipe, against, compare
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("olmo-core")
ALWAYS = [("GNSCallback())", "GNSCallback(budget=None))")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[None])[0, :-1], words[1:])


def run(ours: bool) -> Ran:
    """Each update is measured."""
    return RECIPE.run(ours, ALWAYS if ours else ())


def test_recipe() -> None:
    row = compare(RECIPE, "ai2-olmo-core", run)
    assert row["loss"] == "bit-identical"
    frozen = {"LEARNING_RATE": 0.0, "STEPS": 20}  # one pass over the data
    ran = RECIPE.run(edits=ALWAYS, **frozen)
    words = torch.from_numpy(ran.names["words"].astype("int64")).view(-1, ran.names["T"])
    truth = gnsfast.brute_force_noise_scale(ran.names["model"], loss, words)
    against(row, ran.names["noise_scale"], truth.noise_scale)
    assert ran.names["model"] is ran.names["module"].model
