# SPDX-License-Identifier: Apache-2.0
"""The cards at the top of the page: each run's state, numbers and warnings."""

import html

from gnsfast.cli.figures_batch import branches_span
from gnsfast.cli.records import Run
from gnsfast.cli.summary import (
    OVER,
    Interval,
    batch_size,
    count,
    last,
    last_scale,
    number,
    over_stretches,
    ratio_at,
    scale_in,
)
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.noise_scale import OTHERS, percent


def card(run: Run, color: str, several: bool) -> str:
    """Name, state, facts, warnings."""
    chip = f'<span class="chip" style="border-color:{color}"></span>' if several else ""
    title = html.escape(run.name) if several else "Summary"
    state = "" if run.state == "open" else f'<span class="state">{run.state}</span>'
    about = f"<p>{html.escape(str(run.header['about']))}</p>" if "about" in run.header else ""
    facts = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(value)}{_small(more)}</dd></div>"
        for name, value, more in _facts(run)
    )
    if not (run.points or run.critical or run.decisions):
        about += "<p>The run has no measurement yet.</p>"
        if run.state != "open":
            about = "<p>The run ended before its first measurement.</p>"
    alerts = "".join(f'<p class="alert">{html.escape(alert)}</p>' for alert in _alerts(run))
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in run.notes)
    head = f"<h2>{chip}{title}{state}</h2>"
    return f'<div class="run">{head}{about}<dl>{facts}</dl>{alerts}{notes}</div>'


def _small(more: str) -> str:
    return f" <small>{html.escape(more)}</small>" if more else ""


def _interval(found: Interval) -> tuple[str, str]:
    """The number, and its interval for the small print."""
    value, _, more = str(found).partition(" (")
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
        facts.append(("batch size", f"{number(size)} samples", ""))
    if (estimate := last_scale(run, "cbs/estimate")) is not None:
        facts.append(("critical batch size, estimate", *_interval(estimate)))
        if (ratio := ratio_at(run.points[-1])) is not None:
            facts.append(("batch size / estimate", number(ratio), ""))
    if run.critical:
        measured = run.critical[-1]
        span = branches_span(scale_in(measured, "value"))
        at = f"at {count(measured['tokens'])} tokens"
        facts.append(("critical batch size, branches", span, at))
    return facts + _costs(run)


def _costs(run: Run) -> list[tuple[str, str, str]]:
    """What the statistics cost, and what their check found."""
    facts = []
    if (share := last(run, "share")) is not None:
        facts.append(("statistics, share of a step's time", f"{share:.1%}", ""))
    if run.check:
        for key, name, unit in (
            ("estimate", "frozen last checkpoint, estimate", "batches"),
            ("brute_force", "frozen last checkpoint, single samples", "single_samples"),
        ):
            if key in run.check:
                of = f"of {run.check[unit]:,} {unit.replace('_', ' ')}" if unit in run.check else ""
                value, more = _interval(scale_in(run.check[key], "noise_scale"))
                facts.append((name, value, f"{more}, {of}" if more and of else more + of))
    return facts


def _alerts(run: Run) -> list[str]:
    """A warning if the batch is, or was, more than 20 % above the estimate."""
    stretches = over_stretches(run)
    now = ratio_at(run.points[-1]) if run.points else None
    if now is not None and now > OVER:
        return [
            f"The batch is {number(now)} times the estimated critical batch size, more than 20 % "
            "above it. So large a batch saves few steps."
        ]
    if stretches:
        most = max(stretch.ratio for stretch in stretches)
        where = "a stretch" if len(stretches) == 1 else f"{len(stretches)} stretches"
        return [
            "The batch was more than 20 % above the estimate of the critical batch size on "
            f"{where}, up to {number(most)} times the estimate."
        ]
    return []
