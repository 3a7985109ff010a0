# SPDX-License-Identifier: Apache-2.0
"""Factors of several runs, side by side: what the measurement itself says."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_records import line, write
from test_report import read

from gnsfast.cli.records import read_runs
from gnsfast.cli.report import write_report
from gnsfast.cli.words import factors_in
from gnsfast.counts import three_digits
from gnsfast.critical_batch import Branch, CriticalBatch
from gnsfast.noise_scale import ModuleNoiseScale


def scale(value: float, lower: float, upper: float) -> ModuleNoiseScale:
    return ModuleNoiseScale(value, lower, upper, 1.0, 1.0)


def measured(tokens: int, *losses: float, **scales: Any) -> CriticalBatch:
    """Branches of 16 samples, 32, 64 and so on."""
    branches = tuple(
        Branch(2.0**k, 16 * 2**k, 1.0, loss, math.nan, 9, 900) for k, loss in enumerate(losses)
    )
    return CriticalBatch(
        tokens, 16, 10, 900, 0.01, 0.5, "sqrt", "evaluate", branches=branches, **scales
    )


BOTH = measured(100, 2.0, 2.0, 2.1, noise_scale=scale(4.0, 2.0, 8.0), adam=scale(20, 16, 32))
FIRST = measured(200, 2.0, 2.1, noise_scale=scale(8.0, 4.0, 10.0))
ALL = measured(150, 2.0, 2.0, noise_scale=scale(math.inf, 5.0, math.inf))


@pytest.mark.parametrize("found", [BOTH, FIRST, ALL])
def test_as_the_measurement_says(found: CriticalBatch) -> None:
    """``CriticalBatch.ratio``, whose missing ends are 0, NaN and infinity."""
    record = json.loads(json.dumps(found.record()))
    for metric, factor in factors_in(record).items():
        assert factor == pytest.approx(found.ratio(metric), nan_ok=True)
    assert set(factors_in(record)) == {"euclidean"} | ({"adam"} if found is BOTH else set())


def test_in_words() -> None:
    said = [factors_in(m.record())["euclidean"].said(three_digits) for m in (BOTH, FIRST, ALL)]
    assert said == ["11.3 (4 to 32)", "at most 8", ""]
    assert factors_in({"value": 4.0, "noise_scale": None}) == {}


def test_side_by_side(tmp_path: Path) -> None:
    doubtful = replace(BOTH, tokens=300, branches=(*BOTH.branches[:2], replace_loss(BOTH, 2.0)))
    paths = [
        write(tmp_path / "a.jsonl", line(1), line(4), BOTH.record(), FIRST.record()),
        write(tmp_path / "b.jsonl", line(1), line(2), ALL.record(), doubtful.record()),
    ]
    runs = read_runs(paths)
    text, specs = read(write_report(runs, tmp_path / "page.html"))
    text = html.unescape(text)
    section = text.partition("<h2>Critical batch size / noise scale</h2>")[2]
    heads = re.findall("<th>(.*?)</th>", section)[:4]
    assert heads == ["run", "tokens", "noise scale", "under Adam's metric"]
    rows = re.findall("<tr>(.*?)</tr>", section)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows if "<td" in row]
    assert cells[:3] == [
        ["a", "100", "11.3 (4 to 32)", "2.26 (1 to 4)"],
        ["a", "200", "at most 8", "-"],
        ["b", "150", "unknown", "-"],
    ]
    [figure] = [s for s in specs if any("times the noise" in str(t.get("text")) for t in s["data"])]
    points = [(t["x"][0], t["y"][0], t["marker"]["symbol"]) for t in figure["data"]]
    assert [point[1:] for point in points] == [(11.314, "diamond"), (2.2627, "circle")]
    assert points[0][0] < points[1][0] < 100  # two runs, two metrics: the first two of four
    both, first = (each["factors"] for each in runs[0].summary()["critical_batch_branches"])
    assert both["euclidean"] == {"value": pytest.approx(8 * 2**0.5), "lower": 4, "upper": 32}
    assert first["euclidean"] == {"value": None, "lower": None, "upper": 8}
    names = [html.unescape(t["name"]) for t in figure["data"] if t["showlegend"]]
    assert names == ["a, times the noise scale", "a, times the one under Adam's metric"]


def replace_loss(found: CriticalBatch, loss: float) -> Branch:
    return replace(found.branches[-1], loss=loss)
