# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file about one or more runs."""

import html
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

import gnsfast
from gnsfast.cli import figures, figures_batch, figures_layers
from gnsfast.cli.cards import card
from gnsfast.cli.figures import Figure, View
from gnsfast.cli.page import FIGURES, PAGE, SCRIPT, STYLE
from gnsfast.cli.records import Run
from gnsfast.cli.summary import count, groups_of, number, over_stretches
from gnsfast.cli.tables import decisions_table, factors_table, measurement_table
from gnsfast.integrations.trackers import SCALES
from gnsfast.noise_scale import OTHERS

READING = """<details><summary>How to read this</summary>
<p><b>Noise scale</b>: tr Σ / |G|², the batch size in samples at which the noise of a gradient is as
large as the gradient itself. The plain noise scale uses Euclidean lengths. <b>Under Adam's
metric</b>, Adam's second moments weight each coordinate. <b>In the norm of sign descent or of
spectral descent</b> (Muon), the length is a sum over coordinates or over singular values.</p>
<p><b>Critical batch size</b>: a batch beyond it saves few steps. The <b>estimate</b> is the noise
scale times a factor, which somebody set or measured. The noise scale alone is not the critical
batch size. <b>Branches</b> measure it: they continue the run with several batch sizes, and their
losses are compared.</p>
<p>A band or bar is a 95 % interval. The noise scale is the mean over the last updates (the
window). While it moves, this mean lags behind. <b>Newest weights</b> is the end of the window's
trend, and its band holds the noise scale of the last update. An arrow up means "at least": the
interval has no upper end. An arrow down means "at most". At a gap, the window showed nothing, or
the loss was NaN. At a dotted vertical line the batch size changed.</p>
</details>"""

FORMULAS = {
    "adam": "tr(PΣ) / GᵀPG",
    "sign": "(Σᵢ σᵢ / ‖G‖₁)², over coordinates",
    "spectral": "(Σ tr C<sup>½</sup> / Σ ‖G‖<sub>nuclear</sub>)², over matrices",
}

LINES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}
"""plotly's line styles in CSS, for legends."""


@dataclass(frozen=True)
class Live:
    """Seconds until an open page reloads itself, and until it says that its writer has stopped."""

    refresh: float
    stale: float


