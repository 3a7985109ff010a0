# SPDX-License-Identifier: Apache-2.0
"""The figure of the batch sizes of a run and of its critical batch sizes."""

import html
import math
from typing import Any

from gnsfast.cli.figures import (
    COLORS,
    GREY,
    Figure,
    View,
    add_scale,
    interval_marker,
    marker,
    rounded,
    samples_axis,
)
from gnsfast.cli.records import Point, Run
from gnsfast.cli.summary import (
    Interval,
    axis_position,
    bounds,
    count,
    factors_in,
    number,
    over_stretches,
    scale_in,
)
from gnsfast.noise_scale import METRICS, OTHERS

SYMBOLS = dict(zip(METRICS, ("diamond", "circle", "square", "triangle-up")))
FACTORS = {"euclidean": "times the noise scale"} | {
    metric: f"times the one {words}" for metric, words in OTHERS.items()
}
APART = 0.01
"""The share of the axis between factors of one checkpoint, whose intervals would overlap."""
SIZE, ESTIMATE, BRANCHES, OVER = COLORS[0], COLORS[2], COLORS[3], COLORS[1]


def batch_size(view: View) -> Figure | None:
    """Batch sizes as a staircase; the critical batch size as estimated and as measured."""
    figure = view.figure(360)
    several = len(view.runs) > 1
    for run in view.runs:
        color, name = view.color(run), f"{run.name}: " if several else ""
        size, estimate, branches = (color,) * 3 if several else (SIZE, ESTIMATE, BRANCHES)
        ends = [(view.x(over.start), view.x(over.end)) for over in over_stretches(run)]
        figure.layout["shapes"] += [_shaded(*each, color if several else OVER) for each in ends]
        _add_sizes(figure, view, run, f"{name}batch size", size)
        label = f"{name}critical batch size, estimate"
        add_scale(figure, view, run, "cbs/estimate", label, estimate, "dot")
        for measurement in run.critical:
            _add_branches(figure, view, run, measurement, name, branches)
    if all(t.get("meta") == "size" for t in figure.traces) and figure.high <= 1.001 * figure.low:
        return None
    samples_axis(figure)
    size, estimate, branches = (GREY,) * 3 if several else (SIZE, ESTIMATE, BRANCHES)
    drawn = [run for run in view.runs if run.decisions or run.critical or _sized(run)]
    figure.legend = [*view.legend(drawn), ("batch size", size, "solid")]
    if any("cbs/estimate" in p.values for run in view.runs for p in run.points):
        figure.legend.append(("critical batch size, estimate", estimate, "dot"))
    if any(run.critical for run in view.runs):
        figure.legend.append(("critical batch size, branches", branches, "diamond"))
    return figure


def _sized(run: Run) -> list[Point]:
    return [p for p in run.points if p.values.get("batch/size")]


def _add_sizes(figure: Figure, view: View, run: Run, label: str, color: str) -> None:
    """Draw the decisions, or without any the logged sizes: each holds for the steps before it."""
    points = _sized(run)
    end = view.x(run.points[-1]) if run.points else 0.0
    steps: list[tuple[float, float]] = []
    shape = "vh"
    changes = [d for d in run.decisions if d["old"] != d["new"]]
    if changes:
        shape = "hv"
        at = [(axis_position(run, d["tokens"], view.over_tokens), d) for d in changes]
        steps = [(0.0, changes[0]["old"]), *((x, d["new"]) for x, d in at if x is not None)]
        steps.append((max(end, steps[-1][0]), steps[-1][1]))
    elif points:
        kept = [
            p
            for before, p, after in zip([None, *points], points, [*points[1:], None])
            if not before
            or not after
            or p.values["batch/size"] != before.values["batch/size"]
            or p.values["batch/size"] != after.values["batch/size"]
        ]
        steps = [(view.x(p), p.values["batch/size"] or 0.0) for p in kept]
    if not steps:
        return
    figure.cover(size for _, size in steps)
    figure.traces.append({
        "type": "scatter",
        "meta": "size",
        "name": html.escape(label),
        "x": [x for x, _ in steps],
        "y": [rounded(size) for _, size in steps],
        "mode": "lines" if len(steps) > 1 else "markers",
        "line": {"color": color, "shape": shape, "width": 2.2, "dash": view.dash(run)},
        "hovertemplate": "%{y:,.4~g}",
    })  # fmt: skip


def _add_branches(
    figure: Figure, view: View, run: Run, measurement: dict[str, Any], name: str, color: str
) -> None:
    """Draw a measurement's interval, or an arrow if only one end is known."""
    x = axis_position(run, measurement["tokens"], view.over_tokens)
    found = scale_in(measurement, "value")
    if x is None or (not found.lower and found.upper is None):
        return
    text = f"{html.escape(name)}critical batch size, branches: {branches_span(found)}"
    if found.lower and found.upper is not None:
        middle = found.value or math.sqrt(found.lower * found.upper)
        bar = Interval(middle, found.lower, found.upper)
        trace = interval_marker(figure, x, bar, "diamond", color, text)
    else:
        up = bool(found.lower)
        y = found.lower if up else found.upper
        figure.cover([y])
        trace = marker(x, y, "arrow-up" if up else "arrow-down", color, text, 13)
    figure.traces.append(trace)


def factors(view: View) -> Figure | None:
    """Each measurement's critical batch size / noise scale: a colour for each run, a symbol for
    each metric.
    """
    figure = view.figure(280)
    several = len(view.runs) > 1
    found = [
        (run, metric, x, measurement["tokens"], factor)
        for run in view.runs
        for measurement in run.critical
        for metric, factor in factors_in(measurement).items()
        if (x := axis_position(run, measurement["tokens"], view.over_tokens)) is not None
        and factor.value is not None
        and None not in (factor.lower, factor.upper)
    ]
    drawn = [metric for metric in METRICS if metric in {metric for _, metric, *_ in found}]
    slots = [(run.name, metric) for run in view.runs for metric in drawn]
    width = APART * max((x for _, _, x, *_ in found), default=0.0)
    for run, metric, x, tokens, factor in found:
        color = view.color(run) if several else COLORS[METRICS.index(metric)]
        name = f"{html.escape(run.name)}, " if several else ""
        text = f"{name}{count(tokens)} tokens: {bounds(factor)} {FACTORS[metric]}"
        aside = width * (slots.index((run.name, metric)) - (len(slots) - 1) / 2)
        figure.traces.append(
            interval_marker(figure, x + aside, factor, SYMBOLS[metric], color, text)
        )
    if not figure.traces:
        return None
    samples_axis(figure)
    figure.legend = view.legend([run for run in view.runs if run.critical])
    for metric in drawn:
        color = GREY if several else COLORS[METRICS.index(metric)]
        figure.legend.append((FACTORS[metric], color, SYMBOLS[metric]))
    return figure


def branches_span(found: Interval) -> str:
    """A measurement's interval in words: its ends are batch sizes that were tried."""
    if found.lower and found.upper is not None:
        return f"{number(found.lower)} to {number(found.upper)} samples"
    if found.lower:
        return f"at least {number(found.lower)} samples"
    return f"at most {number(found.upper)} samples" if found.upper else "not resolved"


def _shaded(start: float, end: float, color: str) -> dict[str, Any]:
    return {
        "type": "rect", "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper",
        "fillcolor": color, "opacity": 0.16, "line": {"width": 1, "color": color}, "layer": "below",
    }  # fmt: skip
