# SPDX-License-Identifier: Apache-2.0
"""Figures of layers: the last window of each with its interval, and all windows as a heat map."""

import html
import math
from typing import Any

from gnsfast.cli.figures import GRID, Figure, View, rounded, samples_axis
from gnsfast.cli.records import Run
from gnsfast.cli.summary import Interval, count

LABELS = 60
"""Up to this many layers, the axis names all of them. Of more it names every n-th."""
NAME = 22
"""The longest name on the axis, in characters: a phone is 390 pixels wide."""


def last_window(view: View) -> Figure | None:
    """A row for each layer, with all runs in it; arrows say "at least"."""
    paths = list(dict.fromkeys(path for run in view.runs for path in run.last_layers))
    if not paths:
        return None
    figure = _figure(paths)
    runs = [run for run in view.runs if run.last_layers]
    for run in runs:
        layers = {path: Interval(*found) for path, found in run.last_layers.items()}
        shown = {path: s for path, s in layers.items() if s.drawn}
        bounds = {path: s for path, s in layers.items() if s.bound}
        figure.cover_intervals(list(layers.values()))
        figure.traces += [
            _dots(view, run, shown, figure, len(paths)),
            _arrows(view, run, bounds, len(paths)),
        ]
    figure.traces = [trace for trace in figure.traces if trace["x"]]
    samples_axis(figure, "xaxis")
    figure.legend = [(name, color, "point") for name, color, _ in view.legend(runs)]
    return figure if figure.traces else None


def _dots(
    view: View, run: Run, shown: dict[str, Interval], figure: Figure, rows: int
) -> dict[str, Any]:
    bars = [(s.value or 0.0, s.lower, s.upper) for s in shown.values()]
    return _row_marks(view, run, shown, [value for value, _, _ in bars]) | {
        "marker": {"color": view.color(run), "size": 8 if rows <= LABELS else 4},
        "error_x": {
            "array": [rounded((upper or value) - value) for value, _, upper in bars],
            "arrayminus": [rounded(value - (lower or value)) for value, lower, _ in bars],
            "color": view.color(run),
            "thickness": 1.5 if rows <= LABELS else 0.8,
            "width": 0,
        },
    }


def _arrows(view: View, run: Run, bounds: dict[str, Interval], rows: int) -> dict[str, Any]:
    size = 10 if rows <= LABELS else 6
    values = [s.bound or 0.0 for s in bounds.values()]
    symbols = [f"arrow-{'right' if s.at_least else 'left'}-open" for s in bounds.values()]
    return _row_marks(view, run, bounds, values) | {
        "marker": {"color": view.color(run), "symbol": symbols, "size": size},
    }


def _row_marks(
    view: View, run: Run, layers: dict[str, Interval], values: list[float]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": html.escape(run.name),
        "x": [rounded(v) for v in values],
        "y": [html.escape(path) for path in layers],
        "mode": "markers",
        "text": [f"{html.escape(path)}<br>{s}" for path, s in layers.items()],
        "hovertemplate": "%{text}<extra></extra>",
    }


def over_time(view: View, run: Run) -> Figure | None:
    """A heat map of one run, blank where a window resolves nothing."""
    lines = run.layers
    paths = list(dict.fromkeys(path for line in lines for path in line.values))
    rows = [[rounded(line.values.get(path)) for line in lines] for path in paths]
    values = [v for row in rows for v in row if v is not None and v > 0]
    if len(lines) < 2 or not values:
        return None
    figure = _figure(paths)
    x = [float(p.tokens or 0.0) if view.over_tokens else float(p.step) for p in lines]
    figure.cover(values)
    scale = Figure(0)
    scale.cover(values)
    samples_axis(scale, "colors")
    colors = scale.layout["colors"]
    figure.traces = [{
        "type": "heatmap",
        "x": x,
        "y": [html.escape(path) for path in paths],
        "z": [[_log(v) for v in row] for row in rows],
        "customdata": rows,
        "hovertemplate": f"%{{y}}<br>{view.axis} %{{x:,}}: %{{customdata}} samples<extra></extra>",
        "hoverongaps": False,
        "colorscale": "Viridis",
        "colorbar": {
            "tickvals": [math.log10(t) for t in colors["tickvals"]],
            "ticktext": colors["ticktext"],
            "orientation": "h", "y": 1.0, "yanchor": "bottom", "thickness": 10, "len": 1.0,
            "lenmode": "fraction", "x": 0.5, "outlinewidth": 0,
        },
    }]  # fmt: skip
    figure.layout["xaxis"] = {
        "title": {"text": view.axis}, "exponentformat": "B", "nticks": 6, "showgrid": False,
    }  # fmt: skip
    return figure


def _figure(paths: list[str]) -> Figure:
    """An empty figure with a row for each layer, the first at the top."""
    every = math.ceil(len(paths) / LABELS)
    row = 22 if len(paths) <= LABELS else 5
    figure = Figure(110 + min(row * len(paths), max(1300, 3 * len(paths))))
    named = [html.escape(path) for path in paths[::every]]
    figure.layout = {
        "hovermode": "closest",
        "showlegend": False,
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [html.escape(path) for path in paths],
            "range": [len(paths) - 0.5, -0.5],
            "tickvals": named,
            "ticktext": [html.escape(_short(path)) for path in paths[::every]],
            "automargin": True,
            "gridcolor": GRID,
            "tickfont": {"size": 11},
        },
        "xaxis": {"gridcolor": GRID},
    }
    return figure


def _log(value: float | None) -> float | None:
    return round(math.log10(value), 4) if value is not None and value > 0 else None


def _short(path: str) -> str:
    """The end of a long path, from a dot on if enough is left."""
    if len(path) <= NAME:
        return path
    end = path[1 - NAME :]
    after_dot = end.partition(".")[2]
    return "…" + (after_dot if len(after_dot) > NAME // 2 else end)


def resolved(run: Run) -> str:
    """How many of the layers the last window resolves."""
    scales = [Interval(*found) for found in run.last_layers.values()]
    return f"{count(sum(s.drawn for s in scales))} of {count(len(scales))}"
