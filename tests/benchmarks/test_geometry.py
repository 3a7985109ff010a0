# SPDX-License-Identifier: Apache-2.0
"""The study of geometries: its tables, its runs in miniature."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks")  # a wheel has none

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import record  # noqa: E402
from benchmarks.studies import geometry  # noqa: E402
from benchmarks.studies import geometry_tables as tables  # noqa: E402
from benchmarks.studies.geometry import BATCH, Study  # noqa: E402
from benchmarks.studies.geometry_tables import Point  # noqa: E402
from benchmarks.studies.training import cached  # noqa: E402
from gnsfast.critical_batch.branches import Branch, CriticalBatch  # noqa: E402
from gnsfast.noise_scale import DualNormEstimate, ModuleNoiseScale  # noqa: E402

pytestmark = pytest.mark.usefixtures("global_flags")


def measured(*losses: float, **scales: Any) -> CriticalBatch:
    """Branches of k = 0.5, 1, 2, ... with these losses."""
    branches = tuple(
        Branch(2.0 ** (i - 1), 2**i * 4, 1.0, loss, math.nan, 4, 1024)
        for i, loss in enumerate(losses)
    )
    return CriticalBatch(1024, 8, 1, 1024, 0.02, 0.5, "sqrt", "evaluate", branches, **scales)


def scale(value: float, lower: float, upper: float) -> ModuleNoiseScale:
    return ModuleNoiseScale(value, lower, upper, value, 1.0)


def a_point(width: int, scaled: float, losses: tuple[float, ...] = (2.0, 2.0, 2.0, 2.1)) -> Point:
    """Critical batch size 16 to 32, unless the losses say something else."""
    critical = measured(*losses, noise_scale=scale(scaled, scaled / 2, 2 * scaled))
    return Point("sgd", width, 200, critical, critical.lower, critical.upper, 3)


def test_the_ratio_has_the_interval_of_both() -> None:
    point = a_point(16, 4.0)._replace(lower=8.0)
    assert point.ratio("euclidean") == (pytest.approx(math.sqrt(16 * 32) / 4), 8 / 8, 32 / 2)
    assert point.ratio("adam") is None
    [row] = tables.ratios([point])
    assert (row["step"], row["euclidean"], row["adam"]) == (200, "5.66 (1 to 16)", None)
    sign = DualNormEstimate(9, 3, math.inf, 1, 0, 1)
    least = point._replace(critical=replace(point.critical, sign=sign))
    value, lower, upper = least.ratio("sign") or (0, 0, 0)
    assert math.isnan(value) and (lower, upper) == (0, 32 / 3)  # the noise scale has no upper end


def test_what_has_no_bound_is_counted_out() -> None:
    """Also a critical batch size beyond the grid, whose ratio has a lower end alone."""
    open_ended = a_point(16, 4.0, (2.0, 2.0, 2.0, 2.0))
    assert tables.ratios([open_ended])[0]["euclidean"] == "nan (4 to inf)"
    points = [open_ended, a_point(16, 4.0), a_point(16, 2.0)]
    assert len(tables.logs(points, "euclidean")) == 2 and tables.logs(points, "adam") == []
    [row] = tables.means(points[1:])
    assert row["euclidean"] == "-"
    assert tables.geometric_mean(tables.logs(points, "euclidean")) == pytest.approx(8.0)


def test_a_noise_scale_that_follows_spreads_less_than_the_cbs_alone() -> None:
    """Four critical batch sizes, each twice its noise scale: no spread is left."""
    pairs = [(math.log(2 * x), math.log(x)) for x in (1.0, 4.0, 16.0, 64.0)]
    assert tables.geometric_mean(pairs) == pytest.approx(2)
    assert tables.geometric_std(pairs) == pytest.approx(1)
    assert tables.correlation(pairs) == pytest.approx(1)
    by_hand = math.exp(math.log(4) * math.sqrt((2.25 + 0.25) * 2 / 3))
    assert tables.cbs_std(pairs) == pytest.approx(by_hand)
    assert tables.interval(tables.geometric_mean, pairs) == "2 (2 to 2), of 4"
    assert tables.interval(tables.geometric_mean, pairs[:3]) == "-"


def test_the_interval_covers_the_mean_of_logarithms_as_often_as_it_says() -> None:
    """24 checkpoints each: the percentiles of resamples are a little narrow with so few."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(100):
        x = torch.randn(24, generator=generator, dtype=torch.float64).tolist()
        cell = tables.interval(tables.geometric_mean, [(each, 0.1 * i) for i, each in enumerate(x)])
        lower, upper = map(float, re.findall(r"\((.*) to (.*)\)", cell)[0])
        inside += lower <= math.exp(-0.1 * 11.5) <= upper
    assert 86 <= inside <= 99


