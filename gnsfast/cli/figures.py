# SPDX-License-Identifier: Apache-2.0
"""Plotly figures of runs, as plain data."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnsfast.cli.records import Point, Run
from gnsfast.cli.summary import (
    Interval,
    axis_position,
    count,
    has_tokens,
    last_scale,
    scale_at,
    scale_in,
)
from gnsfast.integrations.trackers import PRESENT, SCALES

COLORS = ("#1a80bb", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1")
"""Okabe and Ito's, safe for colour-blind readers; the blue is lighter, for dark pages."""
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8f94"
GRID = "rgba(128, 128, 128, 0.22)"
MOST_POINTS = 1500
"""About how many points of a curve are drawn. Longer curves keep the extremes of each stretch."""


@dataclass
class Figure:
    """Traces, a layout and a legend of (label, colour, line). A logarithmic axis reaches from
    ``low`` to ``high``.
    """

    height: int
    traces: list[dict[str, Any]] = field(default_factory=list)
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    low: float = math.inf
    high: float = 0.0

    def cover(self, values: Iterable[float | None]) -> None:
        """Extend the logarithmic axis to the positive values."""
        for value in values:
            if value is not None and value > 0:
                self.low, self.high = min(self.low, value), max(self.high, value)

    def cover_intervals(self, scales: Sequence[Interval]) -> None:
        """Extend it to values and ends, but to no upper end above 12 times the largest value."""
        drawn = [s for s in scales if s.drawn]
        self.cover(s.value for s in drawn)
        top = 12 * self.high or math.inf
        self.cover(min(s.upper or 0.0, top) for s in drawn)
        self.cover(s.lower for s in scales)
        self.cover(s.at_most for s in scales)

    def spec(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout, "height": self.height}


class View:
    """What all figures of a report share: the runs, their colours and the axis."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.over_tokens = all(has_tokens(run) for run in runs)
        self.axis = "tokens" if self.over_tokens else "step"

    def x(self, point: Point) -> float:
        return float(point.tokens or 0.0) if self.over_tokens else float(point.step)

    def color(self, run: Run) -> str:
        return COLORS[self.runs.index(run) % len(COLORS)]

    def dash(self, run: Run) -> str:
        return DASHES[self.runs.index(run) // len(COLORS) % len(DASHES)]

    def legend(self, drawn: Iterable[Run]) -> list[tuple[str, str, str]]:
        """The runs by name, if there are several."""
        if len(self.runs) == 1:
            return []
        return [(run.name, self.color(run), self.dash(run)) for run in drawn]

    def figure(self, height: int = 320) -> Figure:
        """An empty figure over tokens or steps."""
        figure = Figure(height)
        figure.layout = {
            "xaxis": {
                "title": {"text": self.axis},
                "exponentformat": "B",
                "rangemode": "tozero",
                "gridcolor": GRID,
                "zeroline": False,
                "nticks": 6,
            },
            "yaxis": {"gridcolor": GRID, "zeroline": False, "automargin": True},
            "hovermode": "x unified",
            "showlegend": False,
            "shapes": self._changes(),
        }
        return figure

    def _changes(self) -> list[dict[str, Any]]:
        """Vertical lines where the batch size changed, unless there are several runs."""
        if len(self.runs) > 1:
            return []
        changed = (d["tokens"] for d in self.runs[0].decisions if d["old"] != d["new"])
        places = [axis_position(self.runs[0], tokens, self.over_tokens) for tokens in changed]
        return [_line_at(x) for x in places if x is not None]


def _line_at(x: float) -> dict[str, Any]:
    line = {"color": "rgba(128, 128, 128, 0.7)", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def thinned(points: Sequence[Point], key: Callable[[Point], float | None]) -> list[Point]:
    """About ``MOST_POINTS`` points: the least, the largest and a gap of each stretch, in order, and
    the last one.
    """
    if len(points) <= MOST_POINTS:
        return list(points)
    width = math.ceil(3 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        numbers = [(v, k) for k, p in enumerate(stretch) if (v := key(p)) is not None]
        gap = next((k for k, p in enumerate(stretch) if key(p) is None), 0)
        chosen = {gap} | ({min(numbers)[1], max(numbers)[1]} if numbers else set())
        kept += [stretch[k] for k in sorted(chosen)]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def rounded(x: float | None) -> float | None:
    """``x`` with five significant digits, which keep a page of curves small."""
    return None if x is None else float(f"{x:.5g}")


def samples_axis(figure: Figure, axis: str = "yaxis") -> None:
    """Give the figure a logarithmic axis in samples, labelled with plain numbers."""
    if not figure.high:
        return
    low, high = math.log10(figure.low), math.log10(figure.high)
    pad = max(0.05 * (high - low), 0.06)
    low, high = low - pad, high + pad
    decades = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1.0,), (1, 2, 5), range(1, 10), [k / 10 for k in range(10, 100)]):
        ticks = [m * 10.0**e for e in decades for m in steps]
        if sum(low <= math.log10(t) <= high for t in ticks) >= 3:
            break
    figure.layout[axis] = figure.layout.get(axis, {}) | {
        "type": "log",
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [f"{t:,.12g}" if t < 1e6 else count(t) for t in ticks],
        "gridcolor": GRID,
        "automargin": True,
    }


def loss(view: View) -> Figure | None:
    """The loss of each run."""
    runs = [run for run in view.runs if any("loss" in p.values for p in run.points)]
    if not runs:
        return None
    figure = view.figure()
    for run in runs:
        points = thinned([p for p in run.points if "loss" in p.values], lambda p: p.values["loss"])
        figure.traces.append({
            "type": "scatter",
            "name": html.escape(run.name if len(view.runs) > 1 else "loss"),
            "x": [view.x(p) for p in points],
            "y": [rounded(p.values["loss"]) for p in points],
            "mode": "lines" if len(points) > 1 else "markers",
            "line": {"color": view.color(run), "dash": view.dash(run), "width": 1.6},
        })  # fmt: skip
    figure.legend = view.legend(runs)
    return figure


def noise_scale(view: View, name: str = SCALES["euclidean"]) -> Figure | None:
    """A noise scale of each run with its interval; the Euclidean one also at the newest weights."""
    figure = view.figure()
    runs = [run for run in view.runs if last_scale(run, name) is not None]
    several = len(view.runs) > 1
    now = name == SCALES["euclidean"] and any(last_scale(run, PRESENT) for run in runs)
    for run in runs:
        if now:
            label = f"{run.name}, newest weights" if several else "newest weights"
            color = view.color(run) if several else COLORS[1]
            add_scale(figure, view, run, PRESENT, label, color, "dot")
        label = run.name if several else "mean of the window" if now else "noise scale"
        add_scale(figure, view, run, name, label, view.color(run), view.dash(run))
        check = scale_in((run.check or {}).get("brute_force", {}), "noise_scale")
        if name == SCALES["euclidean"] and check.drawn and run.points:
            text = f"single samples, last checkpoint: {check}"
            x = view.x(run.points[-1])
            color = view.color(run)
            figure.traces.append(interval_marker(figure, x, check, "diamond-open", color, text))
    if not figure.traces:
        return None
    samples_axis(figure)
    figure.legend = view.legend(runs)
    if now:
        mean, newest = (GREY, GREY) if several else (COLORS[0], COLORS[1])
        figure.legend += [("mean of the window", mean, "solid"), ("newest weights", newest, "dot")]
    return figure


def groups(view: View, names: list[list[str]]) -> Figure | None:
    """The noise scales of each run's groups: a colour for each group, a dash for each run."""
    figure = view.figure()
    order = list(dict.fromkeys(name for found in names for name in found))
    colors = {name: COLORS[k % len(COLORS)] for k, name in enumerate(order)}
    several = len(view.runs) > 1
    for k, (run, found) in enumerate(zip(view.runs, names)):
        for name in found:
            label = f"{name}, {run.name}" if several else name
            add_scale(figure, view, run, f"gns/group/{name}", label, colors[name], DASHES[k % 4])
    if not figure.traces:
        return None
    samples_axis(figure)
    figure.legend = [(name, color, "solid") for name, color in colors.items()]
    if several:
        figure.legend += [
            (run.name, GREY, DASHES[k % 4]) for k, run in enumerate(view.runs) if names[k]
        ]
    return figure


def interval_marker(
    figure: Figure, x: float, found: Interval, symbol: str, color: str, text: str
) -> dict[str, Any]:
    """A point with an interval."""
    value, lower, upper = found.value or 0.0, found.lower, found.upper
    figure.cover([value, lower, upper])
    bar = {"color": color, "thickness": 2, "width": 5}
    if lower is not None and upper is not None:
        bar |= {"array": [rounded(upper - value)], "arrayminus": [rounded(value - lower)]}
    return marker(x, value, symbol, color, text, 10) | {"error_y": bar}


def marker(
    x: float, y: float | None, symbol: str, color: str, text: str, size: int
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [x],
        "y": [rounded(y)],
        "mode": "markers",
        "marker": {"symbol": symbol, "color": color, "size": size},
        "text": [text],
        "hovertemplate": "%{text}<extra></extra>",
    }


def add_scale(
    figure: Figure, view: View, run: Run, key: str, label: str, color: str, dash: str
) -> None:
    """Line, band, and arrows for "at least" and "at most", of one noise scale or estimate."""
    value_at: Callable[[Point], float | None] = lambda p: p.values.get(key)
    known = [p for p in run.points if scale_at(p, key) is not None]
    found = [(view.x(p), scale_at(p, key)) for p in thinned(known, value_at)]
    scales = [(x, s) for x, s in found if s is not None]
    if not any(s.drawn or s.bound for _, s in scales):
        return
    name = html.escape(label)
    if band := _band(scales):
        fill = f"rgba({', '.join(str(int(color[k : k + 2], 16)) for k in (1, 3, 5))}, 0.16)"
        figure.traces.append({
            "type": "scatter", "name": name, "x": band[0], "y": band[1], "mode": "none",
            "fill": "toself", "fillcolor": fill, "hoverinfo": "skip",
        })  # fmt: skip
    lines = [rounded(s.value) if s.drawn else None for _, s in scales]
    figure.cover_intervals([s for _, s in scales])
    alone = sum(y is not None for y in lines) == 1
    figure.traces.append({
        "type": "scatter", "name": name, "x": [x for x, _ in scales], "y": lines,
        "mode": "markers" if alone else "lines",
        "line": {"color": color, "dash": dash, "width": 1.8},
        "text": [html.escape(str(s)) for _, s in scales],
        "hovertemplate": "%{text}",
    })  # fmt: skip
    if arrows := [(x, s) for x, s in scales if s.bound]:
        figure.traces.append({
            "type": "scatter", "name": name, "x": [x for x, _ in arrows],
            "y": [rounded(s.bound) for _, s in arrows], "mode": "markers",
            "marker": {
                "symbol": [f"arrow-{'up' if s.at_least else 'down'}" for _, s in arrows],
                "color": color, "size": 9, "opacity": 0.65,
            },
            "text": [html.escape(str(s)) for _, s in arrows], "hovertemplate": "%{text}",
        })  # fmt: skip


def _band(scales: list[tuple[float, Interval]]) -> tuple[list[Any], list[Any]] | None:
    """A polygon for each stretch of bounded intervals, with gaps in between."""
    xs: list[Any] = []
    ys: list[Any] = []
    stretch: list[tuple[float, Interval]] = []
    for x, s in [*scales, (0.0, Interval(None, None, None))]:
        if s.drawn and s.lower is not None:
            stretch.append((x, s))
        elif stretch:
            across = [x for x, _ in stretch]
            xs += [*across, *across[::-1], None]
            ys += [rounded(s.upper) for _, s in stretch]
            ys += [*(rounded(s.lower) for _, s in stretch[::-1]), None]
            stretch = []
    return (xs[:-1], ys[:-1]) if xs else None