class Sections:
    """The sections of the page in HTML, and the figures that they hold."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.specs: list[dict[str, Any]] = []
        self.parts: list[str] = []

    def figure(self, title: str, note: str, figure: Figure | None, below: str = "") -> str:
        """A section, or an empty text where there is neither a figure nor HTML below it."""
        if figure is None and not below:
            return ""
        box = ""
        if figure is not None:
            box = (
                f'<div class="figure" id="figure-{len(self.specs)}" '
                f'style="height:{figure.height}px"></div>'
            )
            self.specs.append(figure.spec())
        text = f'<p class="note">{note}</p>' if note else ""
        legend = _legend(figure) if figure is not None else ""
        return f"<section><h2>{title}</h2>{text}{legend}{box}{below}</section>"

    def build(self) -> None:
        view = self.view
        unit = {str(run.header["loss_unit"]) for run in view.runs if "loss_unit" in run.header}
        left = self.figure("Loss", html.escape(", ".join(unit)), figures.loss(view))
        right = self.figure(
            "Noise scale, samples",
            "Band: 95 % interval. Arrow: at least this."
            + self._origin("euclidean")
            + self._check(),
            figures.noise_scale(view),
        )
        self.parts += [f'<div class="pair">{left}{right}</div>', self._batch(), self._factors()]
        for metric, words in OTHERS.items():
            note = f"{FORMULAS[metric]}. Band: 95 % interval. Arrow: at least this."
            self.parts.append(
                self.figure(
                    f"Noise scale {words}, samples",
                    note + self._origin(metric),
                    figures.noise_scale(view, SCALES[metric]),
                )
            )
        self.parts.append(
            self.figure(
                "Noise scale of groups of samples",
                "In samples of the group. Band: 95 % interval. Arrow: at least this.",
                figures.groups(view, [groups_of(run) for run in view.runs]),
            )
        )
        self._layers()
        self.parts += [self._decisions(run) for run in view.runs if run.decisions]

    def _origin(self, metric: str) -> str:
        key = f"{SCALES[metric]}_from_micro_batches"
        units = any(key in p.values for run in self.view.runs for p in run.points)
        return " Measured from micro-batches instead of single samples." if units else ""

    def _check(self) -> str:
        checked = any(run.check for run in self.view.runs)
        return " Diamond: single samples at the frozen last checkpoint." if checked else ""

    def _batch(self) -> str:
        view = self.view
        note = ""
        if any("cbs/estimate" in p.values for run in view.runs for p in run.points):
            note += "The estimate is a noise scale times a factor. Band: 95 % interval. "
        if any(run.critical for run in view.runs):
            note += "Bar: from the largest batch whose branch matched to the next larger one. "
        over = [(run, stretch) for run in view.runs for stretch in over_stretches(run)]
        if over:
            note += "Shaded: the batch is more than 20 % above the estimate."
        below = ""
        if over:
            rows = (
                f"<li>{self._of(run)}{view.axis} {count(view.x(s.start))} to "
                f"{count(view.x(s.end))}: up to {number(s.ratio)} times the estimate</li>"
                for run, s in over
            )
            below = f"<h3>Batch over the estimate</h3><ul>{''.join(rows)}</ul>"
        measured = [(run, each) for run in view.runs for each in run.critical]
        if measured:
            tables = (
                measurement_table(each, self._of(run), len(measured) <= 4) for run, each in measured
            )
            below += f'<div class="measured">{"".join(tables)}</div>'
        return self.figure(
            "Batch size and critical batch size, samples",
            note,
            figures_batch.batch_size(view),
            below,
        )

    def _factors(self) -> str:
        return self.figure(
            "Critical batch size / noise scale",
            "Branches measured this factor, which a controller multiplies the noise scale of the "
            "same metric by. Bar: the interval that follows from both. Measurements of one "
            "checkpoint stand side by side.",
            figures_batch.factors(self.view),
            factors_table(self.view.runs),
        )

    def _of(self, run: Run) -> str:
        return f"{html.escape(run.name)}: " if len(self.view.runs) > 1 else ""

    def _layers(self) -> None:
        view = self.view
        resolved = "; ".join(
            f"{self._of(run)}{figures_layers.resolved(run)}" for run in view.runs if run.last_layers
        )
        self.parts.append(
            self.figure(
                "Noise scale by layer, samples, last window",
                f"Layers with a value: {resolved}. Bar: 95 % interval. Arrow: at least this.",
                figures_layers.last_window(view),
            )
        )
        for run in view.runs:
            self.parts.append(
                self.figure(
                    f"{self._of(run)}Noise scale by layer, samples, over {view.axis}",
                    "Blank where a window gives no value.",
                    figures_layers.over_time(view, run),
                )
            )

    def _decisions(self, run: Run) -> str:
        return f"<section><h2>{self._of(run)}Decisions</h2>{decisions_table(run)}</section>"


def _legend(figure: Figure) -> str:
    """In HTML, which wraps: plotly's own legend would shrink the figure."""
    marks = {"diamond": "◆", "point": "●", "circle": "●", "square": "■", "triangle-up": "▲"}
    entries = (
        f'<span style="color:{color}">{marks[line]}</span>'
        if line in marks
        else f'<i style="border-color:{color};border-top-style:{LINES[line]}"></i>'
        for _, color, line in figure.legend
    )
    named = (
        f"<li>{mark} {html.escape(label)}</li>"
        for mark, (label, _, _) in zip(entries, figure.legend)
    )
    return f'<ul class="legend">{"".join(named)}</ul>' if figure.legend else ""


def default_page(paths: list[Path]) -> Path:
    """Beside the run; for several runs in the working directory."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0].with_suffix(".html") if paths[0].is_file() else paths[0] / "report.html"


def write_report(runs: list[Run], path: Path, live: Live | None = None) -> Path:
    """Replace ``path`` at once, so that nobody reads half a page."""
    view = View(runs)
    sections = Sections(view)
    sections.build()
    written = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
    data: dict[str, Any] = {"figures": sections.specs, "live": None}
    banner = ""
    if live is not None:
        data["live"] = {"written": 1000 * written, "refresh": live.refresh, "stale": live.stale}
        banner = f'<p class="live" id="live"><b>●</b> Live: written at {clock[11:]}</p>'
    cards = (card(run, view.color(run), len(runs) > 1) for run in runs)
    headers = {run.name: run.header for run in runs if run.header}
    settings = html.escape(json.dumps(headers, indent=2, ensure_ascii=False))
    text = PAGE.substitute(
        title=html.escape(runs[0].name if len(runs) == 1 else f"{len(runs)} training runs"),
        style=STYLE,
        live=banner,
        runs="\n".join(cards),
        sections="\n".join(part for part in sections.parts if part),
        footer=f"{READING}<details><summary>Settings</summary><pre>{settings}</pre></details>"
        f"<p>Written at {clock} by gnsfast {gnsfast.__version__}.</p>",
        figures=_script(data),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
    return path


def _script(data: dict[str, Any]) -> str:
    """The figures as JSON; no text in it can end the script element."""
    if not data["figures"] and not data["live"]:
        return ""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    plotly = get_plotlyjs() if data["figures"] else ""
    return FIGURES.substitute(data=plain, plotly=plotly, script=SCRIPT)