@pytest.mark.parametrize(
    ("losses", "of_mean", "of_all"),
    [((2.05, 2.0, 2.02), (16, 32), (16, math.inf)), ((2.05, 2.0, 2.0), (32, math.inf), (16, 32))],
)
def test_bounds_hold_for_every_mean_without_a_seed(
    losses: tuple[float, ...], of_mean: tuple[float, float], of_all: tuple[float, float]
) -> None:
    """Whether k = 4 fails in the mean depends on a single seed."""
    seeds = [measured(2.0, 2.0, 2.0, loss) for loss in losses]
    found = geometry.point("sgd", 16, 200, seeds, {"noise_scale": scale(4, 2, 8)})
    assert (found.critical.lower, found.critical.upper) == of_mean
    assert found.lower == of_all[0] and found.upper == max(of_mean[1], of_all[1])
    assert found.critical.noise_scale == scale(4, 2, 8) and found.seeds == 3


def test_reached_interpolated_and_shares() -> None:
    losses = [[100.0, 10, 2.5], [200.0, 15, 2.2], [300.0, 18, 2.3]]
    assert geometry.reached(losses, 2.2) == (200.0, 15)
    assert geometry.reached(losses, 2.1) == (math.inf, math.inf)
    at = [(400.0, 2.0), (100.0, 3.0), (200.0, 2.4)]
    assert geometry.interpolated(at, 200) == pytest.approx(2.4)
    assert geometry.interpolated(at, math.sqrt(100 * 200)) == pytest.approx(2.7)
    with pytest.raises(ValueError, match="50 steps are not between"):
        geometry.interpolated(at, 50)
    assert geometry.share([0.5, 1.0]) == "75% (50% to 100%)"
    assert geometry.share([0.5, math.inf]) == "not reached by 1 of 2"


def test_the_summary_pairs_runs_of_one_seed() -> None:
    def run(steps: int, *final: float) -> list[dict[str, Any]]:
        return [{"steps": steps, "losses": [[9.0, steps, loss]], "grown": "-"} for loss in final]

    runs = {"constant 8": run(2400, 2.0, 3.0), "constant 16": run(1200, 2.1, 3.1)}
    runs["2 x sign"] = run(1200, 2.0, 3.05)
    rows = {row["batch size"]: row for row in geometry.summary("sgd", runs)}
    assert rows["constant 8"]["loss - 8's"] == "+0.0000 ± 0.0000"
    assert rows["2 x sign"]["loss - 8's"] == "+0.0250 ± 0.0354"
    assert rows["2 x sign"]["loss - constant of as many steps"] == "-0.0750 ± 0.0354"
    assert [row["steps saved"] for row in rows.values()] == ["0%", "50%", "50%"]
    assert rows["2 x sign"]["steps to equal loss"] == "not reached by 1 of 2"


def test_cached(tmp_path: Path) -> None:
    calls: list[int] = []
    make = lambda: calls.append(0) or {"loss": [1.5, math.inf]}
    for _ in range(2):
        assert cached(tmp_path / "new" / "it.json", make) == {"loss": [1.5, math.inf]}
    assert len(calls) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A study in miniature."""
    sizes = {"POINTS": (1, 3), "GRID": (0.5, 1), "DELTA": 3, "SWEEP": 2}
    sizes |= {"BATCHES": 4, "SAMPLES": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(geometry, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(geometry, "STEPS", 16)
    monkeypatch.setattr(geometry, "TOKENS", 16 * BATCH * 128)
    monkeypatch.setattr(geometry, "EVALUATIONS", 4)
    yield


def test_a_resumed_study_is_the_same(small: None, tmp_path: Path) -> None:
    """Killed after its first checkpoint: the order of the samples goes on where it was."""
    study = Study(8, tmp_path / "whole")
    whole = tables.tables(list(geometry.points(study, "adamw", 3)))
    assert set(whole[tables.RATIOS][1]) >= {"euclidean", "adam", "sign", "spectral"}
    part = Study(8, tmp_path / "part")
    next(geometry.points(part, "adamw", 3))
    assert not (tmp_path / "part" / "adamw-8-3-11").exists()
    assert tables.tables(list(geometry.points(part, "adamw", 3))) == whole
    states = [torch.load(s.folder / "adamw-8-3-11/checkpoint/run.pt") for s in (study, part)]
    assert all(map(torch.equal, *(state["model"].values() for state in states)))


def test_a_controller_grows_the_batch_with_the_rule(small: None, tmp_path: Path) -> None:
    study = Study(8, tmp_path)
    found = geometry.controlled(study, "sgd", 1, "spectral", 1e6)
    assert found["steps"] < 16 and found["grown"].startswith("16 at")
    assert [tokens for tokens, _, _ in found["losses"]][-1] >= geometry.TOKENS
    never = geometry.controlled(study, "sgd", 1, "euclidean", 1e-6)
    assert (never["steps"], never["grown"]) == (16, "-")
    same = geometry.constant(study, "sgd", 1, BATCH)
    assert never["losses"] == same["losses"]  # a measured step trains the same bits


def test_the_command_writes_its_record(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "POINTS", (1,))
    words = "geometry --width 4 8 --seeds 3 --controlled --only sgd".split()
    command.main([*words, "--runs", str(tmp_path / "runs"), "--record", str(tmp_path)])
    [path] = tmp_path.glob("*-cpu-geometry.json")
    written = record.read(path)
    assert written.command == f"python -m benchmarks {' '.join(words)}"
    assert len(written.tables[tables.RATIOS]) == 2  # a row for each width
    assert "Learning rates: evaluation loss after 500 steps" in written.tables
    assert path.with_suffix(".md").exists()
