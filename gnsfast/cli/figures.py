# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as plain data for plotly."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gnsfast.cli.records import LayerLine, Point, Run
from gnsfast.cli.summary import (
    axis_position,
    count,
    factors_in,
    groups_of,
    has_tokens,
    last_scale,
    over_stretches,
    said,
    scale_at,
    scale_in,
    tried,
)
from gnsfast.counts import three_digits
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.interval import Interval
from gnsfast.noise_scale import METRICS, OTHERS

COLORS = ("#1a80bb", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1")
"""Okabe and Ito's, safe for colour-blind readers; the blue is lighter, for dark pages."""
SIZE, OVER, ESTIMATE, BRANCHES = COLORS[:4]
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8f94"
GRID = {"gridcolor": "rgba(128, 128, 128, 0.22)"}
MOST_POINTS = 1500
"""About how many points of a curve are drawn. Longer curves keep the extremes of each stretch."""
SYMBOLS = dict(zip(METRICS, ("diamond", "circle", "square", "triangle-up")))
FACTORS = {"euclidean": "times the noise scale"} | {
    metric: f"times the one {words}" for metric, words in OTHERS.items()
}
APART = 0.01
"""The share of the axis between factors of one checkpoint, whose intervals would overlap."""
LABELS = 60
"""Up to this many layers, the axis names all of them. Of more it names every n-th."""
NAME = 22
"""The longest name on the axis, in characters: a phone is 390 pixels wide."""


@dataclass
class Figure:
    """Traces, a layout and a legend of (label, colour, line). A logarithmic axis reaches from
    ``low`` to ``high``.
    """

    height: int
    layout: dict[str, Any]
    traces: list[dict[str, Any]] = field(default_factory=list)
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    low: float = math.inf
    high: float = 0.0
    id: int = 0

    def cover(self, values: Iterable[float | None]) -> None:
        """Extend the logarithmic axis to the positive, finite values."""
        for value in values:
            if value is not None and 0 < value < math.inf:
                self.low, self.high = min(self.low, value), max(self.high, value)

    def cover_intervals(self, scales: Sequence[Interval]) -> None:
        """Extend it to values and ends, but to no upper end above 12 times the largest value."""
        drawn = [s for s in scales if s.drawn]
        self.cover(s.value for s in drawn)
        top = 12 * self.high or math.inf
        self.cover(min(s.upper, top) for s in drawn if s.resolved)
        self.cover(s.lower for s in scales)
        self.cover(s.only for s in scales)

    def log_axis(self, axis: str = "yaxis") -> None:
        """Make an axis logarithmic, in samples, labelled with plain numbers."""
        if not self.high:
            return
        low, high = math.log10(self.low), math.log10(self.high)
        pad = max(0.05 * (high - low), 0.06)
        low, high = low - pad, high + pad
        decades = range(math.floor(low), math.ceil(high) + 1)
        for steps in ((1.0,), (1, 2, 5), range(1, 10), [k / 10 for k in range(10, 100)]):
            ticks = [m * 10.0**e for e in decades for m in steps]
            if sum(low <= math.log10(t) <= high for t in ticks) >= 3:
                break
        self.layout[axis] = self.layout.get(axis, {}) | {
            "type": "log",
            "range": [low, high],
            "tickvals": ticks,
            "ticktext": [f"{t:,.12g}" if t < 1e6 else count(t) for t in ticks],
            "automargin": True,
            **GRID,
        }

    def spec(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout, "height": self.height}


class View:
    """What all figures of a report share: the runs, their colours and the axis."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.several = runs, len(runs) > 1
        self.over_tokens = all(has_tokens(run) for run in runs)
        self.axis = "tokens" if self.over_tokens else "step"

    def x(self, point: Point | LayerLine) -> float:
        return float((point.tokens or 0.0) if self.over_tokens else point.step)

    def at(self, run: Run, record: dict[str, Any]) -> float | None:
        """Where a record lies on the axis."""
        return axis_position(run, record["tokens"], self.over_tokens)

    def color(self, run: Run, alone: str = "") -> str:
        """That of a run, or ``alone`` where there is only one."""
        return COLORS[self.runs.index(run) % len(COLORS)] if self.several or not alone else alone

    def dash(self, run: Run) -> str:
        return DASHES[self.runs.index(run) // len(COLORS) % len(DASHES)]

    def legend(self, drawn: Iterable[Run]) -> list[tuple[str, str, str]]:
        """The runs by name, if there are several."""
        return [(run.name, self.color(run), self.dash(run)) for run in drawn if self.several]

    def figure(self, height: int = 320) -> Figure:
        """An empty figure over tokens or steps, with a line where the batch size of one run
        changed.
        """
        line = {"color": "rgba(128, 128, 128, 0.7)", "width": 1, "dash": "dot"}
        changes = [] if self.several else changed(self.runs[0])
        places = [self.at(self.runs[0], decision) for decision in changes]
        x_axis = {"exponentformat": "B", "rangemode": "tozero", "zeroline": False, "nticks": 6}
        layout = {
            "xaxis": {"title": {"text": self.axis}, **x_axis, **GRID},
            "yaxis": {"zeroline": False, "automargin": True, **GRID},
            "hovermode": "x unified",
            "showlegend": False,
            "shapes": [_shape("line", x, x) | {"line": line} for x in places if x is not None],
        }
        return Figure(height, layout)


def _shape(kind: str, start: float, end: float) -> dict[str, Any]:
    """A line or a rectangle over the whole height."""
    return {"type": kind, "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper"}


def changed(run: Run) -> list[dict[str, Any]]:
    """The decisions that changed the batch size."""
    return [d for d in run.decisions if d["old"] != d["new"]]


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
    return float(f"{x:.5g}") if x is not None and math.isfinite(x) else None


def scatter(x: Iterable[Any], y: Iterable[Any], mode: str, **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "x": list(x), "y": list(y), "mode": mode, **more}


def point(
    x: float, y: float, symbol: str, color: str, text: str, size: int = 10, **more: Any
) -> dict[str, Any]:
    """A single mark with a text."""
    mark = {"symbol": symbol, "color": color, "size": size}
    template = "%{text}<extra></extra>"
    more |= {"marker": mark, "text": [text], "hovertemplate": template}
    return scatter([x], [rounded(y)], "markers", **more)


def bar_point(
    figure: Figure, x: float, found: Interval, symbol: str, color: str, text: str
) -> dict[str, Any]:
    """A mark with an interval."""
    figure.cover(found)
    bar = {"color": color, "thickness": 2, "width": 5}
    if found.lower >= 0 and math.isfinite(found.upper):
        bar |= {"array": [rounded(found.upper - found.value)]}
        bar |= {"arrayminus": [rounded(found.value - found.lower)]}
    return point(x, found.value, symbol, color, text, error_y=bar)


def arrows(scales: Iterable[Interval], more: str, less: str) -> list[str]:
    """Symbols for "at least" and "at most"."""
    return [f"arrow-{more if s.only == s.lower else less}" for s in scales]


def loss(view: View) -> Figure | None:
    """The loss of each run."""
    figure = view.figure()
    runs = [run for run in view.runs if any("loss" in p.values for p in run.points)]
    for run in runs:
        points = thinned([p for p in run.points if "loss" in p.values], lambda p: p.values["loss"])
        figure.traces.append(
            scatter(
                map(view.x, points),
                (rounded(p.values["loss"]) for p in points),
                "lines" if len(points) > 1 else "markers",
                name=html.escape(run.name if view.several else "loss"),
                line={"color": view.color(run), "dash": view.dash(run), "width": 1.6},
            )
        )
    figure.legend = view.legend(runs)
    return figure if runs else None


def noise_scale(view: View, metric: str = "euclidean") -> Figure | None:
    """A noise scale of each run with its interval; the Euclidean one also at the newest weights."""
    figure, name = view.figure(), SCALES[metric]
    runs = [run for run in view.runs if last_scale(run, name) is not None]
    now = metric == "euclidean" and any(last_scale(run, PRESENT) for run in runs)
    for run in runs:
        if now:
            label = f"{run.name}, newest weights" if view.several else "newest weights"
            add_scale(figure, view, run, PRESENT, label, view.color(run, COLORS[1]), "dot")
        alone = "mean of the window" if now else "noise scale"
        label = run.name if view.several else alone
        add_scale(figure, view, run, name, label, view.color(run), view.dash(run))
        check = scale_in((run.check or {}).get("brute_force", {}))
        if metric == "euclidean" and check.drawn and run.points:
            text = f"single samples, last checkpoint: {said(check)}"
            x, color = view.x(run.points[-1]), view.color(run)
            figure.traces.append(bar_point(figure, x, check, "diamond-open", color, text))
    if not figure.traces:
        return None
    figure.log_axis()
    figure.legend = view.legend(runs)
    if now:
        mean, newest = (GREY, GREY) if view.several else COLORS[:2]
        figure.legend += [("mean of the window", mean, "solid"), ("newest weights", newest, "dot")]
    return figure


def groups(view: View) -> Figure | None:
    """The noise scales of each run's groups: a colour for each group, a dash for each run."""
    figure, names = view.figure(), [groups_of(run) for run in view.runs]
    order = dict.fromkeys(name for found in names for name in found)
    colors = {name: COLORS[k % len(COLORS)] for k, name in enumerate(order)}
    for k, (run, found) in enumerate(zip(view.runs, names)):
        for name in found:
            label = f"{name}, {run.name}" if view.several else name
            add_scale(figure, view, run, f"gns/group/{name}", label, colors[name], DASHES[k % 4])
    if not figure.traces:
        return None
    figure.log_axis()
    figure.legend = [(name, color, "solid") for name, color in colors.items()]
    if view.several:
        figure.legend += [
            (run.name, GREY, DASHES[k % 4]) for k, run in enumerate(view.runs) if names[k]
        ]
    return figure


def add_scale(
    figure: Figure, view: View, run: Run, key: str, label: str, color: str, dash: str
) -> None:
    """Line, band, and arrows for "at least" and "at most", of one noise scale or estimate."""
    known = [p for p in run.points if scale_at(p, key) is not None]
    points = thinned(known, lambda p: p.values.get(key))
    scales = [(view.x(p), s) for p in points if (s := scale_at(p, key)) is not None]
    bounds = [(x, s) for x, s in scales if s.only is not None]
    if not any(s.drawn for _, s in scales) and not bounds:
        return
    name = html.escape(label)
    if band := _band(scales):
        fill = f"rgba({', '.join(str(int(color[k : k + 2], 16)) for k in (1, 3, 5))}, 0.16)"
        shape = {"fill": "toself", "fillcolor": fill, "hoverinfo": "skip"}
        figure.traces.append(scatter(*band, "none", name=name, **shape))
    figure.cover_intervals([s for _, s in scales])
    values = [rounded(s.value) if s.drawn else None for _, s in scales]
    alone = sum(y is not None for y in values) == 1
    hover: Callable[[list[tuple[float, Interval]]], dict[str, Any]] = lambda marked: {
        "name": name,
        "text": [html.escape(said(s)) for _, s in marked],
        "hovertemplate": "%{text}",
    }
    line = {"color": color, "dash": dash, "width": 1.8}
    mode = "markers" if alone else "lines"
    figure.traces.append(scatter((x for x, _ in scales), values, mode, line=line, **hover(scales)))
    if bounds:
        symbols = arrows((s for _, s in bounds), "up", "down")
        mark = {"symbol": symbols, "color": color, "size": 9, "opacity": 0.65}
        y = (rounded(s.only) for _, s in bounds)
        figure.traces.append(
            scatter((x for x, _ in bounds), y, "markers", marker=mark, **hover(bounds))
        )


def _band(scales: list[tuple[float, Interval]]) -> tuple[list[Any], list[Any]] | None:
    """A polygon for each stretch of bounded intervals, with gaps in between."""
    xs: list[Any] = []
    ys: list[Any] = []
    for bounded, group in groupby(scales, lambda each: each[1].drawn and each[1].resolved):
        if bounded:
            stretch = list(group)
            across = [x for x, _ in stretch]
            xs += [*across, *across[::-1], None]
            ys += [rounded(s.upper) for _, s in stretch]
            ys += [*(rounded(s.lower) for _, s in stretch[::-1]), None]
    return (xs[:-1], ys[:-1]) if xs else None


def batch_size(view: View) -> Figure | None:
    """Batch sizes as a staircase; the critical batch size as estimated and as measured."""
    figure = view.figure(360)
    for run in view.runs:
        name = f"{run.name}: " if view.several else ""
        for over in over_stretches(run):
            shape = _shape("rect", view.x(over.start), view.x(over.end))
            color = view.color(run, OVER)
            fill = {"fillcolor": color, "opacity": 0.16, "line": {"width": 1, "color": color}}
            figure.layout["shapes"].append(shape | fill | {"layer": "below"})
        _add_sizes(figure, view, run, f"{name}batch size")
        label = f"{name}critical batch size, estimate"
        add_scale(figure, view, run, "cbs/estimate", label, view.color(run, ESTIMATE), "dot")
        for measurement in run.critical:
            _add_branches(figure, view, run, measurement, name)
    if all(t.get("meta") == "size" for t in figure.traces) and figure.high <= 1.001 * figure.low:
        return None
    figure.log_axis()
    size, estimate, branches = [GREY] * 3 if view.several else [SIZE, ESTIMATE, BRANCHES]
    drawn = [run for run in view.runs if run.decisions or run.critical or _sized(run)]
    figure.legend = [*view.legend(drawn), ("batch size", size, "solid")]
    if any("cbs/estimate" in p.values for run in view.runs for p in run.points):
        figure.legend.append(("critical batch size, estimate", estimate, "dot"))
    if any(run.critical for run in view.runs):
        figure.legend.append(("critical batch size, branches", branches, "diamond"))
    return figure


def _sized(run: Run) -> list[tuple[Point, float]]:
    return [(p, size) for p in run.points if (size := p.values.get("batch/size"))]


def _add_sizes(figure: Figure, view: View, run: Run, label: str) -> None:
    """Draw the decisions, or without any the logged sizes: each holds for the steps before it."""
    shape, sized, changes = "vh", _sized(run), changed(run)
    if changes:
        shape = "hv"
        at = [(view.at(run, d), d["new"]) for d in changes]
        steps = [(0.0, changes[0]["old"]), *((x, new) for x, new in at if x is not None)]
        end = view.x(run.points[-1]) if run.points else 0.0
        steps.append((max(end, steps[-1][0]), steps[-1][1]))
    else:
        ends = [None, *(size for _, size in sized), None]
        beside = zip(sized, ends, ends[2:])
        steps = [(view.x(p), size) for (p, size), *others in beside if others != [size, size]]
    if not steps:
        return
    figure.cover(size for _, size in steps)
    color, dash = view.color(run, SIZE), view.dash(run)
    figure.traces.append(
        scatter(
            (x for x, _ in steps),
            (rounded(size) for _, size in steps),
            "lines" if len(steps) > 1 else "markers",
            meta="size",
            name=html.escape(label),
            line={"color": color, "shape": shape, "width": 2.2, "dash": dash},
            hovertemplate="%{y:,.4~g}",
        )
    )


def _add_branches(
    figure: Figure, view: View, run: Run, measurement: dict[str, Any], name: str
) -> None:
    """Draw a measurement's interval, or an arrow if only one end is known."""
    x, found = view.at(run, measurement), Interval.read(measurement)
    if x is None or not found.ends(str):
        return
    color = view.color(run, BRANCHES)
    text = f"{html.escape(name)}critical batch size, branches: {tried(found)}"
    if found.resolved:
        if math.isnan(found.value):
            found = found._replace(value=math.sqrt(found.lower * found.upper))
        trace = bar_point(figure, x, found, "diamond", color, text)
    else:
        up = found.lower > 0
        end = found.lower if up else found.upper
        figure.cover([end])
        trace = point(x, end, "arrow-up" if up else "arrow-down", color, text, 13)
    figure.traces.append(trace)


def factors(view: View) -> Figure | None:
    """Each measurement's critical batch size / noise scale: a colour for each run, a symbol for
    each metric.
    """
    figure = view.figure(280)
    found = [
        (run, metric, x, measurement["tokens"], factor)
        for run in view.runs
        for measurement in run.critical
        for metric, factor in factors_in(measurement).items()
        if (x := view.at(run, measurement)) is not None
        and factor.resolved
        and not math.isnan(factor.value)
    ]
    drawn = [metric for metric in METRICS if metric in {metric for _, metric, *_ in found}]
    slots = [(run.name, metric) for run in view.runs for metric in drawn]
    width = APART * max((x for _, _, x, *_ in found), default=0.0)
    for run, metric, x, tokens, factor in found:
        color = view.color(run, COLORS[METRICS.index(metric)])
        name = f"{html.escape(run.name)}, " if view.several else ""
        text = f"{name}{count(tokens)} tokens: {factor.said(three_digits)} {FACTORS[metric]}"
        aside = width * (slots.index((run.name, metric)) - (len(slots) - 1) / 2)
        figure.traces.append(bar_point(figure, x + aside, factor, SYMBOLS[metric], color, text))
    if not figure.traces:
        return None
    figure.log_axis()
    figure.legend = view.legend([run for run in view.runs if run.critical])
    for metric in drawn:
        color = GREY if view.several else COLORS[METRICS.index(metric)]
        figure.legend.append((FACTORS[metric], color, SYMBOLS[metric]))
    return figure


def layers(view: View) -> Figure | None:
    """The last window: a row for each layer, with all runs in it; arrows say "at least"."""
    runs = [run for run in view.runs if run.last_layers]
    paths = list(dict.fromkeys(path for run in runs for path in run.last_layers))
    figure, few = _rows(paths), len(paths) <= LABELS
    for run in runs:
        found = list(run.last_layers.items())
        figure.cover_intervals([s for _, s in found])
        color = view.color(run)
        shown = [(path, s) for path, s in found if s.drawn]
        ends = [s if s.resolved else Interval(s.value, s.value, s.value) for _, s in shown]
        bar = {
            "array": [rounded(s.upper - s.value) for s in ends],
            "arrayminus": [rounded(s.value - s.lower) for s in ends],
            "color": color,
            "thickness": 1.5 if few else 0.8,
            "width": 0,
        }
        dots = _row_marks(run, shown, [s.value for s in ends])
        dots |= {"marker": {"color": color, "size": 8 if few else 4}, "error_x": bar}
        bounds = [(path, s) for path, s in found if s.only is not None]
        symbols = arrows((s for _, s in bounds), "right-open", "left-open")
        marks = _row_marks(run, bounds, [s.only for _, s in bounds])
        marks |= {"marker": {"color": color, "symbol": symbols, "size": 10 if few else 6}}
        figure.traces += [trace for trace in (dots, marks) if trace["x"]]
    figure.log_axis("xaxis")
    figure.legend = [(name, color, "point") for name, color, _ in view.legend(runs)]
    return figure if figure.traces else None


def _row_marks(
    run: Run, layers: list[tuple[str, Interval]], values: Sequence[float | None]
) -> dict[str, Any]:
    return scatter(
        map(rounded, values),
        (html.escape(path) for path, _ in layers),
        "markers",
        name=html.escape(run.name),
        text=[f"{html.escape(path)}<br>{said(s)}" for path, s in layers],
        hovertemplate="%{text}<extra></extra>",
    )


def over_time(view: View, run: Run) -> Figure | None:
    """The layers of one run as a heat map, blank where a window resolves nothing."""
    lines = run.layers
    paths = list(dict.fromkeys(path for line in lines for path in line.values))
    rows = [[rounded(line.values.get(path)) for line in lines] for path in paths]
    scale = Figure(0, {})
    scale.cover(v for row in rows for v in row)
    if len(lines) < 2 or not scale.high:
        return None
    scale.log_axis("colors")
    colors = scale.layout["colors"]
    bar = {"orientation": "h", "x": 0.5, "y": 1.0, "yanchor": "bottom", "thickness": 10}
    bar |= {"len": 1.0, "lenmode": "fraction", "outlinewidth": 0, "ticktext": colors["ticktext"]}
    figure = _rows(paths)
    figure.traces.append({
        "type": "heatmap",
        "x": list(map(view.x, lines)),
        "y": figure.layout["yaxis"]["categoryarray"],
        "z": [[round(math.log10(v), 4) if v and v > 0 else None for v in row] for row in rows],
        "customdata": rows,
        "hovertemplate": f"%{{y}}<br>{view.axis} %{{x:,}}: %{{customdata}} samples<extra></extra>",
        "hoverongaps": False,
        "colorscale": "Viridis",
        "colorbar": bar | {"tickvals": [math.log10(t) for t in colors["tickvals"]]},
    })  # fmt: skip
    axis = {"exponentformat": "B", "nticks": 6, "showgrid": False}
    figure.layout["xaxis"] = {"title": {"text": view.axis}, **axis}
    return figure


def _rows(paths: list[str]) -> Figure:
    """An empty figure with a row for each layer, the first at the top."""
    named = paths[:: math.ceil(len(paths) / LABELS) or 1]
    row = 22 if len(paths) <= LABELS else 5
    axis = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [html.escape(path) for path in paths],
        "range": [len(paths) - 0.5, -0.5],
        "tickvals": [html.escape(path) for path in named],
        "ticktext": [html.escape(_short(path)) for path in named],
        "automargin": True,
        "tickfont": {"size": 11},
    }
    layout = {"hovermode": "closest", "showlegend": False, "yaxis": axis | GRID, "xaxis": {**GRID}}
    return Figure(110 + min(row * len(paths), max(1300, 3 * len(paths))), layout)


def _short(path: str) -> str:
    """The end of a long path, from a dot on if enough is left."""
    if len(path) <= NAME:
        return path
    end = path[1 - NAME :]
    after_dot = end.partition(".")[2]
    return "…" + (after_dot if len(after_dot) > NAME // 2 else end)


def all_figures(view: View) -> dict[str, Figure]:
    """Every figure that has something to show, by the name of its section, in the page's order."""
    found = {"loss": loss(view), "euclidean": noise_scale(view), "batch_size": batch_size(view)}
    found["factors"] = factors(view)
    found |= {metric: noise_scale(view, metric) for metric in OTHERS}
    found |= {"groups": groups(view), "layers": layers(view)}
    found |= {f"layers {k}": over_time(view, run) for k, run in enumerate(view.runs)}
    figures = {name: figure for name, figure in found.items() if figure is not None}
    for k, figure in enumerate(figures.values()):
        figure.id = k
    return figures
