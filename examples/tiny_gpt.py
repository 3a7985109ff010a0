# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT, and the text that it learns: the language reference that CPython ships."""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.fed_forward(self.norm_2(x_BTD))

    def fed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class TinyGPT(nn.Module):
    """The head is tied to the token embedding."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        x_BTD = self.tokens(ids_BT) + self.positions(positions_1T)
        return self.head(self.norm(self.blocks(x_BTD)))


def read_text() -> Tensor:
    """Python's language reference as bytes."""
    return torch.tensor(list("\n".join(topics.values()).encode()))


def draw(text: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """[samples, CONTEXT + 1] windows of the text, drawn independently."""
    starts = torch.randint(len(text) - CONTEXT - 1, (samples, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, batch_BT: Tensor) -> Tensor:
    logits_BTV = model(batch_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten())
