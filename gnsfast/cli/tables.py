# SPDX-License-Identifier: Apache-2.0
"""Tables of a report: branches of a measurement, decisions of a controller."""

import html
from typing import Any

from gnsfast.cli.figures_batch import branches_span
from gnsfast.cli.records import Run
from gnsfast.cli.summary import Interval, bounds, count, factors_in, matches, number, scale_in
from gnsfast.noise_scale import METRICS, OTHERS


def measurement_table(measured: dict[str, Any], of: str, opened: bool) -> str:
    """A row for each branch: did its loss match those of every smaller batch?"""
    span = branches_span(scale_in(measured, "value"))
    title = f"{of}branches at {count(measured['tokens'])} tokens: {span}"
    cells = (
        (
            _number_or_dash(branch.get("k")),
            _number_or_dash(branch.get("batch_size")),
            _number_or_dash(branch.get("lr_factor")),
            _loss(branch),
            matched,
        )
        for branch, matched in matches(measured)
    )
    rows = "".join(_row([("", cell) for cell in row]) for row in cells)
    head = "".join(f"<th>{name}</th>" for name in ("k", "batch", "LR ×", "loss", "matches"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    beside = [
        f"{name} there: {scale_in(found, 'value' if 'value' in found else 'noise_scale')} samples"
        for key, name in ({"noise_scale": "noise scale"} | OTHERS).items()
        if isinstance(found := measured.get(key), dict)
    ]
    beside += [
        f"k = {each['k']:g} failed: {each['reason']}" for each in measured.get("missing", ())
    ]
    beside += [f"doubtful: {doubt}" for doubt in measured.get("doubts", ())]
    note = f'<p class="note">{html.escape("; ".join(beside))}</p>' if beside else ""
    state = " open" if opened else ""
    return f"<details{state}><summary>{title}</summary>{note}{table}</details>"


def factors_table(runs: list[Run]) -> str:
    """Critical batch size / noise scale: a row for each measurement of each run."""
    found = [(run, each, factors_in(each)) for run in runs for each in run.critical]
    metrics = [m for m in METRICS if any(m in factors for _, _, factors in found)]
    names = {"euclidean": "noise scale"} | OTHERS
    head = [*(["run"] if len(runs) > 1 else []), "tokens", *(names[m] for m in metrics)]
    rows = []
    for run, each, factors in found:
        cells = [("", run.name)] if len(runs) > 1 else []
        cells.append(("", count(each["tokens"])))
        cells += [(names[m], bounds(factors[m]) if m in factors else "-") for m in metrics]
        rows.append(_row(cells, bool(each.get("doubts"))))
    if not metrics:
        return ""
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = f"<thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table class="decisions">{body}</table>'


def _loss(branch: dict[str, Any]) -> str:
    if branch.get("loss") is None:
        return "-"
    std = branch.get("loss_std")
    return f"{branch['loss']:.4f}" + (f" ± {std:.2g}" if std is not None else "")


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


def decisions_table(run: Run) -> str:
    """Changes of batch and phase, and warnings, in order."""
    rows = "".join(_decision(d) for d in run.decisions)
    names = ("tokens", "phase", "batch, samples", "LR ×", "estimate, samples", "why")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<table class="decisions"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _decision(d: dict[str, Any]) -> str:
    changed = d["old"] != d["new"]
    sizes = f"{number(d['old'])} → {number(d['new'])}" if changed else number(d["new"])
    factor = d.get("lr_factor")
    lr = number(factor) if factor is not None and factor != 1 else ""
    estimate = str(Interval(d.get("estimate"), d.get("lower"), d.get("upper")))
    warning = bool(d.get("warning"))
    why = ("Warning: " if warning else "") + str(d.get("reason", ""))
    cells = [("", count(d["tokens"])), ("", str(d.get("phase", ""))), ("batch", sizes)]
    cells += [("LR ×", lr)] if lr else [("", "")]
    return _row([*cells, ("estimate", estimate), ("", why)], warning)


def _row(cells: list[tuple[str, str]], warning: bool = False) -> str:
    """A row; a cell's title is what a narrow screen shows in place of the table's head."""
    kind = ' class="warning"' if warning else ""
    titles = (f' title="{title}"' if title else "" for title, _ in cells)
    tds = (f"<td{kind}{t}>{html.escape(c)}</td>" for t, (_, c) in zip(titles, cells))
    return f"<tr>{''.join(tds)}</tr>"
