# SPDX-License-Identifier: Apache-2.0
"""Accelerate's plain loop with accumulation, also in two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from clients.recipes import Ran, Recipe, against, compare
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("accelerate")


def loss(model: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(sample[0][None]), sample[1][None])


def truth_of(ran: Ran) -> float:
    """At a learning rate of 0: that of all samples at the weights of the start."""
    model = ran.names["accelerator"].unwrap_model(ran.names["model"])
    return gnsfast.brute_force_noise_scale(model, loss, ran.names["dataset"]).noise_scale


def test_recipe() -> None:
    row = compare(RECIPE, "accelerate")
    ran = RECIPE.run(LEARNING_RATE=0.0)
    against(row, ran.names["noise_scale"], truth_of(ran))


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    """Half the batch on each of two has the losses, and the noise scale of a frozen model."""
    half = [("batch_size=160", "batch_size=80")]
    frozen: dict[str, Any] = dict(LEARNING_RATE=0.0)
    found = RECIPE.launch(tmp_path, 2, edits=half, **frozen)
    one = RECIPE.run(**frozen)
    assert len(found.losses) == len(one.losses)
    assert abs(found.names["noise_scale"] / truth_of(one) - 1) < 0.1
    means = [sum(ran.losses) / len(ran.losses) for ran in (found, one)]
    assert means[0] == pytest.approx(means[1], rel=1e-2)
