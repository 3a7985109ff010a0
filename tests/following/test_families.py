# SPDX-License-Identifier: Apache-2.0
"""Architectures that hold their samples in other ways than [B, T, features] have every sample's
norm. ``python -m benchmarks families`` takes all of transformers'.
"""

import pytest

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks.families import judge  # noqa: E402
from benchmarks.families.models import Family  # noqa: E402
from gnsfast.reasons import UNREACHED  # noqa: E402

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
UNUSED = {"wav2vec2": f"32 elements left out: {UNREACHED.text()}"}


@pytest.mark.second
@pytest.mark.parametrize("family", FAMILIES, ids=[family[1] for family in FAMILIES])
def test_families(family: tuple[str, str, str]) -> None:
    found = judge.row_of(Family(*family))
    why = UNUSED.get(family[1], "")
    assert (found["verdict"], found["covered"], found["why"]) == ("right", 1.0, why), found


@pytest.mark.second
def test_clip() -> None:
    """Its logits are of each pair of samples: their scale belongs to none."""
    found = judge.row_of(Family("image and text", "clip", "CLIPModel"))
    assert found["verdict"] == "right" and found["covered"] > 0.999, found
    assert found["why"].startswith("1 elements left out"), found
