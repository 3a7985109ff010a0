# SPDX-License-Identifier: Apache-2.0
"""What is measured: a whole training step, and single linear layers named after their model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from gnsfast import reference

TOKENS = 4096
"""Tokens of a batch in the cases of single layers; a sample has T of them."""

LENGTHS = (1, 64, 128, 512, 2048)


@dataclass(frozen=True)
class LayerCase:
    """A linear layer [O, I] over ``TOKENS`` tokens in samples of T."""

    model: str
    I: int
    O: int
    T: int
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        return f"{self.model} {self.I}x{self.O} T={self.T}"

    @property
    def B(self) -> int:
        return max(1, self.tokens // self.T)


LAYERS = [
    LayerCase(model, I, O, T)
    for model, I, O in (
        ("GPT-2 out", 768, 768),
        ("GPT-2 up", 768, 3072),
        ("small GPT head", 384, 4096),
    )
    for T in LENGTHS
]


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
        out: Tensor = x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return out


class GPT(nn.Module):
    """4 layers, width 384, 6 heads, 256 tokens, 4096 words, untied head: 10.4M parameters."""

    B, T, vocabulary = 8, 256, 4096

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(self.T, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        positions_1T = torch.arange(self.T, device=ids_BT.device)[None]
        x_BTD = self.tokens(ids_BT) + self.positions(positions_1T)
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


class GPT2(GPT):
    """As GPT-2 124M: 12 layers of width 768, 1024 tokens; the head tied to the embedding."""

    B, T, vocabulary = 16, 1024, 50304

    def __init__(self) -> None:
        super().__init__(width=768, heads=12, layers=12)
        self.head.weight = self.tokens.weight


class LlamaBlock(nn.Module):
    """A block of a 1B Llama: width 2048, 32 heads, SwiGLU of 8192, no biases."""

    def __init__(self, width: int = 2048, heads: int = 32, inner: int = 8192) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        linear = partial(nn.Linear, bias=False)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, inner),
            linear(width, inner),
            linear(inner, width),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x_BTD)
        out: Tensor = x_BTD + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def gpt_batch(model: type[GPT] = GPT, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, model.vocabulary, (model.B, model.T + 1), device=device)
    return ids[:, :-1], ids[:, 1:]


def gpt_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def training_step(per_sample: bool) -> Callable[[], None]:
    """Forward, loss, backward, AdamW, on a model of its own."""
    torch.manual_seed(0)
    model, batch = GPT(), gpt_batch()
    if per_sample:
        gnsfast.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        if per_sample:
            with gnsfast.per_sample_sqnorms(model, GPT.B) as norms:
                gpt_loss(model, batch).backward()
            norms.total()
        else:
            gpt_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def estimated_step() -> tuple[Callable[[], None], Callable[[], float]]:
    """A measured training step, and the seconds that ``GradientNoiseScale`` itself took so far:
    entering and leaving the micro-batch, ``update`` and a ``compute`` every ten steps. The layers'
    own share is not in it.
    """
    torch.manual_seed(0)
    model, batch = gnsfast.convert(GPT()), gpt_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gns = gnsfast.GradientNoiseScale(model)
    spent, steps = 0.0, 0

    def step() -> None:
        nonlocal spent, steps
        microbatch = gns.microbatch(GPT.B)
        start = time.perf_counter()
        microbatch.__enter__()
        spent += time.perf_counter() - start
        gpt_loss(model, batch).backward()
        start = time.perf_counter()
        microbatch.__exit__(None, None, None)
        gns.update()
        steps += 1
        if steps % 10 == 0:
            gns.compute()
        spent += time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: spent


def layer_passes(case: LayerCase) -> dict[str, Callable[[], None]]:
    """Forward and backward of the one layer, input gradient included."""
    torch.manual_seed(0)
    x = torch.randn(case.B, case.T, case.I, requires_grad=True)
    dy = torch.randn(case.B, case.T, case.O)
    plain, ours = nn.Linear(case.I, case.O), gnsfast.Linear(case.I, case.O)

    def clear(layer: nn.Module) -> None:
        layer.zero_grad()
        x.grad = None

    def run_plain() -> None:
        plain(x).backward(dy)
        clear(plain)

    def run_ours() -> None:
        with gnsfast.per_sample_sqnorms(ours, case.B):
            ours(x).backward(dy)
        clear(ours)

    return {"plain": run_plain, "gnsfast": run_ours}


def weight_gradients(case: LayerCase) -> dict[str, Callable[[], object]]:
    """dW alone, dW with norms by gnsfast's operator, and by each way to write it by hand."""
    torch.manual_seed(0)
    x_BTI, dy_BTO = torch.randn(case.B, case.T, case.I), torch.randn(case.B, case.T, case.O)
    f32 = torch.float32

    def plain() -> Tensor:
        return dy_BTO.flatten(0, 1).T @ x_BTI.flatten(0, 1)

    def gram() -> tuple[Tensor, Tensor]:
        norms = (dy_BTO @ dy_BTO.mT).mul_(x_BTI @ x_BTI.mT).sum((1, 2))
        return plain(), norms

    def loop() -> tuple[Tensor, Tensor]:
        dw, norms = torch.zeros(case.O, case.I), []
        for x_TI, dy_TO in zip(x_BTI, dy_BTO):
            g_OI = dy_TO.T @ x_TI
            norms.append(g_OI.square().sum())
            dw += g_OI
        return dw, torch.stack(norms)

    def materialize() -> tuple[Tensor, Tensor]:
        g_BOI = torch.bmm(dy_BTO.mT, x_BTI)
        return g_BOI.sum(0), g_BOI.flatten(1).square().sum(1)

    def ours() -> tuple[Tensor, ...]:
        sqnorms: tuple[Tensor, ...] = torch.ops.gnsfast.linear_wgrad(
            x_BTI, dy_BTO, True, False, False, f32
        )
        return sqnorms

    ways: dict[str, Callable[[], object]] = {"plain": plain, "gnsfast": ours}
    if case.T > 1:  # a loop over 4096 samples of one token takes a minute
        ways |= {"Gram": gram, "loop": loop}
    if case.B * case.O * case.I <= 1 << 28:  # 1 GiB
        ways["materialize"] = materialize
    return ways


def route(case: LayerCase) -> str:
    """Which route gnsfast takes there."""
    return reference.linear_route(case.T, case.I, case.O)
