# SPDX-License-Identifier: Apache-2.0
"""Models that call a module several times in one pass, and the check of a pass."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn

import gnsfast

B, T, D, V = 4, 6, 8, 11


def square(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
    return outputs.square().sum()


def check(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    rtol: float = 1e-5,
    **options: Any,
) -> gnsfast.SampleNorms:
    """Loss and gradients are those of plain torch, norms those of the float64 loop."""
    samples, table = options.pop("samples", B), options.pop("table", None)
    plain = copy.deepcopy(model)
    want = loss(plain, batch)
    want.backward()
    with gnsfast.per_sample_sqnorms(model, samples, audit="always", table=table) as norms:
        value = loss(model, batch)
        value.backward()
    torch.testing.assert_close(value, want)
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert p.grad is not None and p.grad.dtype == p.dtype
            close = dict(rtol=1e-4, atol=1e-5 * q.grad.abs().max().item() + 1e-7)
            torch.testing.assert_close(p.grad, q.grad, **close)
    loop = loop_sqnorms(plain, loss, batch, samples, batch_dim=options.get("batch_dim", 0))
    assert_norms(norms, {n: loop[n] for n in norms}, rtol)
    return norms


class Again(nn.Module):
    """A layer that is called ``times`` times, with a nonlinearity between the calls."""

    def __init__(self, layer: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x)) + x
        return x


class Block(nn.Module):
    """A transformer block of plain layers."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.after = norm(D), norm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return y


class Universal(nn.Module):
    """A transformer whose one block runs ``steps`` times, with an embedding of the step."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, steps: int = 4) -> None:
        super().__init__()
        self.tokens, self.steps = nn.Embedding(V, D), nn.Embedding(steps, D)
        self.block, self.head = Block(norm), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for step in range(self.steps.num_embeddings):
            x = self.block(x + self.steps(torch.full_like(ids, step)))
        y: Tensor = self.head(x)
        return y


class Chunked(nn.Module):
    """A head that is called for each chunk of the tokens; ``tied`` to the embedding."""

    def __init__(self, tied: bool, chunks: int = 4) -> None:
        super().__init__()
        self.tokens, self.head, self.chunks = (
            nn.Embedding(V, D),
            nn.Linear(D, V, bias=False),
            chunks,
        )
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.sin(self.tokens(ids))

    def logits(self, x: Tensor) -> Tensor:
        parts = [F.log_softmax(self.head(part), -1) for part in x.chunk(self.chunks, dim=1)]
        return torch.cat(parts, dim=1)


def albert(**options: Any) -> nn.Module:
    import transformers as hf

    config = hf.AlbertConfig(
        vocab_size=23,
        embedding_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        max_position_embeddings=32,
        **{"num_hidden_layers": 4, **options},
    )
    return hf.AlbertForMaskedLM(config)
