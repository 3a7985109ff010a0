# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file about one or more runs: what ``templates/report.html`` shows."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

import gnsfast
from gnsfast.cli.figures import View, all_figures
from gnsfast.cli.records import Run
from gnsfast.cli.summary import (
    batch_size,
    count,
    factors_in,
    last,
    last_scale,
    matches,
    over_stretches,
    ratio_at,
    said,
    scale_in,
    tried,
)
from gnsfast.cli.words import template
from gnsfast.counts import percent, three_digits
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.interval import Interval
from gnsfast.noise_scale import METRICS, OTHERS, OVER

NAMES = {"euclidean": "noise scale"} | OTHERS


@dataclass(frozen=True)
class Live:
    """Seconds until an open page reloads itself, and until it says that its writer has stopped."""

    refresh: float
    stale: float


def default_page(paths: list[Path]) -> Path:
    """Beside the run; for several runs in the working directory."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0].with_suffix(".html") if paths[0].is_file() else paths[0] / "report.html"


def write_report(runs: list[Run], path: Path, live: Live | None = None) -> Path:
    """Replace ``path`` at once, so that nobody reads half a page."""
    view, written = View(runs), time.time()
    figures = all_figures(view)
    of = {id(run): f"{run.name}: " if view.several else "" for run in runs}
    points = [p for run in runs for p in run.points]
    measured = [(run, each) for run in runs for each in run.critical]
    headers = {run.name: run.header for run in runs if run.header}
    text = template("report.html").render(
        title=f"{len(runs)} training runs" if view.several else runs[0].name,
        live=live and {"written": 1000 * written, **asdict(live)},
        clock=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)),
        several=view.several,
        axis=view.axis,
        others=OTHERS,
        cards=[_card(view, run) | {"of": of[id(run)]} for run in runs],
        units=dict.fromkeys(str(r.header["loss_unit"]) for r in runs if "loss_unit" in r.header),
        from_micro_batches=[
            metric
            for metric, key in SCALES.items()
            if any(f"{key}_from_micro_batches" in p.values for p in points)
        ],
        check=any(run.check for run in runs),
        estimated=any("cbs/estimate" in p.values for p in points),
        over=[
            (of[id(run)], *(count(view.x(p)) for p in (s.start, s.end)), three_digits(s.ratio))
            for run in runs
            for s in over_stretches(run)
        ],
        measured=[_measurement(each, of[id(run)]) for run, each in measured],
        factors=_factors(view),
        resolved=[
            f"{of[id(run)]}{count(sum(s.drawn for s in scales))} of {count(len(scales))}"
            for run in runs
            if (scales := run.last_layers.values())
        ],
        settings=json.dumps(headers, indent=2, ensure_ascii=False),
        version=gnsfast.__version__,
        figures=figures,
        specs=[figure.spec() for figure in figures.values()],
        plotly=get_plotlyjs() if figures else "",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
    return path


def _card(view: View, run: Run) -> dict[str, Any]:
    return {
        "run": run,
        "color": view.color(run),
        "empty": not (run.points or run.critical or run.decisions),
        "facts": [*_facts(run), *_costs(run)],
        "alert": _alert(run),
        "decisions": [_decision(d) for d in run.decisions],
    }


def _interval(found: Interval) -> tuple[str, str]:
    """The number, and its interval for the small print."""
    value, _, more = said(found).partition(" (")
    unit = "" if value == "not resolved" else " samples"
    return value + unit, f"({more}" if more else ""


def _facts(run: Run) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    if run.points:
        steps = f"{run.points[-1].step:,} steps"
        tokens = last(run, "tokens")
        trained = (f"{count(tokens)} tokens", steps) if tokens is not None else (steps, "")
        planned = run.header.get("steps")
        if isinstance(planned, int) and planned > run.points[-1].step:
            trained = (trained[0], f"{trained[1]} of {planned:,}".strip())
        facts.append(("trained", *trained))
    losses = [p.values["loss"] for p in run.points if "loss" in p.values]
    if losses:
        shown = "NaN or infinite" if losses[-1] is None else f"{losses[-1]:.4g}"
        facts.append(("loss", shown, str(run.header.get("loss_unit", ""))))
    for metric, key in SCALES.items():
        if (scale := last_scale(run, key)) is not None:
            name = f"noise scale {OTHERS[metric]}" if metric in OTHERS else "noise scale"
            units = last(run, f"{key}_from_micro_batches")
            facts.append((name + (", from micro-batches" if units else ""), *_interval(scale)))
    if (scale := last_scale(run, PRESENT)) is not None:
        facts.append(("noise scale at the newest weights", *_interval(scale)))
    if (covered := last(run, "gns/covered")) is not None and covered < 1:
        facts.append(("covered", f"{percent(covered)} of the trainable elements", ""))
    if (size := batch_size(run)) is not None:
        facts.append(("batch size", f"{three_digits(size)} samples", ""))
    if (estimate := last_scale(run, "cbs/estimate")) is not None:
        facts.append(("critical batch size, estimate", *_interval(estimate)))
        if (ratio := ratio_at(run.points[-1])) is not None:
            facts.append(("batch size / estimate", three_digits(ratio), ""))
    if run.critical:
        span, at = tried(Interval.read(run.critical[-1])), count(run.critical[-1]["tokens"])
        facts.append(("critical batch size, branches", span, f"at {at} tokens"))
    return facts


def _costs(run: Run) -> list[tuple[str, str, str]]:
    """What the statistics cost, and what their check found."""
    facts = []
    if (share := last(run, "share")) is not None:
        facts.append(("statistics, share of a step's time", f"{share:.1%}", ""))
    check = run.check or {}
    for key, name, unit in (
        ("estimate", "frozen last checkpoint, estimate", "batches"),
        ("brute_force", "frozen last checkpoint, single samples", "single_samples"),
    ):
        if key in check:
            value, more = _interval(scale_in(check[key]))
            of = f"of {check[unit]:,} {unit.replace('_', ' ')}" if unit in check else ""
            facts.append((name, value, ", ".join(filter(None, (more, of)))))
    return facts


def _alert(run: Run) -> str:
    """A warning if the batch is, or was, more than 20 % above the estimate."""
    stretches = over_stretches(run)
    now = ratio_at(run.points[-1]) if run.points else None
    if now is not None and now > OVER:
        return (
            f"The batch is {three_digits(now)} times the estimated critical batch size, more than "
            "20 % above it. So large a batch saves few steps."
        )
    if not stretches:
        return ""
    most = max(stretch.ratio for stretch in stretches)
    where = "a stretch" if len(stretches) == 1 else f"{len(stretches)} stretches"
    return (
        "The batch was more than 20 % above the estimate of the critical batch size on "
        f"{where}, up to {three_digits(most)} times the estimate."
    )


def _measurement(measured: dict[str, Any], of: str) -> dict[str, Any]:
    """A row for each branch: did its loss match those of every smaller batch?"""
    rows = []
    for branch, matched in matches(measured):
        numbers = (branch.get(name) for name in ("k", "batch_size", "lr_factor"))
        loss, std = branch.get("loss"), branch.get("loss_std")
        shown = (
            "-" if loss is None else f"{loss:.4f}" + (f" ± {std:.2g}" if std is not None else "")
        )
        cells = ["-" if n is None else three_digits(n) for n in numbers]
        rows.append({"cells": [*cells, shown, matched], "warning": False})
    beside = [
        f"{name} there: {said(scale_in(found))} samples"
        for key, name in NAMES.items()
        if isinstance(found := measured.get("noise_scale" if key == "euclidean" else key), dict)
    ]
    beside += [
        f"k = {each['k']:g} failed: {each['reason']}" for each in measured.get("missing", ())
    ]
    beside += [f"doubtful: {doubt}" for doubt in measured.get("doubts", ())]
    span = tried(Interval.read(measured))
    title = f"{of}branches at {count(measured['tokens'])} tokens: {span}"
    return {"title": title, "beside": beside, "rows": rows}


def _factors(view: View) -> dict[str, Any]:
    """Critical batch size / noise scale: a row for each measurement of each run."""
    found = [(run, each, factors_in(each)) for run in view.runs for each in run.critical]
    metrics = [m for m in METRICS if any(m in factors for _, _, factors in found)]
    rows = []
    for run, each, factors in found:
        cells = [*([run.name] if view.several else []), count(each["tokens"])]
        for metric in metrics:
            factor = factors.get(metric)
            cells.append((factor.said(three_digits) or "unknown") if factor else "-")
        rows.append({"cells": cells, "warning": each.get("doubts")})
    head = [*(["run"] if view.several else []), "tokens"]
    names, titles = [NAMES[metric] for metric in metrics], [""] * len(head)
    return {"head": head + names, "titles": titles + names, "rows": rows if metrics else []}


def _decision(d: dict[str, Any]) -> dict[str, Any]:
    """Changes of batch and phase, and warnings."""
    changed = d["old"] != d["new"]
    sizes = f"{three_digits(d['old'])} → " if changed else ""
    factor = d.get("lr_factor")
    why = ("Warning: " if d.get("warning") else "") + str(d.get("reason", ""))
    return {
        "cells": [
            count(d["tokens"]),
            str(d.get("phase", "")),
            sizes + three_digits(d["new"]),
            three_digits(factor) if factor is not None and factor != 1 else "",
            said(Interval.read(d, "estimate", "lower", "upper")),
            why,
        ],
        "warning": d.get("warning"),
    }
