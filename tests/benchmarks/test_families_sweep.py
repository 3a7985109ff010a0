# SPDX-License-Identifier: Apache-2.0
"""The sweep over architectures tells right from wrong, and outlives what a model does to it."""

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig

pytest.importorskip("benchmarks")  # a wheel has none

import gnsfast  # noqa: E402
from benchmarks.families import judge as family_judge
from benchmarks.families import models as family_models
from benchmarks.families import sweep as families  # noqa: E402
from benchmarks.families.models import B, Built, Family  # noqa: E402

FAMILY = Family("text", "small", "Small")


class Small(nn.Module):
    """Two layers; ``kind`` says what is odd about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if self.kind == "not built":
            raise KeyError("a setting")
        h = self.up(x)
        if self.kind == "samples tied":
            h = h - 2.5e-6 * h.mean(0)  # less than a proof can tell from rounding
        if self.kind == "refused":
            return (self.down(h) * h.square().mean(),)
        return (self.down(h),)


def row_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    built = lambda family: Built(Small(kind), {"x": torch.randn(B, 7, 4)})
    monkeypatch.setattr(family_judge, "build", built)
    return family_judge.row_of(FAMILY)


@pytest.mark.parametrize("kind", ["right", "not built", "samples tied", "refused"])
def test_verdicts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_of(kind, monkeypatch)["verdict"] == kind


def test_a_model_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_judge, "norms_of", lambda model, batch: [][0])
    row = row_of("right", monkeypatch)
    assert row["verdict"] == "raises" and row["why"].startswith("IndexError")


@pytest.mark.parametrize("sample, factor", [(0, 1 + 3e-5), (B - 1, float("nan")), (1, 0.0)])
def test_one_wrong_norm(sample: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gnsfast.SampleNorms.__getitem__

    def scaled(self: gnsfast.SampleNorms, name: str) -> Tensor:
        norms = right(self, name).clone()
        norms[sample] *= factor if name == "up.bias" else 1.0
        return norms

    monkeypatch.setattr(gnsfast.SampleNorms, "__getitem__", scaled)
    row = row_of("right", monkeypatch)
    assert row["verdict"] == "wrong", row
    assert row["why"].startswith("up.bias (Linear) is off by")


def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = family_judge.norms_of
    without = lambda model, batch: right(gnsfast.configure(model, exclude=["up"]), batch)
    monkeypatch.setattr(family_judge, "norms_of", without)
    row = row_of("right", monkeypatch)
    assert row["verdict"] == "right" and row["covered"] == 0.3181
    assert family_judge.causes(row["why"]) == {"n elements left out: excluded"}


@pytest.mark.parametrize(
    "does, why", [(lambda: os._exit(3), "ended with 3"), (lambda: time.sleep(60), "within 1 s")]
)
def test_a_process_that_gives_no_answer(
    does: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "SECONDS", 1)
    monkeypatch.setattr(families, "_judge", lambda family, seed, sender: does())
    start = time.perf_counter()
    row = families.alone(FAMILY)
    assert time.perf_counter() - start < 5
    assert row["verdict"] == "no answer" and why in row["why"]


def test_a_judge_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_judge, "row_of", lambda family, seed: 1 / 0)
    row = families.alone(FAMILY)
    assert row["verdict"] == "no answer" and row["why"].startswith("ZeroDivisionError")


def test_families_and_their_sizes() -> None:
    """Each class once, by the configuration of its own name; no width is beyond the table's."""
    found = {family.name: family for family in family_models.families()}
    assert len(found) == len([*family_models.families()]) > 250
    assert found["LlamaForCausalLM"].model_type == "llama"
    assert found["Gemma3ForCausalLM"].model_type == "gemma3_text"
    config = family_models.small(Qwen3NextConfig, {"rms_norm_eps": 0.5})
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert (config.hidden_size, config.num_experts, config.rms_norm_eps) == (32, 4, 0.5)


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(kind, monkeypatch) for kind in ("right", "refused")]
    tables = families.summary(rows)
    verdicts, covered, [cause] = tables.values()
    assert {row["verdict"]: row["architectures"] for row in verdicts} == {"right": 1, "refused": 1}
    assert [row["architectures"] for row in covered] == [1, 1, 1, 1]
    assert cause["which"] == "small" and "per-sample norms" in cause["cause"]
