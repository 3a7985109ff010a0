# SPDX-License-Identifier: Apache-2.0
"""Models as their users have them: transformers, with and without LoRA."""

import copy
from typing import Any

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from peft import LoraConfig, get_peft_model
from tiny_models import ADAPTED, MODELS, B, loss_of, scattered
from torch import nn

import gnsfast


def adapted(name: str, model: nn.Module) -> nn.Module:
    targets = ADAPTED.get(name, ["q_proj", "v_proj"])
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, fan_in_fan_out=name == "gpt2")
    return get_peft_model(model, config)


@pytest.mark.second
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, lora: bool) -> None:
    model, batch = MODELS[name]()
    model = scattered(adapted(name, model) if lora else model)
    plain = copy.deepcopy(model)
    want = loss_of(plain, batch)
    want.backward()

    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss_of(model, batch).backward()
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), n
        if q.grad is not None:
            close = dict(rtol=1e-4, atol=1e-5 * q.grad.abs().max().item() + 1e-7)
            torch.testing.assert_close(p.grad, q.grad, **close, msg=lambda m, n=n: f"{n}: {m}")

    rows = {r.parameter: r for r in gnsfast.coverage(model).rows}
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(rows) == {n for n, _ in model.named_parameters()}
    assert {n for n in trainable if rows[n].static} == trainable
    assert torch.equal(loss_of(model, batch), want)  # torch's bits
    assert_norms(norms, loop_sqnorms(plain, loss_of, batch, B))

    verdict = gnsfast.verify(model, lambda m, b: loss_of(m, b) / len(b["labels"]), batch)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_autocast(name: str) -> None:
    """bfloat16 as it is trained: no further from the loop than twice the plain loop at bfloat16."""
    model, batch = MODELS[name]()
    scattered(model)
    loop = loop_sqnorms(model, loss_of, batch, B)
    whole = torch.stack(list(loop.values())).sum(0)

    def cast_loss(m: nn.Module, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m, b)

    torch_total = torch.zeros(B, dtype=torch.float64)
    for b in range(B):
        one = {k: v[b : b + 1] for k, v in batch.items()}
        for g in torch.autograd.grad(cast_loss(model, one), list(model.parameters())):
            torch_total[b] += g.double().square().sum()
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        cast_loss(model, batch).backward()
    error = ((norms.total() - whole).abs() / whole).max()
    assert error <= 2 * ((torch_total - whole).abs() / whole).max()
