# SPDX-License-Identifier: Apache-2.0
"""The figure of ``geometry``, from its record alone: the critical batch size over each noise scale
at every checkpoint, by optimizer and width.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import COLORS, FAINT, GRID, INK, PAPER, rendered, signed
from benchmarks.measure import Timing
from benchmarks.record import Record, Rows
from benchmarks.studies.geometry_tables import RATIOS
from gnsfast.noise_scale import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 830, 340, 62, 76, 50, 12
"""Pixels; the last four are the margins of the panels."""
MARKERS = "osD^v"
TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
NAMES = {"sgd": "SGD", "adamw": "AdamW", "signum": "Signum", "muon": "Muon"}
TITLES = {"euclidean": "Euclidean", "adam": "Adam's", "sign": "sign", "spectral": "spectral"}


def ends(cell: Any) -> tuple[float, float, float]:
    """Value, lower and upper of a cell, in which a value may be nan and an upper end inf."""
    if isinstance(cell, Timing):
        return cell.ratio, cell.lower, cell.upper
    value, _, span = str(cell).rstrip(")").partition(" (")
    lower, _, upper = span.partition(" to ")
    return float(value), float(lower), float(upper)


def draw(record: Record) -> "Figure":
    """A panel for each noise scale, labelled by it, that shares the axis of the ratio."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = record.tables[RATIOS]
    names = [name for name in NAMES if any(row["optimizer"] == name for row in rows)]
    widths = sorted({row["width"] for row in rows})
    metrics = [m for m in METRICS if any(row.get(m) is not None for row in rows)]
    has = {m: [n for n in names if _of(rows, m, n)] for m in metrics}
    free = WIDTH - LEFT - RIGHT - 10 * (len(metrics) - 1)
    unit = free / sum(map(len, has.values()))
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH / 96, HEIGHT / 96), dpi=96, facecolor=PAPER)
        left = float(LEFT)
        for metric in metrics:
            size = unit * len(has[metric])
            inner = 1 - (TOP + BOTTOM) / HEIGHT
            place = left / WIDTH, BOTTOM / HEIGHT, size / WIDTH, inner
            ax = figure.add_axes(place, label=metric, facecolor=PAPER)
            _panel(ax, rows, metric, has[metric], widths)
            left += size + 10
            ax.set_yticks(TICKS, [f"{t:g}" for t in TICKS] if metric == metrics[0] else [])
            ax.set_yticks([], minor=True)
            ax.set_ylim(_limits(rows, metrics))
        _words(figure, record, widths)
    return figure


def _of(rows: Rows, metric: str, name: str) -> Rows:
    return [row for row in rows if row["optimizer"] == name and row.get(metric) is not None]


def _limits(rows: Rows, metrics: list[str]) -> tuple[float, float]:
    found = [end for row in rows for m in metrics if row.get(m) for end in ends(row[m])]
    finite = [end for end in found if 0 < end < math.inf]
    return 0.8 * min(finite, default=1), 1.25 * max(finite, default=1)


def _panel(ax: "Axes", rows: Rows, metric: str, names: list[str], widths: list[int]) -> None:
    """The checkpoints of each optimizer side by side, by width and then by step, with the geometric
    mean of those whose ratio is known.
    """
    ax.set_yscale("log")
    ax.tick_params(which="both", length=0, labelcolor=FAINT, labelsize=7.5)
    ax.spines[:].set_visible(False)
    ax.grid(axis="y", color=GRID, linewidth=0.7)
    ax.axhline(1, color=FAINT, linewidth=1, zorder=2)
    slots = sorted({(row["width"], row["step"]) for row in rows})
    labels = []
    for x, name in enumerate(names):
        known = []
        for row in _of(rows, metric, name):
            slot = slots.index((row["width"], row["step"]))
            place = x + 0.86 * ((slot + 0.5) / len(slots) - 0.5)
            at = widths.index(row["width"])
            look: dict[str, Any] = {"color": COLORS[at], "marker": MARKERS[at], "ms": 3.6}
            value, lower, upper = ends(row[metric])
            if math.isfinite(value):
                known.append(math.log(value))
                high = min(upper, 1e6)  # beyond the axis
                ax.plot([place, place], [lower, high], color=COLORS[at], lw=0.9, alpha=0.7)
                ax.plot([place], [value], zorder=4, ls="", **look)
            elif lower > 0 or math.isfinite(upper):
                bound, marker = (lower, "^") if lower > 0 else (upper, "v")
                look |= {"marker": marker, "mfc": "none"}
                ax.plot([place], [bound], zorder=4, ls="", **look)
        mean = math.exp(math.fsum(known) / len(known)) if known else math.nan
        ax.plot([x - 0.44, x + 0.44], [mean, mean], color=INK, lw=1.1, zorder=3)
        labels.append(f"{NAMES[name]}\n{mean:.2g}")
    ax.set_xticks(range(len(names)), labels)
    ax.tick_params(axis="x", labelcolor=INK)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_title(TITLES[metric], color=INK, fontsize=8.5, weight="bold", loc="left", pad=5)


def _words(figure: "Figure", record: Record, widths: list[int]) -> None:
    from matplotlib.lines import Line2D

    top = 1 - 16 / HEIGHT
    title = "Critical batch size / noise scale"
    figure.text(8 / WIDTH, top, title, color=INK, fontsize=9, weight="bold")
    for i, width in enumerate(widths):
        x = 300 + 80 * i
        style: dict[str, Any] = {"color": COLORS[i], "marker": MARKERS[i], "ms": 4, "ls": ""}
        figure.add_artist(Line2D([x / WIDTH], [top + 4 / HEIGHT], **style))
        figure.text((x + 8) / WIDTH, top, f"width {width}", color=INK, fontsize=8)
    about = record.machine
    where = f"torch {about['torch']}, commit {about['commit']}"
    words = (
        "Each width's checkpoints from left to right. Lines: what the intervals of both allow; "
        "hollow: a single bound. Bars and numbers: geometric means.",
        f"Record {record.name}: {about['processor']}, {where}.",
    )
    for y, text in zip((22, 8), words):
        figure.text(8 / WIDTH, y / HEIGHT, text, color=FAINT, fontsize=7.2)


def signature(record: Record) -> str:
    return signed(record, record.tables[RATIOS])


def write(record: Record) -> Path:
    """Beside the record."""
    path = record.path.with_suffix(".svg")
    text = rendered(lambda: draw(record), "Critical batch size / noise scale", signature(record))
    path.write_text(text, encoding="utf-8")
    return path
