# SPDX-License-Identifier: Apache-2.0
"""The models that are trained while a step is timed, and those so narrow that only the host's work
and the launches count.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_gpt import Block


class GPT(nn.Module):
    """4 layers, width 384, 6 heads, 256 tokens, 4096 words, untied head: 10.4M parameters."""

    B, T, vocabulary = 8, 256, 4096
    sizes = 384, 6, 4
    """Width, heads and layers."""
    tied = False

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        width, heads, layers = sizes or self.sizes
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(self.T, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.vocabulary, bias=False)
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        # A row of positions per sample, in memory of its own: with [1, T], which gnsfast takes too,
        # Opacus, BackPACK and FastDP's rule see one sample, and Opacus wants to view it.
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(len(ids_BT), 1)
        x_BTD = self.tokens(ids_BT) + self.positions(positions_BT)
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


class GPT2(GPT):
    """As GPT-2 124M: 12 layers of width 768, 1024 tokens; the head tied to the embedding."""

    B, T, vocabulary = 16, 1024, 50304
    sizes, tied = (768, 12, 12), True


class LlamaBlock(Block):
    """A block of a Llama: SwiGLU, no biases."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        linear = partial(nn.Linear, bias=False)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, inner),
            linear(width, inner),
            linear(inner, width),
        )

    def fed_forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


def gpt_batch(model: type[GPT] = GPT, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, model.vocabulary, (model.B, model.T + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # Opacus's ghost norms view them


def gpt_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class NarrowGPT2(GPT):
    """The layers of GPT-2: 12 blocks, the head tied to the embedding."""

    B, T, vocabulary = 4, 16, 512
    sizes, tied = (32, 2, 12), True


class Perceptron(nn.Sequential):
    """32-64-8, as the README's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


def labelled() -> tuple[Tensor, Tensor]:
    """A batch of the perceptron's."""
    return torch.randn(16, 32), torch.randint(0, 8, (16,))


def perceptron_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt_case(kind: type[GPT]) -> tuple[type[GPT], Any, tuple[Tensor, ...]]:
    """A model, its loss and a batch."""
    return kind, gpt_loss, gpt_batch(kind)


def perceptron_case() -> tuple[type[Perceptron], Any, tuple[Tensor, ...]]:
    return Perceptron, perceptron_loss, labelled()


class OwnLayerNorm(nn.Module):
    """``torch.nn.LayerNorm`` without a bias, which torch once lacked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads = heads
        self.norm_1, self.norm_2 = OwnLayerNorm(width), OwnLayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x_BTD)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x_BTD + self.mlp(self.norm_2(x_BTD))
        return out


class NanoGPT(nn.Module):
    """The traits of nanoGPT's, at the size of its recipe for a CPU: a layer norm of its own, no
    biases, positions that all samples share, a head tied to the embedding.
    """

    B, T, vocabulary = 12, 64, 65

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, width) for n in (self.vocabulary, self.T))
        self.blocks = nn.Sequential(*(NanoBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = OwnLayerNorm(width), nn.Linear(width, self.vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits
