# SPDX-License-Identifier: Apache-2.0
"""The tables of ``geometry``: checkpoints, the ratio of critical batch size (CBS) and noise scale,
and how well it stays the same.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

from benchmarks.record import Rows
from benchmarks.studies.training import span
from gnsfast.critical_batch.branches import CriticalBatch
from gnsfast.noise_scale import METRICS, Estimate

RATIOS = "CBS / noise scale at each checkpoint"
RESAMPLES = 2000
"""Of the checkpoints, for 95 % intervals."""
ALONE = "CBS alone"


class Point(NamedTuple):
    """A checkpoint: the mean measurement over the seeds of the data with all noise scales, and the
    bounds of the critical batch size that also hold for the means without one of the seeds.
    """

    optimizer: str
    width: int
    step: int
    critical: CriticalBatch
    lower: float
    upper: float
    seeds: int

    def scale(self, metric: str) -> Estimate | None:
        field = "noise_scale" if metric == "euclidean" else metric
        found: Estimate | None = getattr(self.critical, field)
        return found

    def ratio(self, metric: str) -> tuple[float, float, float] | None:
        """CBS / noise scale, with the interval that both intervals allow; None where the optimizer
        has no such noise scale, and a NaN for the value where a bound is missing.
        """
        scale = self.scale(metric)
        if scale is None:
            return None
        value = self.critical.value / scale.noise_scale if scale.resolved else math.nan
        upper = self.upper / scale.lower if scale.lower > 0 else math.inf
        return value, self.lower / scale.upper, upper


def tables(points: list[Point]) -> dict[str, Rows]:
    """All of them, by title."""
    return {
        "CBS by branches and noise scales, samples": checkpoints(points),
        RATIOS: ratios(points),
        "CBS / noise scale: geometric mean over checkpoints (95 %)": means(points),
        "Spread over checkpoints: geometric standard deviation (95 %)": spreads(points),
        "Correlation of log CBS and log noise scale over checkpoints": correlations(points),
        "Mean evaluation losses of branches ± standard error": losses(points),
    }


def checkpoints(points: list[Point]) -> Rows:
    rows = []
    for p in points:
        row = _at(p) | {"CBS": f"{p.critical.lower:g} to {p.critical.upper:g}"}
        row["seeds"] = p.seeds
        row["without one"] = f"{p.lower:g} to {p.upper:g}"
        for metric in METRICS:
            scale = p.scale(metric)
            row[metric] = scale and span(*scale.interval)
        rows.append(row | {"doubts": "; ".join(p.critical.doubts)})
    return rows


def ratios(points: list[Point]) -> Rows:
    found = ((p, m, p.ratio(m)) for p in points for m in METRICS)
    by_point = groupby(found, key=lambda each: each[0])
    return [_at(p) | {m: ratio and span(*ratio) for _, m, ratio in each} for p, each in by_point]


def losses(points: list[Point]) -> Rows:
    return [
        _at(p) | {f"k = {b.k:g}": f"{b.loss:.4f} ± {b.loss_std:.4f}" for b in p.critical.branches}
        for p in points
    ]


def _at(p: Point) -> dict[str, Any]:
    return {"optimizer": p.optimizer, "width": p.width, "step": p.step}


def logs(points: Iterable[Point], metric: str) -> list[tuple[float, float]]:
    """Logarithms of CBS and noise scale, of the checkpoints where both are resolved."""
    found = []
    for p in points:
        scale = p.scale(metric)
        if scale and p.critical.resolved and scale.resolved:
            found.append((math.log(p.critical.value), math.log(scale.noise_scale)))
    return found


def geometric_mean(pairs: list[tuple[float, float]]) -> float:
    return math.exp(statistics.fmean(x - y for x, y in pairs))


def geometric_std(pairs: list[tuple[float, float]]) -> float:
    return math.exp(statistics.stdev(x - y for x, y in pairs))


def cbs_std(pairs: list[tuple[float, float]]) -> float:
    return math.exp(statistics.stdev(x for x, _ in pairs))


def correlation(pairs: list[tuple[float, float]]) -> float:
    return statistics.correlation(*zip(*pairs))


def interval(
    of: Callable[[list[tuple[float, float]]], float], pairs: list[tuple[float, float]]
) -> str:
    """``of(pairs)`` with 95 % of its values over resampled checkpoints; "-" for fewer than four,
    of which too few resamples differ.
    """
    if len(pairs) < 4:
        return "-"
    drawn, values = random.Random(0), []
    while len(values) < RESAMPLES:
        some = drawn.choices(pairs, k=len(pairs))
        if len({x for x, _ in some}) > 1 and len({y for _, y in some}) > 1:
            values.append(of(some))
    cuts = statistics.quantiles(values, n=40)
    return f"{span(of(pairs), cuts[0], cuts[-1])}, of {len(pairs)}"


def means(points: list[Point]) -> Rows:
    """The factor of each metric: at each width, and over all of them."""
    rows = []
    for name, own in by_optimizer(points):
        widths = sorted({p.width for p in own})
        for width in widths if len(widths) > 1 and name != "all" else []:
            row: dict[str, Any] = {"optimizer": name, "width": width}
            for metric in METRICS:
                pairs = logs((p for p in own if p.width == width), metric)
                row[metric] = f"{geometric_mean(pairs):.3g}, of {len(pairs)}" if pairs else None
            rows.append(row)
        all_widths = {"optimizer": name, "width": "all"}
        rows.append(all_widths | {m: interval(geometric_mean, logs(own, m)) for m in METRICS})
    return rows


def spreads(points: list[Point]) -> Rows:
    """The factor by which the ratio varies beside that by which the CBS itself does, which a
    constant batch size would miss it by.
    """
    rows = []
    for name, own in by_optimizer(points):
        row = {"optimizer": name, ALONE: interval(cbs_std, logs(own, "euclidean"))}
        rows.append(row | {m: interval(geometric_std, logs(own, m)) for m in METRICS})
    return rows


def correlations(points: list[Point]) -> Rows:
    return [
        {"optimizer": name} | {m: interval(correlation, logs(own, m)) for m in METRICS}
        for name, own in by_optimizer(points)
    ]


def by_optimizer(points: list[Point]) -> list[tuple[str, list[Point]]]:
    names = list(dict.fromkeys(p.optimizer for p in points))
    each = [(name, [p for p in points if p.optimizer == name]) for name in names]
    return [*each, ("all", points)] if len(names) > 1 else each
