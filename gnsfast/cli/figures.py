# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as plain data for plotly."""

import bisect
import html
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from gnsfast.cli.runs import GROUP, LayerLine, Point, Run
from gnsfast.cli.words import count, factors_in, name_of, said, scale_in, share, tried
from gnsfast.counts import three_digits
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.interval import Interval
from gnsfast.noise_scale import METRICS, OTHERS

COLORS = ("#1a80bb", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1")
"""Okabe and Ito's, safe for colour-blind readers; the blue is lighter, for dark pages."""
SIZE, OVER, ESTIMATE, BRANCHES = COLORS[:4]
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8f94"
MOST_POINTS = 1500
"""About how many points of a curve are drawn. Longer curves keep the extremes of each stretch."""
ARROWS = {"y": ("arrow-up", "arrow-down"), "x": ("arrow-right-open", "arrow-left-open")}
"""For "at least" and "at most"."""
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


class View:
    """What all figures of a report share: the runs, their colours and the axis."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.several = runs, len(runs) > 1
        self.over_tokens = all(run.has_tokens for run in runs)
        self.axis = "tokens" if self.over_tokens else "step"

    def x(self, point: Point | LayerLine) -> float:
        return float((point.tokens or 0.0) if self.over_tokens else point.step)

    def at(self, run: Run, record: dict[str, Any]) -> float | None:
        """Where a record lies on the axis."""
        return run.at(record["tokens"], self.over_tokens)

    def ends(self, stretch: dict[str, Any]) -> list[float]:
        """Where a stretch of a run lies on the axis."""
        return stretch["tokens" if self.over_tokens else "steps"]  # type: ignore[no-any-return]

    def after(self, run: Run, step: int) -> float:
        """Where the first point from a step on lies, or else the last one."""
        k = bisect.bisect_left(run.points, step, key=lambda p: p.step)
        return self.x(run.points[min(k, len(run.points) - 1)])

    def color(self, run: Run, alone: str = "") -> str:
        """That of a run, or ``alone`` where there is only one."""
        return COLORS[self.runs.index(run) % len(COLORS)] if self.several or not alone else alone

    def dash(self, run: Run) -> str:
        return DASHES[self.runs.index(run) // len(COLORS) % len(DASHES)]

    def label(self, run: Run, what: str, form: str = "{run}: {what}") -> str:
        """What a trace is, and of which run if there are several."""
        return form.format(run=run.name, what=what) if self.several else what


Entry = tuple[str, str, str]
"""Of a legend: label, colour, and line or symbol."""
Style = dict[str, Any]
Placed = Sequence[tuple[Any, Interval, str]]
"""Values at places of an axis, with what a pointer shows of each."""


class Figure:
    """Traces, a layout and a legend. A logarithmic axis reaches from ``low`` to ``high``."""

    id = 0

    def __init__(self, view: View, height: int = 320) -> None:
        """An empty figure over tokens or steps, with a line where the batch size of one run
        changed.
        """
        self.view, self.height = view, height
        self.traces: list[dict[str, Any]] = []
        self.legend: list[Entry] = []
        self.low, self.high = math.inf, 0.0
        self.layout: dict[str, Any] = {"xaxis": {"title": {"text": view.axis}}, "shapes": []}
        line = {"color": "rgba(128, 128, 128, 0.7)", "width": 1, "dash": "dot"}
        for decision in [] if view.several else view.runs[0].changes:
            if (x := view.at(view.runs[0], decision)) is not None:
                self.shape("line", x, x, line=line)

    def shape(self, kind: str, start: float, end: float, **more: Any) -> None:
        """A line or a rectangle over the whole height."""
        place = {"type": kind, "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper"}
        self.layout["shapes"].append(place | more)

    def trace(
        self, x: Iterable[Any], y: Iterable[Any], mode: str, text: Iterable[str] = (), **more: Any
    ) -> None:
        """``text`` is what a pointer shows of each point."""
        if text:
            more["text"] = [html.escape(each).replace("\n", "<br>") for each in text]
            more = {"hovertemplate": "%{text}<extra></extra>"} | more
        if "name" in more:
            more["name"] = html.escape(more["name"])
        self.traces.append({"type": "scatter", "x": list(x), "y": list(y), "mode": mode, **more})

    def line(self, points: Iterable[tuple[float, float | None]], **more: Any) -> None:
        """A line through points, or a mark where there is only one."""
        x, y = zip(*((x, rounded(y)) for x, y in points))
        mode = "markers" if sum(each is not None for each in y) == 1 else "lines"
        self.trace(x, y, mode, **more)

    def values(self, at: Placed, mark: Style, bar: Style, along: str = "y", **more: Any) -> None:
        """Those that can be drawn, with bars for their intervals, upright or along x."""
        at = [each for each in at if each[1].drawn]
        found = [s for _, s, _ in at]
        if any(s.resolved for s in found):
            bar = bar | {"array": [rounded(s.upper - s.value) for s in found]}
            bar |= {"arrayminus": [rounded(s.value - s.lower) for s in found]}
        more |= {"marker": mark, f"error_{along}": bar}
        self._dots(at, [s.value for s in found], along, **more)

    def bounds(self, at: Placed, mark: Style, along: str = "y", **more: Any) -> None:
        """Arrows where only one end is known, upright or along x."""
        at = [each for each in at if each[1].only is not None]
        mark = mark | {"symbol": [ARROWS[along][s.only != s.lower] for _, s, _ in at]}
        self._dots(at, [s.only for _, s, _ in at], along, marker=mark, **more)

    def _dots(self, at: Placed, numbers: Iterable[float | None], along: str, **more: Any) -> None:
        if at:
            places, _, text = zip(*at)
            across, up = (places, map(rounded, numbers))[:: 1 if along == "y" else -1]
            self.trace(across, up, "markers", text, **more)

    def mark(self, x: float, found: Interval, symbol: str, color: str, text: str) -> None:
        """A value with an interval, or an arrow if only one end is known."""
        self.cover(found)
        bar = {"color": color, "thickness": 2, "width": 5}
        self.values([(x, found, text)], {"symbol": symbol, "color": color, "size": 10}, bar)
        self.bounds([(x, found, text)], {"color": color, "size": 13})

    def scale(self, run: Run, key: str, name: str, color: str, dash: str) -> None:
        """Line, band, and arrows for "at least" and "at most", of one noise scale or estimate."""
        known = [p for p in run.points if p.scale(key) is not None]
        points = thinned(known, lambda p: p.values.get(key))
        at = [(self.view.x(p), s, said(s)) for p in points if (s := p.scale(key)) is not None]
        if not any(s.drawn or s.only is not None for _, s, _ in at):
            return
        if band := _band(at):
            fill = f"rgba({', '.join(str(int(color[k : k + 2], 16)) for k in (1, 3, 5))}, 0.16)"
            self.trace(*band, "none", name=name, fill="toself", fillcolor=fill, hoverinfo="skip")
        self.cover_intervals([s for _, s, _ in at])
        line = {"color": color, "dash": dash, "width": 1.8}
        named: Style = {"name": name, "hovertemplate": "%{text}"}
        values = [(x, s.value if s.drawn else None) for x, s, _ in at]
        self.line(values, text=[text for *_, text in at], line=line, **named)
        self.bounds(at, {"color": color, "size": 9, "opacity": 0.65}, **named)

    def name_runs(self, drawn: Iterable[Run]) -> None:
        """Begin the legend with the runs, if there are several."""
        view = self.view
        entries = [(run.name, view.color(run), view.dash(run)) for run in drawn if view.several]
        self.legend = entries + self.legend

    def name(self, what: str, color: str, style: str) -> None:
        """Continue the legend with what all runs have, in no run's colour."""
        self.legend.append((what, GREY if self.view.several else color, style))

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
        self.layout.setdefault(axis, {}).update({
            "type": "log",
            "range": [low, high],
            "tickvals": ticks,
            "ticktext": [f"{t:,.12g}" if t < 1e6 else count(t) for t in ticks],
        })  # fmt: skip

    def spec(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout, "height": self.height}


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


def _band(at: Placed) -> tuple[list[Any], list[Any]] | None:
    """A polygon for each stretch of bounded intervals, with gaps in between."""
    xs: list[Any] = []
    ys: list[Any] = []
    for bounded, group in groupby(at, lambda each: each[1].drawn and each[1].resolved):
        if bounded:
            across, ends, _ = zip(*group)
            xs += [*across, *across[::-1], None]
            ys += [*(rounded(s.upper) for s in ends), *(rounded(s.lower) for s in ends[::-1]), None]
    return (xs[:-1], ys[:-1]) if xs else None


def loss(view: View) -> Figure:
    """The loss of each run."""
    figure = Figure(view)
    for run in view.runs:
        known = [p for p in run.points if "loss" in p.values]
        line = {"color": view.color(run), "dash": view.dash(run), "width": 1.6}
        if points := thinned(known, lambda p: p.values["loss"]):
            curve = ((view.x(p), p.values["loss"]) for p in points)
            figure.line(curve, name=view.label(run, "loss", "{run}"), line=line)
    figure.name_runs(run for run in view.runs if run.losses)
    return figure


def largest(view: View) -> Figure:
    """The samples with the largest gradients, at the steps of their lines, as wide as the loss."""
    figure = Figure(view, 260)
    for run in view.runs:
        found = run.spikes[:MOST_POINTS] if run.points else []
        text = [f"{name_of(s)}: {share(s)} of update {s['update']}" for s in found]
        text = ["\n".join([head, *map(str, s["parameters"])]) for head, s in zip(text, found)]
        symbols = ["x" if s["share"] is None else "circle" for s in found]
        mark = {"color": view.color(run, COLORS[1]), "size": 7, "opacity": 0.65, "symbol": symbols}
        x = [view.after(run, s["step"]) for s in found]
        y = [1.0 if s["share"] is None else rounded(s["share"]) for s in found]
        if found:
            figure.trace(x, y, "markers", text, marker=mark, cliponaxis=False)
    ends = [view.x(run.points[-1]) for run in view.runs if run.points]
    figure.layout["xaxis"]["range"] = [0, max(ends, default=1.0)]
    figure.layout["yaxis"] = {"tickformat": ".0%", "rangemode": "tozero"}
    figure.layout["hovermode"] = "closest"
    figure.name_runs(run for run in view.runs if run.largest)
    return figure


def noise_scale(view: View, metric: str = "euclidean") -> Figure:
    """A noise scale of each run with its interval; the Euclidean one also at the newest weights."""
    figure, name = Figure(view), SCALES[metric]
    runs = [run for run in view.runs if run.last_scale(name) is not None]
    now = metric == "euclidean" and any(run.last_scale(PRESENT) for run in runs)
    for run in runs:
        color = view.color(run)
        if now:
            label = view.label(run, "newest weights", "{run}, {what}")
            figure.scale(run, PRESENT, label, view.color(run, COLORS[1]), "dot")
        label = view.label(run, "mean of the window" if now else "noise scale", "{run}")
        figure.scale(run, name, label, color, view.dash(run))
        check = scale_in((run.check or {}).get("brute_force", {}))
        if metric == "euclidean" and check.drawn and run.points:
            text = f"single samples, last checkpoint: {said(check)}"
            figure.mark(view.x(run.points[-1]), check, "diamond-open", color, text)
    if now:
        figure.name("mean of the window", COLORS[0], "solid")
        figure.name("newest weights", COLORS[1], "dot")
    figure.name_runs(runs)
    return figure


def groups(view: View) -> Figure:
    """The noise scales of each run's groups: a colour for each group, a dash for each run."""
    figure, names = Figure(view), [run.groups for run in view.runs]
    order = dict.fromkeys(name for found in names for name in found)
    colors = {name: COLORS[k % len(COLORS)] for k, name in enumerate(order)}
    figure.legend = [(name, color, "solid") for name, color in colors.items()]
    for k, (run, found) in enumerate(zip(view.runs, names)):
        for name in found:
            label = view.label(run, name, "{what}, {run}")
            figure.scale(run, GROUP + name, label, colors[name], DASHES[k % 4])
        if found and view.several:
            figure.legend.append((run.name, GREY, DASHES[k % 4]))
    return figure


def batch_size(view: View) -> Figure:
    """Batch sizes as a staircase; the critical batch size as estimated and as measured."""
    figure = Figure(view, 360)
    for run in view.runs:
        for over in run.over:
            color = view.color(run, OVER)
            fill = {"fillcolor": color, "opacity": 0.16, "line": {"width": 1, "color": color}}
            start, end = view.ends(over)
            figure.shape("rect", start, end, **fill, layer="below")
        if steps := _staircase(view, run):
            figure.cover(size for _, size in steps)
            line = {"color": view.color(run, SIZE), "width": 2.2, "dash": view.dash(run)}
            line["shape"] = "hv" if run.changes else "vh"
            size = {"meta": "size", "hovertemplate": "%{y:,.4~g}"}
            figure.line(steps, name=view.label(run, "batch size"), line=line, **size)
        label, color = view.label(run, "critical batch size, estimate"), view.color(run, ESTIMATE)
        figure.scale(run, "cbs/estimate", label, color, "dot")
        for measured in run.critical:
            x, found = view.at(run, measured), Interval.read(measured)
            if x is None or not found.ends(str):
                continue
            words = f"critical batch size, branches: {tried(found)}"
            if found.resolved and math.isnan(found.value):
                found = found._replace(value=math.sqrt(found.lower * found.upper))
            figure.mark(x, found, "diamond", view.color(run, BRANCHES), view.label(run, words))
    if all(t.get("meta") == "size" for t in figure.traces) and figure.high <= 1.001 * figure.low:
        figure.traces = []
    figure.name("batch size", SIZE, "solid")
    if any("cbs/estimate" in p.values for run in view.runs for p in run.points):
        figure.name("critical batch size, estimate", ESTIMATE, "dot")
    if any(run.critical for run in view.runs):
        figure.name("critical batch size, branches", BRANCHES, "diamond")
    figure.name_runs(r for r in view.runs if r.decisions or r.critical or _staircase(view, r))
    return figure


def _staircase(view: View, run: Run) -> list[tuple[float, float]]:
    """The decisions, or without any the logged sizes: each holds for the steps before it."""
    if changes := run.changes:
        at = [(view.at(run, d), d["new"]) for d in changes]
        steps = [(0.0, changes[0]["old"]), *((x, new) for x, new in at if x is not None)]
        end = view.x(run.points[-1]) if run.points else 0.0
        return [*steps, (max(end, steps[-1][0]), steps[-1][1])]
    sized = [(view.x(p), size) for p in run.points if (size := p.values.get("batch/size"))]
    ends = [None, *(size for _, size in sized), None]
    beside = zip(sized, ends, ends[2:])
    return [(x, size) for (x, size), *others in beside if others != [size, size]]


def factors(view: View) -> Figure:
    """Each measurement's critical batch size / noise scale: a colour for each run, a symbol for
    each metric.
    """
    figure = Figure(view, 280)
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
        words = f"{count(tokens)} tokens: {factor.said(three_digits)} {FACTORS[metric]}"
        aside = width * (slots.index((run.name, metric)) - (len(slots) - 1) / 2)
        text = view.label(run, words, "{run}, {what}")
        figure.mark(x + aside, factor, SYMBOLS[metric], color, text)
    for metric in drawn:
        figure.name(FACTORS[metric], COLORS[METRICS.index(metric)], SYMBOLS[metric])
    figure.name_runs(run for run in view.runs if run.critical)
    return figure


class Rows(Figure):
    """A figure with a row for each layer, the first at the top."""

    def __init__(self, view: View, paths: list[str]) -> None:
        few = len(paths) <= LABELS
        high = min((22 if few else 5) * len(paths), max(1300, 3 * len(paths)))
        super().__init__(view, 110 + high)
        named = paths[:: math.ceil(len(paths) / LABELS) or 1]
        axis = {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [html.escape(path) for path in paths],
            "range": [len(paths) - 0.5, -0.5],
            "tickvals": [html.escape(path) for path in named],
            "ticktext": [html.escape(_short(path)) for path in named],
            "tickfont": {"size": 11},
        }
        self.few, self.layout = few, {"hovermode": "closest", "yaxis": axis}
        self.layout["xaxis"] = {"automargin": True}


def layers(view: View) -> Figure:
    """The last window: a row for each layer, with all runs in it; arrows say "at least"."""
    runs = [run for run in view.runs if run.last_layers]
    figure = Rows(view, list(dict.fromkeys(path for run in runs for path in run.last_layers)))
    for run in runs:
        found, color = run.last_layers, view.color(run)
        figure.cover_intervals([*found.values()])
        at = [(html.escape(path), s, f"{path}\n{said(s)}") for path, s in found.items()]
        bar = {"color": color, "thickness": 1.5 if figure.few else 0.8, "width": 0}
        mark: Style = {"color": color, "size": 8 if figure.few else 4}
        figure.values(at, mark, bar, "x", name=run.name)
        figure.bounds(at, mark | {"size": 10 if figure.few else 6}, "x", name=run.name)
        figure.legend += [(run.name, color, "point")] if view.several else []
    return figure


def over_time(view: View, run: Run) -> Figure | None:
    """The layers of one run as a heat map, blank where a window resolves nothing."""
    lines = run.layers
    paths = list(dict.fromkeys(path for line in lines for path in line.values))
    rows = [[rounded(line.values.get(path)) for line in lines] for path in paths]
    scale, figure = Figure(view), Rows(view, paths)
    scale.cover(v for row in rows for v in row)
    if len(lines) < 2 or not scale.high:
        return None
    scale.log_axis("colors")
    colors = scale.layout["colors"]
    ticks = [math.log10(tick) for tick in colors["tickvals"]]
    figure.traces.append({
        "type": "heatmap",
        "x": list(map(view.x, lines)),
        "y": figure.layout["yaxis"]["categoryarray"],
        "z": [[round(math.log10(v), 4) if v and v > 0 else None for v in row] for row in rows],
        "customdata": rows,
        "hovertemplate": f"%{{y}}<br>{view.axis} %{{x:,}}: %{{customdata}} samples<extra></extra>",
        "colorbar": {"tickvals": ticks, "ticktext": colors["ticktext"]},
    })  # fmt: skip
    title = {"text": view.axis}
    figure.layout["xaxis"] = {"title": title, "rangemode": "normal", "showgrid": False}
    return figure


def _short(path: str) -> str:
    """The end of a long path, from a dot on if enough is left."""
    if len(path) <= NAME:
        return path
    end = path[1 - NAME :]
    after_dot = end.partition(".")[2]
    return "…" + (after_dot if len(after_dot) > NAME // 2 else end)


def all_figures(view: View) -> dict[str, Figure]:
    """Every figure that has something to show, by the name of its section, in the page's order."""
    found: dict[str, Figure | None] = {"loss": loss(view), "euclidean": noise_scale(view)}
    found |= {"largest": largest(view), "batch_size": batch_size(view), "factors": factors(view)}
    found |= {metric: noise_scale(view, metric) for metric in OTHERS}
    found |= {"groups": groups(view), "layers": layers(view)}
    found |= {f"layers {k}": over_time(view, run) for k, run in enumerate(view.runs)}
    figures = {name: figure for name, figure in found.items() if figure and figure.traces}
    for k, (name, figure) in enumerate(figures.items()):
        figure.id = k
        if name not in ("loss", "largest") and not name.startswith("layers "):
            figure.log_axis("xaxis" if name == "layers" else "yaxis")
    return figures
