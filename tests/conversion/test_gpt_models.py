# SPDX-License-Identifier: Apache-2.0
"""Language models that people write by hand: ``convert(model, example=batch)`` and nothing else."""

import gpt_models
import pytest
import torch
from gpt_models import MODELS, B, loss_of, tokens, trained
from oracle import assert_norms, loop_sqnorms
from torch import nn

import gnsfast

ROUTES = {
    "nanoGPT": {"linear", "layer_norm", "embedding", "embedding + linear"},
    "nanoGPT without bias": {"linear", "layer_norm", "embedding", "embedding + linear"},
    "build-nanogpt": {"linear", "layer_norm", "embedding", "embedding + linear"},
    "modded-nanogpt": {"linear", "embedding", "copies"},
    "nanochat": {"linear", "embedding", "copies"},
}


@pytest.mark.second
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gpt_models(name: str, initial: bool) -> None:
    """Every parameter, without a replay, as it is initialised and as it is after some steps."""
    model, batch = MODELS[name](), tokens()
    model = model if initial else trained(model)
    for module in model.modules():
        module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
    loop = loop_sqnorms(model, loss_of, batch, B)
    want = loss_of(model, batch)
    gnsfast.convert(model, example=batch)
    table = gnsfast.coverage(model)
    assert table.covered_fraction == 1 and {r.route for r in table.rows} == ROUTES[name], table
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss = loss_of(model, batch)
        loss.backward()
    assert torch.equal(loss, want)
    assert_norms(norms, loop)


@pytest.mark.second
@pytest.mark.parametrize("name", ["nanoGPT", "modded-nanogpt"])
def test_their_norms_with_dropout_and_in_bfloat16(name: str) -> None:
    """Dropout is on where they train, and the example is a batch without targets or a function."""
    model, batch = trained(MODELS[name]()), tokens()
    gnsfast.convert(model, example=lambda: loss_of(model, batch).backward())
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch).backward()
    assert bool((norms.total() > 0).all())
    assert gpt_models.L < len(norms)
