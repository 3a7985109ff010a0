# SPDX-License-Identifier: Apache-2.0
"""An optimizer that averages gradients inside of ``step()``, on two processes: that of the recipe,
and nanochat's own where ``NANOCHAT`` names a clone of its repository.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from clients.recipes import Edits, Ran, Recipe, against, compare
from torch import Tensor, nn

import gnsfast

pytestmark = pytest.mark.dist
RECIPE = Recipe("nanochat")
RANKS, STEPS = 2, 40
ALWAYS = (', "budget": 0.02', "")
OWN: Edits = ()
THEIRS: Edits = [
    (
        "import torch\n",
        "import os, sys, torch\n"
        "import clients.averages_by_sums\n"
        "sys.path.insert(0, os.environ['NANOCHAT'])\n"
        "torch.compiler.set_stance('force_eager')\n"
        "from nanochat.optim import MuonAdamW\n",
    ),
    (
        'optimizer = Adam(model.parameters(), {"lr": LEARNING_RATE})',
        "both = {'lr': LEARNING_RATE, 'weight_decay': 0.0}\n"
        "muon = {'kind': 'muon', 'momentum': 0.9, 'ns_steps': 5, 'beta2': 0.9, **both}\n"
        "adamw = {'kind': 'adamw', 'betas': (0.9, 0.95), 'eps': 1e-8, **both}\n"
        "parts = [(model.c_attn, muon), (model.mlp, muon), (model.wte, adamw)]\n"
        "parts += [(model.lm_head, adamw)]\n"
        "optimizer = MuonAdamW([{'params': [m.weight], **kind} for m, kind in parts])",
    ),
]


def loss(model: nn.Module, words: Tensor) -> Tensor:
    value: Tensor = model(words[None, :-1], words[None, 1:])
    return value


def brute_force() -> float:
    """At the first weights, over all samples of ``STEPS`` updates of both processes."""
    names: dict[str, object] = {}
    exec(RECIPE.plain.partition("dist.init_process_group")[0], names)
    model_class, shape = names["Model"], (names["BATCH"], names["T"] + 1)
    torch.manual_seed(0)
    model = model_class()
    words = []
    for rank in range(RANKS):
        generator = torch.Generator().manual_seed(1 + rank)
        for _ in range(STEPS * names["ACCUMULATED"]):
            words.append((torch.rand(shape, generator=generator).square() * 20).long())
    return gnsfast.brute_force_noise_scale(model, loss, torch.cat(words)).noise_scale


def run(folder: Path, optimizer: Edits, ours: bool, **changed: float) -> Ran:
    """Each update is measured."""
    edits = [*optimizer, ALWAYS] if ours else optimizer
    return RECIPE.launch(folder, RANKS, ours, edits=edits, **changed)


@pytest.mark.parametrize("optimizer", [OWN, THEIRS], ids=["recipe", "nanochat"])
def test_recipe(optimizer: Edits, tmp_path: Path) -> None:
    if optimizer and "NANOCHAT" not in os.environ:
        pytest.skip("NANOCHAT=/path/to/nanochat runs its optimizer")
    row = compare(RECIPE, "torch", partial(run, tmp_path, optimizer), 1)
    assert row["loss"] == "bit-identical"
    ran = run(tmp_path, optimizer, True, LEARNING_RATE=0.0, STEPS=STEPS)
    against(row, ran.names["noise_scale"], brute_force())
