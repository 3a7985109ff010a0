# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer: its Llama 3 debug model, FSDP2 on two processes, its own logger."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from clients.recipes import Ran, Recipe, against, compare
from torch import Tensor, nn

import gnsfast

pytestmark = pytest.mark.dist
RECIPE = Recipe("torchtitan")
STEPS, RANKS, LOCAL, T = 8, 2, 4, 64
ALWAYS = ("measured(config)", "measured(config, budget=0.0)")
HEAD = ("measured(config)", "measured(config, budget=0.0, head=True)")
KEEP = (
    "trainer = config.build()\n",
    "trainer = config.build()\n"
    "parameters = trainer.model_parts[0].named_parameters()\n"
    "inside = '_checkpoint_wrapped_module.'\n"
    "whole = {name.replace(inside, ''): p.detach().full_tensor() for name, p in parameters}\n"
    "torch.save(whole, f'{os.environ[\"KEPT\"]}/{torch.distributed.get_rank()}.pt')\n",
)
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = [
    (
        "trainer = config.build()\ntrainer.train()\ntrainer.close()\n",
        "import os, sys, types\n"
        "from torchtitan.train import main\n"
        "from torchtitan_config import measured\n"
        "from unittest.mock import patch\n"
        "sys.modules['own'] = types.ModuleType('own')\n"
        "sys.modules['own'].tiny = lambda: measured(config)\n"
        "options = '--module own --config tiny --window 4 --budget 0.0'.split()\n"
        "with patch.object(sys, 'argv', ['train', *options]):\n"
        "    main()\n",
    ),
    ("torch.distributed.get_rank() == 0", "os.environ['RANK'] == '0'"),
    (
        "torch.distributed.destroy_process_group()\n",
        "    noise_scale = written.Scalars('gns/trace')[-1].value\n",
    ),
]
"""Of the program without our lines: torchtitan's main takes the place of its own."""


def loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[None, :-1])[0], words[1:])


def plain_model() -> nn.Module:
    import clients.torchtitan_cpu
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    assert clients.torchtitan_cpu  # before torchtitan
    config = llama3_debugmodel().model_spec.model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config.build()


def run(folder: Path, ours: bool) -> Ran:
    """Each update is measured."""
    return RECIPE.launch(folder, RANKS, ours, edits=[ALWAYS] if ours else ())


def test_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = compare(RECIPE, "torchtitan", lambda ours: run(tmp_path, ours), 1)
    assert row["loss"] == "bit-identical"
    monkeypatch.setenv("KEPT", str(tmp_path))
    edits = [("import torch\n", "import os, torch\n"), KEEP]
    frozen = {"LEARNING_RATE": 0.0, "STEPS": STEPS}
    model, generators = (
        plain_model(),
        [torch.Generator().manual_seed(rank) for rank in range(RANKS)],
    )
    batches = [(LOCAL, T + 1)] * 2 * STEPS  # of two micro-batches a step
    words = [torch.randint(0, 40, shape, generator=g) for g in generators for shape in batches]
    for measures, has_head in ((HEAD, True), (ALWAYS, False)):
        ran = RECIPE.launch(tmp_path, RANKS, edits=[*edits, measures], **frozen)
        kept = torch.load(tmp_path / "0.pt")
        assert kept.keys() == dict(model.named_parameters()).keys()
        model.load_state_dict(kept, strict=False)  # its own hooks rename parts of fused projections
        model.lm_head.requires_grad_(has_head)
        truth = gnsfast.brute_force_noise_scale(model, loss, torch.cat(words), blocks=8)
        against(row, ran.names["noise_scale"], truth.noise_scale)
        assert "gns/b_simple" in ran.names["logged"]


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's own command, with a module of configurations, measures what the recipe does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    edits = [("measured(config)", "measured(config, budget=0.0, window=4)")]
    edits += [("compute().noise_scale", "compute().trace")]  # which is logged at every step
    recipe = RECIPE.launch(tmp_path, RANKS, edits=edits)
    own = RECIPE.launch(tmp_path, RANKS, ours=False, edits=COMMAND)
    assert own.losses == recipe.losses
    assert own.names["noise_scale"] == pytest.approx(recipe.names["noise_scale"], rel=1e-6)
