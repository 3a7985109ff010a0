# SPDX-License-Identifier: Apache-2.0
"""Architectures that hold their samples in other ways than [B, T, features]: ``convert(model)``
gives every sample's norm, or says why not. ``python -m benchmarks families`` takes all of
transformers'.
"""

import re

import pytest
import torch
from oracle import assert_norms, loop_sqnorms
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("benchmarks")  # a wheel has none

import gnsfast  # noqa: E402
from benchmarks import family_judge  # noqa: E402
from benchmarks.family_models import Family  # noqa: E402

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
    gnsfast.convert(model, example=batch["x"])
    with gnsfast.per_sample_sqnorms(model, B) as norms:
        token_loss(model, batch).backward()
    assert_norms(norms, loop)
    assert gnsfast.coverage(model).covered_fraction == 1


ROWS = r"shape \[21, 32\].* every 7 consecutive rows"
CALLS = "backward went through it 2 times"
WINDOWS = r"shape \[12, 16, 32\].* every 4 consecutive rows"
DROPOUT = "^128 elements left out: it contains dropout, and a replay would draw other masks$"
MASKED = "^32 elements left out: it contains dropout, and a replay would draw other masks$"

# Without an example and with one: a verdict, and what there is to say about it.
EXPECTED = {
    ("text", "opt", "OPTForCausalLM"): ("refused", ROWS, "right", "^$"),
    ("text", "gptj", "GPTJForCausalLM"): ("right", "^$", "right", "^$"),
    ("text", "falcon", "FalconForCausalLM"): ("right", "^$", "right", "^$"),
    ("text", "bloom", "BloomForCausalLM"): ("right", "^$", "right", "^$"),
    ("text", "mpt", "MptForCausalLM"): ("right", "^$", "right", "^$"),
    ("text", "modernbert", "ModernBertForMaskedLM"): ("right", "^$", "right", "^$"),
    ("text", "albert", "AlbertForMaskedLM"): ("refused", CALLS, "right", "^$"),
    ("text", "deberta", "DebertaForMaskedLM"): ("right, with replay", DROPOUT, "right", "^$"),
    ("image", "swin", "SwinForImageClassification"): ("refused", WINDOWS, "right", "^$"),
    ("image", "convnext", "ConvNextForImageClassification"): (
        *("right, with replay", "^$"),
        *("right", "^$"),
    ),
    ("image and text", "clip", "CLIPModel"): (
        *("right, with replay", "^1 elements left out: the model itself uses this parameter"),
        *("right", "^$"),
    ),
    ("audio", "wav2vec2", "Wav2Vec2ForCTC"): (*("right, with replay", MASKED) * 2,),
}


@pytest.mark.second
@pytest.mark.parametrize("family", EXPECTED, ids=[family[1] for family in EXPECTED])
def test_families(family: tuple[str, str, str]) -> None:
    found = family_judge.row_of(Family(*family))
    expected = EXPECTED[family]
    for way, word, why in zip(family_judge.WAYS, expected[::2], expected[1::2]):
        assert found[way] == word, found
        assert re.search(why, found[f"{way}: why"]), found
