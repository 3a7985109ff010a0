# SPDX-License-Identifier: Apache-2.0
"""Small language models in the manner of those that people train by hand: nanoGPT, build-nanogpt,
modded-nanogpt, nanochat. Each gives its loss, a mean over tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast

B, T, D, H, V, L = 4, 6, 16, 2, 23, 2


def tokens() -> tuple[Tensor, Tensor]:
    """Input and targets, of which some are ignored."""
    return torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The sum over samples of each one's loss."""
    found: Any = model(*batch)
    loss: Tensor = found[1] if isinstance(found, tuple) else found
    return loss * len(batch[0])


def learned(model: nn.Module, batch: tuple[Tensor, Tensor]) -> gnsfast.Table:
    """The table of a model that may return its loss alone: its head shows the logits."""

    def run(batch: Any) -> Any:
        caught: list[Tensor] = []
        handle = model.lm_head.register_forward_hook(lambda m, x, y: caught.append(y))
        model(*batch)
        handle.remove()
        return caught

    return gnsfast.learn(model, batch, run=run)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return y.transpose(1, 2).flatten(2)


class BiasNorm(nn.Module):
    """nanoGPT's layer norm, whose bias may be left out."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    """With ``bias`` a block of nanoGPT, else of build-nanogpt."""

    def __init__(self, norm: Any, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = norm(), norm()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D, bias=bias)
        self.c_fc, self.c_out = nn.Linear(D, 4 * D, bias=bias), nn.Linear(4 * D, D, bias=bias)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.c_attn(self.ln_1(x)).split(D, dim=2))
        x = x + self.dropout(self.c_proj(attend(q, k, v)))
        return x + self.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """Positions by a bare index, a norm of its own, a head that shares the tokens' weight."""

    def __init__(self, bias: bool = True, own_norm: bool = True) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return BiasNorm(D, bias) if own_norm else nn.LayerNorm(D)

        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, D),
                "wpe": nn.Embedding(2 * T, D),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(NanoBlock(norm, bias) for _ in range(L)),
                "ln_f": norm(),
            }
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device)
        x = parts.drop(parts.wte(idx) + parts.wpe(pos))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class CastedLinear(nn.Linear):
    """Its weight is kept in float32, and cast where it is used."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


def rotated(x_BHTD: Tensor) -> Tensor:
    half, steps = x_BHTD.shape[-1] // 2, torch.arange(x_BHTD.shape[2], dtype=x_BHTD.dtype)
    angles = steps[:, None] / 10 ** torch.arange(half, dtype=x_BHTD.dtype)
    a, b = x_BHTD.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class ModdedBlock(nn.Module):
    """modded-nanogpt's: norms without weights, mixed values, squared ReLU, coefficients."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (CastedLinear(D, D) for _ in range(3))
        self.c_proj, self.c_fc = CastedLinear(D, D), CastedLinear(D, 4 * D)
        self.c_out = CastedLinear(4 * D, D)
        nn.init.zeros_(self.c_proj.weight)
        nn.init.zeros_(self.c_out.weight)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.lamb = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, x0: Tensor, ve: Tensor) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        q, k, v = (heads(layer(norm(x))) for layer in (self.c_q, self.c_k, self.c_v))
        v = (1 - self.lamb) * v + self.lamb * heads(ve).view_as(v)
        x = x + self.c_proj(attend(rotated(norm(q)), rotated(norm(k)), v, scale=0.12))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class ModdedGPT(nn.Module):
    """Value embeddings, skip weights from the first half of the blocks to the second, capped
    logits; its forward gives the loss alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.value_embeds = nn.ModuleList(nn.Embedding(V, D) for _ in range(2 * L))
        self.blocks = nn.ModuleList(ModdedBlock() for _ in range(2 * L))
        self.skip_weights = nn.Parameter(torch.ones(L))
        self.lm_head = CastedLinear(D, V)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = x0 = norm(self.embed(idx))
        skips = []
        for i, (block, embed) in enumerate(zip(self.blocks, self.value_embeds)):
            if i < L:
                x = block(x, x0, embed(idx))
                skips.append(x)
            else:
                x = x + self.skip_weights[i - L] * skips.pop()
                x = block(x, x0, embed(idx))
        logits = self.lm_head(norm(x))
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.view(-1, V).float(), targets.view(-1))


class ChatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.c_fc, self.c_out = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)
        self.ve_gate = nn.Linear(4, H, bias=False)

    def forward(self, x: Tensor, ve: Tensor | None) -> Tensor:
        y = norm(x)
        q, k, v = heads(self.c_q(y)), heads(self.c_k(y)), heads(self.c_v(y))
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(y[..., :4]))
            v = v + gate.transpose(1, 2)[..., None] * heads(ve)
        x = x + self.c_proj(attend(norm(rotated(q)), norm(rotated(k)), v))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class NanoChat(nn.Module):
    """Coefficients of the residual stream and of its start on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V + 1, bias=False)
        self.value_embeds = nn.ModuleDict({"1": nn.Embedding(V, D)})
        self.h = nn.ModuleList(ChatBlock() for _ in range(L))
        self.resid_lambdas = nn.Parameter(torch.ones(L))
        self.x0_lambdas = nn.Parameter(torch.zeros(L))

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean"
    ) -> Tensor:
        x = x0 = norm(self.wte(idx))
        for i, block in enumerate(self.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve)
        logits = self.lm_head(norm(x))[..., :V].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        flat = logits.view(-1, V), targets.view(-1)
        return F.cross_entropy(*flat, ignore_index=-1, reduction=loss_reduction)


MODELS: dict[str, Any] = {
    "nanoGPT": NanoGPT,
    "nanoGPT without bias": lambda: NanoGPT(bias=False),
    "build-nanogpt": lambda: NanoGPT(own_norm=False),
    "modded-nanogpt": ModdedGPT,
    "nanochat": NanoChat,
}


def trained(model: nn.Module) -> nn.Module:
    """Away from the zeros of initialisation, which hide what lies before them."""
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p) / math.sqrt(D)
    return model
