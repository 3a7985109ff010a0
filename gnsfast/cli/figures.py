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
MOST_POINTS = 1500
"""About how many points of a curve are drawn. Longer curves keep the extremes of each stretch."""
ARROWS = {"y": ("arrow-up", "arrow-down"), "x": ("arrow-right-open", "arrow-left-open")}
"""For "at least" and "at most"."""
SYMBOLS = dict(zip(METRICS, ("diamond", "circle", "square", "triangle-up")))
FACTORS = {"euclidean": "times the noise scale"} | {
    metric: f"times the one {words}" for metric, words in OTHERS.items()
}
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


Style = dict[str, Any]
Placed = Sequence[tuple[Any, Interval, str]]
"""Values at places of an axis, with what a pointer shows of each."""


class Figure:
    """Traces and a layout."""

    id = 0

    def __init__(self, view: View, height: int = 320) -> None:
        """An empty figure over tokens or steps, with a line where the batch size of one run
        changed.
        """
        self.view, self.height = view, height
        self.traces: list[dict[str, Any]] = []
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
        """``text`` is what a pointer shows of each point. The legend has each ``name`` once."""
        if text:
            more["text"] = [html.escape(each).replace("\n", "<br>") for each in text]
            more = {"hovertemplate": "%{text}<extra></extra>"} | more
        if "name" in more:
            more["name"] = more["legendgroup"] = html.escape(more["name"])
        known = {trace.get("name") for trace in self.traces if trace["showlegend"]} | {None}
        more["showlegend"] = mode != "none" and more.get("name") not in known
        self.traces.append({"type": "scatter", "x": list(x), "y": list(y), "mode": mode, **more})

    def line(self, points: Iterable[tuple[float, float | None]], **more: Any) -> None:
        """A line through points, or a mark where there is only one."""
        x, y = zip(*((x, rounded(y)) for x, y in points))
        mode = "markers" if sum(each is not None for each in y) == 1 else "lines"
        self.trace(x, y, mode, **more)

    def dots(
        self,
        at: Placed,
        color: str,
        size: float,
        symbol: str = "circle",
        along: str = "y",
        **more: Any,
    ) -> None:
        """Values with bars for their intervals, upright or along x, and arrows where only one end
        is known.
        """
        drawn = [each for each in at if each[1].drawn]
        bar: Style = {"color": color, "thickness": size / 5, "width": size / 2}
        found = [s for _, s, _ in drawn]
        if any(s.resolved for s in found):
            bar |= {"array": [rounded(s.upper - s.value) for s in found]}
            bar |= {"arrayminus": [rounded(s.value - s.lower) for s in found]}
        mark = {"color": color, "size": size, "symbol": symbol}
        self._marks(
            drawn, [s.value for s in found], along, **{f"error_{along}": bar}, marker=mark, **more
        )
        self.bounds(at, color, 1.3 * size, along, **more)

    def bounds(self, at: Placed, color: str, size: float, along: str = "y", **more: Any) -> None:
        """Arrows where only one end is known, upright or along x."""
        at = [each for each in at if each[1].only is not None]
        symbols = [ARROWS[along][s.only != s.lower] for _, s, _ in at]
        mark = {"color": color, "size": size, "symbol": symbols}
        self._marks(at, [s.only for _, s, _ in at], along, marker=mark, **more)

    def _marks(self, at: Placed, numbers: Iterable[float | None], along: str, **more: Any) -> None:
        if at:
            places, _, text = zip(*at)
            across, up = (places, map(rounded, numbers))[:: 1 if along == "y" else -1]
            self.trace(across, up, "markers", text, **more)

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
        line = {"color": color, "dash": dash, "width": 1.8}
        values = [(x, s.value if s.drawn else None) for x, s, _ in at]
        named: Style = {"name": name, "hovertemplate": "%{text}"}
        self.line(values, text=[text for *_, text in at], line=line, **named)
        self.bounds(at, color, 9, opacity=0.65, **named)

    def log_axis(self, axis: str = "yaxis") -> None:
        """Make an axis logarithmic, in samples. It reaches to all values and ends, but to no upper
        end above 12 times the largest value.
        """
        along, ends = axis[0], list[float]()
        values = [v for t in self.traces if t["mode"] != "none" for v in t[along] if v]
        for trace in self.traces:
            bars = trace.get(f"error_{along}", {})
            middle = trace[along] if trace["mode"] == "none" or bars.get("array") else []
            ends += [v + d for v, d in zip(middle, bars.get("array", [0.0] * len(middle))) if v]
            ends += [v - d for v, d in zip(middle, bars.get("arrayminus", ())) if v and v > d]
        ends = [min(v, 12 * max(values)) for v in ends]
        low, high = (math.log10(f([*values, *ends])) for f in (min, max))
        pad = max(0.05 * (high - low), 0.06)
        more: Style = {"type": "log", "range": [low - pad, high + pad], "tickformat": ",~g"}
        if 1 < high - low < 3:
            more["dtick"] = "D2"  # 1, 2, 5, 10, 20
        self.layout.setdefault(axis, {}).update(more)

    def spec(self) -> dict[str, Any]:
        layout = self.layout | {"showlegend": self.named > 1}
        return {"data": self.traces, "layout": layout, "height": self.height}

    @property
    def named(self) -> int:
        """The entries of the legend."""
        return sum(trace.get("showlegend", False) for trace in self.traces)


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
            name = {"name": run.name} if view.several else {}
            figure.trace(x, y, "markers", text, marker=mark, cliponaxis=False, **name)
    ends = [view.x(run.points[-1]) for run in view.runs if run.points]
    figure.layout["xaxis"]["range"] = [0, max(ends, default=1.0)]
    figure.layout["yaxis"] = {"tickformat": ".0%", "rangemode": "tozero"}
    figure.layout["hovermode"] = "closest"
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
            figure.dots([(view.x(run.points[-1]), check, text)], color, 10, "diamond-open")
    return figure


def groups(view: View) -> Figure:
    """The noise scales of each run's groups: a colour for each group, a dash for each run."""
    figure, names = Figure(view), [run.groups for run in view.runs]
    order = dict.fromkeys(name for found in names for name in found)
    colors = {name: COLORS[k % len(COLORS)] for k, name in enumerate(order)}
    for k, (run, found) in enumerate(zip(view.runs, names)):
        for name in found:
            label = view.label(run, name, "{what}, {run}")
            figure.scale(run, GROUP + name, label, colors[name], DASHES[k % 4])
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
            line = {"color": view.color(run, SIZE), "width": 2.2, "dash": view.dash(run)}
            line["shape"] = "hv" if run.changes else "vh"
            name = view.label(run, "batch size")
            figure.line(steps, name=name, line=line, hovertemplate="%{y:,.4~g}")
        label, color = view.label(run, "critical batch size, estimate"), view.color(run, ESTIMATE)
        figure.scale(run, "cbs/estimate", label, color, "dot")
        for measured in run.critical:
            x, found = view.at(run, measured), Interval.read(measured)
            if x is None or not found.ends(str):
                continue
            words = f"critical batch size, branches: {tried(found)}"
            if found.resolved and math.isnan(found.value):
                found = found._replace(value=math.sqrt(found.lower * found.upper))
            name, color = (
                view.label(run, "critical batch size, branches"),
                view.color(run, BRANCHES),
            )
            figure.dots([(x, found, view.label(run, words))], color, 10, "diamond", name=name)
    sizes = [size for trace in figure.traces for size in trace["y"]]
    only_sizes = not any("marker" in t or t["mode"] == "none" for t in figure.traces)
    if only_sizes and sizes and max(sizes) <= 1.001 * min(sizes):
        figure.traces = []
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
    # Side by side, or the intervals of one checkpoint would overlap.
    slots = [(run.name, metric) for run in view.runs for metric in drawn]
    width = 0.01 * max((x for _, _, x, *_ in found), default=0.0)
    for run, metric, x, tokens, factor in found:
        color = view.color(run, COLORS[METRICS.index(metric)])
        words = f"{count(tokens)} tokens: {factor.said(three_digits)} {FACTORS[metric]}"
        aside = width * (slots.index((run.name, metric)) - (len(slots) - 1) / 2)
        text = view.label(run, words, "{run}, {what}")
        name = view.label(run, FACTORS[metric], "{run}, {what}")
        figure.dots([(x + aside, factor, text)], color, 10, SYMBOLS[metric], name=name)
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
        at = [(html.escape(path), s, f"{path}\n{said(s)}") for path, s in found.items()]
        figure.dots(at, color, 8 if figure.few else 4, along="x", name=run.name)
    return figure


def over_time(view: View, run: Run) -> Figure | None:
    """The layers of one run as a heat map, blank where a window resolves nothing."""
    lines = run.layers
    paths = list(dict.fromkeys(path for line in lines for path in line.values))
    rows = [[rounded(line.values.get(path)) for line in lines] for path in paths]
    figure, known = Rows(view, paths), [v for row in rows for v in row if v and v > 0]
    if len(lines) < 2 or not known:
        return None
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    ticks = [k * 10.0**e for e in decades for k in (1, 2, 5)]
    figure.traces.append({
        "type": "heatmap",
        "x": list(map(view.x, lines)),
        "y": figure.layout["yaxis"]["categoryarray"],
        "z": [[round(math.log10(v), 4) if v and v > 0 else None for v in row] for row in rows],
        "customdata": rows,
        "hovertemplate": f"%{{y}}<br>{view.axis} %{{x:,}}: %{{customdata}} samples<extra></extra>",
        "colorbar": {"tickvals": [*map(math.log10, ticks)], "ticktext": [f"{k:,g}" for k in ticks]},
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
        figure.height += 22 * figure.named if view.several else 0  # a line for each
        if name not in ("loss", "largest") and not name.startswith("layers "):
            figure.log_axis("xaxis" if name == "layers" else "yaxis")
    return figures
