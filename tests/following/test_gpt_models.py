# SPDX-License-Identifier: Apache-2.0
"""Language models that people write by hand."""

import gpt_models
import pytest
import torch
from gpt_models import MODELS, B, learned, loss_of, tokens, trained
from oracle import assert_norms, loop_sqnorms
from torch import nn

import gnsfast

NANO = {"linear", "layer_norm", "embedding + linear", "add"}
ROUTES = {
    "nanoGPT": NANO,
    "nanoGPT without bias": NANO,
    "build-nanogpt": NANO,
    "modded-nanogpt": {"linear", "embedding", "mul"},
    "nanochat": {"linear", "embedding", "mul"},  # a gate of the first block is as its sibling
}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.second
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gpt_models(name: str, initial: bool) -> None:
    """Every parameter, as it is initialised and as it is after some steps."""
    model, batch = without_dropout(MODELS[name]()), tokens()
    model = model if initial else trained(model)
    loop = loop_sqnorms(model, loss_of, batch, B)
    want = loss_of(model, batch)
    with gnsfast.per_sample_sqnorms(model, B, table=learned(model, batch)) as norms:
        loss = loss_of(model, batch)
        loss.backward()
    assert torch.equal(loss, want)
    assert_norms(norms, loop)
    table = gnsfast.coverage(model)
    assert table.covered_fraction == 1 and {r.route for r in table.rows} == ROUTES[name], table


@pytest.mark.second
@pytest.mark.parametrize("name", ["nanoGPT", "modded-nanogpt", "nanochat"])
def test_gpt_models_compiled(name: str) -> None:
    model, batch = trained(without_dropout(MODELS[name]())), tokens()
    compiled = torch.compile(model, backend="aot_eager")
    with gnsfast.per_sample_sqnorms(model, B, table=learned(model, batch)) as eager:
        loss_of(model, batch).backward()
    for _ in range(2):
        with gnsfast.per_sample_sqnorms(compiled, B, audit="always") as norms:
            loss_of(compiled, batch).backward()
        for name in eager:  # the norms of nanochat's activations lose digits
            torch.testing.assert_close(norms[name], eager[name], rtol=1e-3, atol=1e-6)


@pytest.mark.second
@pytest.mark.parametrize("name", ["nanoGPT", "modded-nanogpt"])
def test_their_norms_with_dropout_and_in_bfloat16(name: str) -> None:
    """Dropout is on where they train."""
    model, batch = trained(MODELS[name]()), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        table = learned(model, batch)
    with gnsfast.per_sample_sqnorms(model, B, audit="always", table=table) as norms:
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch).backward()
    assert bool((norms.total() > 0).all())
    assert gpt_models.L < len(norms)
