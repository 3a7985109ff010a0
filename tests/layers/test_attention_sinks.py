# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: an attention module of transformers that owns sinks."""

import copy

import torch
from layers import assert_as_loop
from oracle import assert_norms, loop_sqnorms
from tiny_models import B, T, gpt_oss, loss_of, scattered
from torch import nn

import gnsfast


def converted() -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    """Plain, converted, and a batch in which one sample ends in padding."""
    model, batch = gpt_oss()
    plain = copy.deepcopy(scattered(model))
    batch["attention_mask"] = torch.ones(B, T, dtype=torch.int64)
    batch["attention_mask"][1, -2:] = 0
    return plain, model, batch


def test_sinks() -> None:
    """Outputs and gradients as in transformers, and the norms of single samples, by a kernel."""
    plain, model, batch = converted()
    assert torch.equal(loss_of(model, batch), loss_of(plain, batch))
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        loss = loss_of(model, batch)
        loss.backward()
    want = loss_of(plain, batch)
    want.backward()
    torch.testing.assert_close(loss, want)
    for (n, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=n)
    loop = loop_sqnorms(plain, loss_of, batch, B)
    assert_norms(norms, loop)
    rows = {r.parameter: r for r in gnsfast.coverage(model).rows}
    assert all(rows[f"model.layers.{i}.self_attn.sinks"].observed for i in (0, 1))


def test_dropout() -> None:
    """Its gradients are those of the numbers that were drawn."""
    model, batch = gpt_oss()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    model.train()
    with gnsfast.per_sample_sqnorms(model, B, audit="always") as norms:
        torch.manual_seed(1)
        loss_of(model, batch).backward()
    name = "model.layers.0.self_attn.sinks"
    torch.manual_seed(1)
    labels, logits = batch["labels"], model(batch["input_ids"], use_cache=False).logits
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    ).view(B, -1)
    for b in range(B):
        term = each[b].mean()
        (g,) = torch.autograd.grad(term, model.get_parameter(name), retain_graph=True)
        torch.testing.assert_close(norms[name][b], g.square().sum(), rtol=1e-3, atol=1e-9)


class Sinks(nn.Module):
    """The fused attention with sinks, scales and gains that are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.sinks, self.scale = nn.Parameter(torch.randn(2)), nn.Parameter(torch.rand(2) + 0.5)
        self.q_gain, self.k_gain = (nn.Parameter(torch.rand(4) + 0.5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        own = dict(logit_scale=self.scale, q_gain=self.q_gain, k_gain=self.k_gain)
        out: torch.Tensor = gnsfast.functional.attention(
            q, k, v, is_causal=True, sinks=self.sinks, **own
        )
        return out.transpose(1, 2).flatten(2)


def test_fused() -> None:
    model, batch = Sinks(), (torch.randn(B, T, 8), torch.randn(B, T, 8))
    assert_as_loop(model, batch, B)
