# SPDX-License-Identifier: Apache-2.0
"""A training loop of timm's parts, over a vision transformer with a class token."""

from typing import Any

from clients.recipes import Recipe, against, compare
from torch import Tensor, nn

import gnsfast

RECIPE = Recipe("timm")


def test_recipe() -> None:
    row = compare(RECIPE, "timm")
    ran = RECIPE.run(LEARNING_RATE=0.0, STEPS=20)
    names: dict[str, Any] = ran.names

    def loss(model: nn.Module, sample: tuple[Tensor, Tensor]) -> Tensor:
        value: Tensor = names["loss_fn"](model(sample[0][None]), sample[1][None])
        return value

    chosen = names["order"].flatten()
    samples = list(zip(names["images"][chosen], names["labels"][chosen]))
    truth = gnsfast.brute_force_noise_scale(names["model"], loss, samples)
    against(row, names["noise_scale"], truth.noise_scale)
    rows = gnsfast.coverage(names["model"]).rows
    routes = {r.parameter: r.route for r in rows}
    assert routes["cls_token"] and routes["pos_embed"] and all(r.observed for r in rows)
