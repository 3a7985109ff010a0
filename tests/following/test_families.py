# SPDX-License-Identifier: Apache-2.0
"""Architectures that hold their samples in other ways than [B, T, features] have every sample's
norm. ``python -m benchmarks families`` takes all of transformers'.
"""

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("benchmarks")  # a wheel has none

import gnsfast  # noqa: E402
from benchmarks.families import judge  # noqa: E402
from benchmarks.families.models import Family  # noqa: E402

B, T, D, V = 3, 7, 16, 23


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.c_fc, self.c_out = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (2, -1)).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x_BTD)).split(D, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.c_proj(y)
        return x_BTD + self.c_out(F.gelu(self.c_fc(self.ln_2(x_BTD))))


class NanoGPT(nn.Module):
    """Positions are a bare index [T]; the head shares the weight of the tokens' embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(32, D)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx_BT: Tensor) -> Tensor:
        pos = torch.arange(0, idx_BT.shape[1], dtype=torch.long, device=idx_BT.device)
        x = self.wte(idx_BT) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")


def test_nanogpt() -> None:
    model, batch = NanoGPT(), {key: torch.randint(0, V, (B, T)) for key in "xy"}
    loop = loop_sqnorms(model, token_loss, batch, B)
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        token_loss(model, batch).backward()
    assert_norms(norms, loop)
    assert gnsfast.coverage(model).covered_fraction == 1


FAMILIES = [
    ("text", "opt", "OPTForCausalLM"),
    ("text", "gptj", "GPTJForCausalLM"),
    ("text", "falcon", "FalconForCausalLM"),
    ("text", "bloom", "BloomForCausalLM"),
    ("text", "mpt", "MptForCausalLM"),
    ("text", "modernbert", "ModernBertForMaskedLM"),
    ("text", "albert", "AlbertForMaskedLM"),
    ("text", "deberta", "DebertaForMaskedLM"),
    ("image", "swin", "SwinForImageClassification"),
    ("image", "convnext", "ConvNextForImageClassification"),
    ("audio", "wav2vec2", "Wav2Vec2ForCTC"),
]


@pytest.mark.second
@pytest.mark.parametrize("family", FAMILIES, ids=[family[1] for family in FAMILIES])
def test_families(family: tuple[str, str, str]) -> None:
    found = judge.row_of(Family(*family))
    assert (found["verdict"], found["covered"], found["why"]) == ("right", 1.0, ""), found


@pytest.mark.second
def test_clip() -> None:
    """Its logits are of each pair of samples: their scale belongs to none."""
    found = judge.row_of(Family("image and text", "clip", "CLIPModel"))
    assert found["verdict"] == "right" and 0.999 < found["covered"] < 1, found
    assert found["why"].startswith("1 elements left out"), found
