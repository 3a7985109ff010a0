# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of intervals: simulated windows have the noise scale that they should have."""

from typing import Any

import pytest
import torch

from benchmarks.studies import intervals
from benchmarks.studies import present as present_weights


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WINDOWS": 400, "AT_ONCE": 200, "DRAWN": 200}.items():
        monkeypatch.setattr(intervals, name, value)


@pytest.mark.parametrize("kind", ["normal", "1 to 9 tokens"])
def test_windows_of_a_known_noise_scale(few: None, kind: str) -> None:
    drawn = intervals.drawn(kind, 1, 20, 16)
    for windows in (drawn, intervals.gaussian(1, 20, 16)) if kind == "normal" else (drawn,):
        found = intervals.row(windows, float(intervals.N))
        for method in intervals.METHODS:
            assert float(found[f"{method}: resolved"].rstrip("%")) > 95
            assert 88 < float(found[f"{method}: these right"].rstrip("%")) < 99
            assert 0.9 < float(found[f"{method}: value / truth"]) < 1.1
            assert found[f"{method}: others right"] is None


@pytest.mark.parametrize("kind", ["t(3)", "lognormal"])
def test_spreads_have_a_mean_square_of_one(kind: str) -> None:
    squares = intervals.spreads(kind, (200_000,)).square()
    assert squares.mean() == pytest.approx(1, rel=0.1) and squares.max() > 50
    assert torch.equal(intervals.spreads("normal", (2, 3)), torch.ones(2, 3, dtype=torch.float64))


def test_looks_at_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """At two steps of a run, then their summary."""
    small = {"STEPS": 20, "FIRST": 17, "EVERY": 3, "SAMPLES": 64, "BATCH": 4, "SEEDS": (1,)}
    for name, value in small.items():
        monkeypatch.setattr(present_weights, name, value)
    summary, shown = present_weights.tables().values()
    assert [row["step"] for row in shown] == [17, 20]
    assert {row["mean right"] for row in shown} <= {"yes", "no"}
    assert {row["seed"] for row in shown} == {1}
    assert [row["seed"] for row in summary] == ["1", "all"] and summary[1]["looks"] == 2
    right: list[dict[str, Any]] = [row for row in shown if row["present right"] == "yes"]
    assert summary[1]["present right"] == len(right)
