# SPDX-License-Identifier: Apache-2.0
"""A GPT with the traits of nanoGPT's, at the size of its recipe for a CPU: a layer norm of its own,
no biases, positions that all samples share, a head tied to the embedding.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, WIDTH, HEADS, LAYERS, VOCABULARY = 12, 64, 128, 4, 4, 65


class LayerNorm(nn.Module):
    """``torch.nn.LayerNorm`` with an optional bias, which torch once lacked."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(linear(WIDTH, 4 * WIDTH), nn.GELU(), linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x_BTD)).split(WIDTH, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x_BTD + self.mlp(self.norm_2(x_BTD))
        return out


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (B, T + 1))
