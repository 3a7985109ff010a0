# SPDX-License-Identifier: Apache-2.0
"""``gradients="torch"`` in models of transformers, and of experts."""

import copy

import pytest
import torch
from oracle import assert_norms
from torch import Tensor, nn

import gnsfast

pytest.importorskip("transformers")

import tiny_models  # noqa: E402


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "mamba", "mixtral", "gpt_oss"])
def test_bits(name: str, half: bool) -> None:
    torch.manual_seed(0)
    model, batch = tiny_models.MODELS[name]()
    model = tiny_models.scattered(model)
    plain, fused = copy.deepcopy(model), copy.deepcopy(model)
    B = len(batch["labels"])

    def loss_of(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return tiny_models.loss_of(m, batch)

    want = loss_of(plain)
    want.backward()
    with gnsfast.per_sample_sqnorms(fused, B) as of_fused:
        loss_of(fused).backward()
    with gnsfast.per_sample_sqnorms(model, B, gradients="torch") as norms:
        loss = loss_of(model)
        loss.backward()
    assert torch.equal(loss, want)
    for (parameter, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), parameter
        assert p.grad is None or torch.equal(p.grad, q.grad), parameter
    assert_norms(norms, {n: t.double() for n, t in of_fused.items()}, rtol=1e-4)
