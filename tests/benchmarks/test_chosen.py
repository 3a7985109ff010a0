# SPDX-License-Identifier: Apache-2.0
"""The study of chosen batches: the two rules by their sources, and equal tokens for each size."""

import math
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import record
from benchmarks.studies import chosen
from examples import tiny_gpt
from gnsfast.critical_batch import laws


@pytest.mark.parametrize(
    ("depths", "power"), [((8,), 18), ((10, 16), 19), ((18, 26), 20), ((32, 50), 21)]
)
def test_nanochats_rule(depths: tuple[int, ...], power: int) -> None:
    """The batches of its own table (``dev/LOG.md``, 2026-02-05): a width of 64 for each layer, up
    to a multiple of 128.
    """
    for depth in depths:
        width = math.ceil(64 * depth / 128) * 128
        tokens = 12 * (12 * depth * width**2 + 32768 * width)
        assert chosen.nanochat_tokens(tokens) == 2**power


def test_step_law() -> None:
    """B = 0.58 D^0.571, both in tokens."""
    tokens = laws.STEP_LAW.batch_tokens(100e9)
    assert tokens == pytest.approx(0.58 * math.exp(0.571 * math.log(100e9)))
    assert 1.1e6 < tokens < 1.2e6  # of the paper's largest runs: about a million


def test_each_size_trains_the_same_tokens_at_the_same_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal samples, and the same sum of learning rates over tokens, of the middles of steps."""
    for name, value in {"TOKENS": 2**14, "SIZES": (1, 4, 8), "HELD_OUT": 4}.items():
        monkeypatch.setattr(chosen, name, value)
    drawn, rates = list[int](), list[float]()
    draw, step = tiny_gpt.draw, torch.optim.AdamW.step

    def counted(text: torch.Tensor, samples: int, generator: torch.Generator) -> torch.Tensor:
        drawn.append(samples)
        return draw(text, samples, generator)

    def stepped(self: torch.optim.AdamW) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(tiny_gpt, "draw", counted)
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    means = []
    for size in chosen.SIZES:
        drawn.clear(), rates.clear()
        chosen.trained(1, size, 1.0)
        assert sum(drawn[:-1]) == 2**14 // tiny_gpt.CONTEXT
        assert len(rates) == chosen.steps_of(size)
        means.append(statistics.mean(rates) / chosen.learning_rate(size, 1.0))
    assert means == pytest.approx([means[0]] * 3, rel=0.02)


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best learning rate lies between two that were tried, and a row's loss is that of the size
    that its seed chose.
    """
    tried = []

    def loss(seed: int, size: int, factor: float, *measured: object) -> tuple[float, object]:
        tried.append((size, factor))
        return abs(math.log2(factor * size / 8)) + abs(math.log2(size / 4)) + seed / 100, None

    monkeypatch.setattr(chosen, "TOKENS", 2**19)
    monkeypatch.setattr(chosen, "SEEDS", (1, 2, 3, 4))
    monkeypatch.setattr(chosen, "trained", loss)
    monkeypatch.setattr(chosen, "noise_scales", lambda share, factor: [4.4, 7.0, 1.2, math.inf])
    rows, sizes = chosen.tables().values()
    assert all({(n, 4 / n), (n, 8 / n), (n, 16 / n)} <= {*tried} for n in chosen.SIZES)
    assert [each["loss"] for each in sizes][:3] == pytest.approx([2.025, 1.025, 0.025])
    [first, _, nanochat, _] = rows
    assert first["seeds with a number"] == 3 and first["trained"] == "1, 4, 8"
    assert first["loss"] == pytest.approx((0.01 + 1.02 + 2.03) / 3)
    assert first["above the best"] == "1.0000 (0.0000 to 2.0000)"
    assert nanochat["samples"] == "256 (256 to 256)" and nanochat["steps"] == "16"


def test_the_page_has_the_newest_record() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "planning.md").read_text()
    newest = record.newest("cpu-chosen")
    assert newest is not None and f"{newest.name}.md" in page
    [rows, sizes] = newest.tables.values()
    lines = newest.path.with_suffix(".md").read_text().splitlines()
    for row in rows:
        [line] = (each for each in lines if each.startswith(f"| {row['who']} | "))
        who, seeds, *rest = line.split(" | ")
        assert " | ".join([who, *rest]) in page.splitlines()
        assert seeds == str(len(chosen.SEEDS))
    assert [each["batch size"] for each in sizes] == [*chosen.SIZES]
    best = min(sizes, key=lambda each: each["loss"])["batch size"]
    assert f"The best size here is {best} sample" in " ".join(page.split())
    tokens = chosen.steps_of(1) * tiny_gpt.CONTEXT
    assert f"{tokens:,} tokens" in page and f"{sizes[0]['steps']:,}" in page
