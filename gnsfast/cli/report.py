# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file from the records of a run."""

import html
import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io

LOSS, SCALE, BAND = "#3b6fb6", "#1b7f5c", "rgba(27, 127, 92, 0.18)"
TICKS = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5)]
SAMPLES = {"type": "log", "tickvals": TICKS, "ticktext": [f"{t:,g}" for t in TICKS]}
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def write_report(records: list[dict[str, Any]], path: Path) -> Path:
    """Write ``path`` from the lines of ``metrics.jsonl``; opens offline."""
    header, steps = records[0], [r for r in records if r["kind"] == "step"]
    check = next((r for r in records if r["kind"] == "check"), None)
    interrupted = any(r["kind"] == "interrupted" for r in records)
    figures = [_loss(steps), _scale(steps, check), _modules(steps)] if steps else []
    parts = [
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=k == 0,
            config={"displayModeBar": False, "responsive": True},
        )
        for k, figure in enumerate(figures)
    ]
    sections = "\n".join(f"<section>{part}</section>" for part in parts)
    if not steps:
        sections = "<p>The run ended before its first measurement.</p>"
    path.write_text(
        PAGE.format(
            summary=_summary(header, steps, check, interrupted),
            sections=sections,
            header=html.escape(json.dumps(header, indent=2)),
        ),
        encoding="utf-8",
    )
    return path


def interval(scale: dict[str, Any]) -> str:
    """ "36.6 (95 %: 33.2 to 40.6)"."""
    if not scale["resolved"]:
        return f"at least {scale['lower']:,.3g} (95 %)" if scale["lower"] else "not resolved"
    return f"{scale['noise_scale']:,.3g} (95 %: {scale['lower']:,.3g} to {scale['upper']:,.3g})"


def _summary(
    header: dict[str, Any],
    steps: list[dict[str, Any]],
    check: dict[str, Any] | None,
    interrupted: bool,
) -> str:
    rows = [("samples in a step", f"{header['samples']}")]
    if steps:
        last = steps[-1]
        rows += [
            ("steps", f"{last['step']:,}" + (" (interrupted)" if interrupted else "")),
            ("loss at the end", f"{last['loss']:.3f}"),
            ("noise scale, last 64 updates", f"{interval(last)} samples"),
        ]
        if last["share"] is not None:
            rows.append(("statistics, share of a step's time", f"{last['share']:.1%}"))
    if check:
        rows += [
            (
                f"frozen checkpoint, estimate from {check['batches']} batches",
                f"{interval(check['estimate'])} samples",
            ),
            (
                f"frozen checkpoint, {check['single_samples']:,} single-sample gradients",
                f"{interval(check['brute_force'])} samples",
            ),
        ]
        if check["ratio"] is not None:
            rows.append(("estimate / single samples", f"{check['ratio']:.2f}"))
    cells = (f"<tr><th>{name}</th><td>{html.escape(said)}</td></tr>" for name, said in rows)
    return f"<table>{''.join(cells)}</table>"


def _figure(title: str, y: str, height: int = 340) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title=title,
        height=height,
        template="plotly_white",
        font={"family": FONT, "size": 13},
        margin={"l": 70, "r": 20, "t": 50, "b": 50},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.12, "x": 1, "xanchor": "right"},
    )
    figure.update_yaxes(title=y)
    return figure


def _loss(steps: list[dict[str, Any]]) -> go.Figure:
    figure = _figure("Loss", "nats per byte")
    figure.add_scatter(
        x=[r["step"] for r in steps], y=[r["loss"] for r in steps], line={"color": LOSS}
    )
    figure.update_xaxes(title="step", range=[0, steps[-1]["step"] * 1.02])
    return figure


def _scale(steps: list[dict[str, Any]], check: dict[str, Any] | None) -> go.Figure:
    figure = _figure("Gradient noise scale", "samples")
    resolved = [r for r in steps if r["resolved"] and r["lower"] > 0]
    x = [r["step"] for r in resolved]
    band = x + x[::-1], [r["upper"] for r in resolved] + [r["lower"] for r in resolved][::-1]
    figure.add_scatter(
        x=band[0], y=band[1], fill="toself", fillcolor=BAND, line={"width": 0},
        hoverinfo="skip", name="95 % interval",
    )  # fmt: skip
    figure.add_scatter(
        x=x, y=[r["noise_scale"] for r in resolved], line={"color": SCALE}, name="noise scale",
        customdata=[[r["lower"], r["upper"]] for r in resolved],
        hovertemplate="%{y:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})",
    )  # fmt: skip
    bounds = [r for r in steps if not r["resolved"] and r["lower"] > 0]
    if bounds:
        figure.add_scatter(
            x=[r["step"] for r in bounds], y=[r["lower"] for r in bounds], mode="markers",
            marker={"symbol": "arrow-up", "color": SCALE, "size": 9}, name="at least",
        )  # fmt: skip
    if check and check["brute_force"]["resolved"]:
        b = check["brute_force"]
        figure.add_scatter(
            x=[steps[-1]["step"]], y=[b["noise_scale"]], mode="markers", name="single samples",
            marker={"color": "#b3432f", "size": 9, "symbol": "diamond"},
            error_y={
                "array": [b["upper"] - b["noise_scale"]],
                "arrayminus": [b["noise_scale"] - b["lower"]],
            },
            hovertemplate="%{y:.3g}",
        )  # fmt: skip
    figure.update_xaxes(title="step", range=[0, steps[-1]["step"] * 1.02])
    figure.update_yaxes(**SAMPLES)
    return figure


def _modules(steps: list[dict[str, Any]]) -> go.Figure:
    modules = steps[-1]["per_module"]
    shown = {p: m for p, m in modules.items() if m["resolved"] and m["lower"] > 0}
    title = f"Noise scale by module, last 64 updates, {len(shown)} of {len(modules)} resolved"
    figure = _figure(title, "", 120 + 22 * len(shown))
    values = [m["noise_scale"] for m in shown.values()]
    figure.add_scatter(
        x=values, y=list(shown), mode="markers", marker={"color": SCALE, "size": 8},
        error_x={
            "array": [m["upper"] - m["noise_scale"] for m in shown.values()],
            "arrayminus": [m["noise_scale"] - m["lower"] for m in shown.values()],
            "color": SCALE, "thickness": 1,
        },
        hovertemplate="%{x:.3g} samples<extra>%{y}</extra>",
    )  # fmt: skip
    figure.update_layout(hovermode="closest", margin={"l": 140})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="samples", **SAMPLES)
    return figure


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gnsfast demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 960px; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th {{ text-align: left; font-weight: 400; color: #555; padding: .2rem 1.5rem .2rem 0; }}
td {{ font-variant-numeric: tabular-nums; font-weight: 600; }}
section {{ margin: 1.5rem 0; }}
p, details {{ color: #555; max-width: 70ch; }}
pre {{ background: #f5f5f3; padding: 1rem; overflow-x: auto; }}
</style>
</head>
<body>
<h1>Gradient noise scale of a training run</h1>
<p>A byte-level GPT trained on Python's language reference. The noise scale tr Σ / |G|² is the batch
size at which the noise of a gradient is as large as the gradient; it comes from the backward passes
of the run itself.</p>
{summary}
{sections}
<p>The band is the 95 % interval of the mean over the last 64 updates, where they resolve it; an
arrow says "at least". While the noise scale moves, that mean is behind the last checkpoint, which
the single samples measure. The noise scale is Euclidean: not the critical batch size of Adam.</p>
<details><summary>Settings</summary><pre>{header}</pre></details>
</body>
</html>
"""
