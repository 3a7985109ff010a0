# SPDX-License-Identifier: Apache-2.0
"""The README's figure, drawn from a record alone: the time and the memory of whole steps."""

import hashlib
import io
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Timing
from benchmarks.record import Record, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP = "Whole training step"
OURS = "gnsfast"
OURS_COLOR, COLOR = "#d55e00", "#1a80bb"
"""Okabe and Ito's, as in the report of a run."""
INK, FAINT, PAPER = "#1f2328", "#59636e", "#ffffff"
DARK = {INK: "#f0f6fc", FAINT: "#9198a1", PAPER: "#0d1117"}
"""The same where the page is dark."""
FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
INCHES = 8.65, 3.2
"""As wide as a README's text on GitHub."""
STYLE = {
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "hatch.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": OURS,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}


@dataclass(frozen=True)
class Steps:
    """A contestant's whole step: ratios to plain by threads; ``lacks`` says what its norms lack."""

    name: str
    lacks: str
    time: dict[int, Timing] = field(default_factory=dict)
    memory: dict[int, float] = field(default_factory=dict)


def steps(record: Record) -> list[Steps]:
    """Contestants, the cheapest step first, without plain, which they are compared to."""
    found: dict[str, Steps] = {}
    for row in _rows(record):
        lacks = [] if row["per sample"] == "yes" else [row["per sample"]]
        share = math.floor(1e3 * row["covered"]) / 10  # 99.93 % are not all
        lacks += [f"{share:g}% of parameters"] if row["covered"] < 1 else []
        each = found.setdefault(row["contestant"], Steps(row["contestant"], ", ".join(lacks)))
        each.time[row["threads"]] = row["ratio"]
        if row.get("memory") is not None:
            each.memory[row["threads"]] = row["memory"]
    return sorted(found.values(), key=first)


def first(each: Steps) -> float:
    """The ratio of the fewest threads."""
    return each.time[min(each.time)].ratio


def _rows(record: Record) -> Rows:
    if not record.tables.get(STEP):
        raise ValueError(f"{record.path} has no table '{STEP}', which the figure is drawn from")
    rows = (row for row in record.tables[STEP] if not row["contestant"].startswith("plain"))
    return [row for row in rows if row.get("ratio") is not None]


def signature(record: Record) -> str:
    """The record's name and a hash of what is drawn of it, which the figure carries."""
    text = json.dumps([_rows(record), _small_print(record)], sort_keys=True, default=vars)
    return f"{record.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def draw(record: Record) -> "Figure":
    """The figure; its axes are labelled ``time`` and ``memory``."""
    from matplotlib.figure import Figure

    each = steps(record)
    figure = Figure(figsize=INCHES, facecolor=PAPER, layout="constrained")
    axes = figure.subplot_mosaic([["time", "memory"]], width_ratios=(3, 2))
    for label, ax in axes.items():
        ax.set(label=label, facecolor=PAPER)
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
        _bars(ax, each)
    words = [f"{one.name}, {one.lacks}" if one.lacks else one.name for one in each]
    axes["time"].set_yticks(range(len(each)), words, color=INK)
    threads = sorted({n for one in each for n in one.time})
    paler = f", {threads[1]} (paler)" if len(threads) > 1 else ""
    axes["time"].set_title(f"time / plain, threads: {threads[0]}{paler}")
    axes["memory"].set_title("peak memory / plain")
    figure.suptitle(headline(each), x=0.01, ha="left", fontsize=9, weight="bold")
    figure.supxlabel("\n".join(_small_print(record)), x=0.01, ha="left", fontsize=7, color=FAINT)
    return figure


def _bars(ax: "Axes", each: list[Steps]) -> None:
    """From plain's 1, one for each number of threads, hatched if norms are missing."""
    ends = [1.2]
    for y, one in enumerate(each):
        values: dict[int, Any] = getattr(one, str(ax.get_label()))
        color = OURS_COLOR if one.name == OURS else COLOR
        for k, (threads, value) in enumerate(sorted(values.items())):
            lower, middle, upper = _spread(value)
            place = y + (k - (len(values) - 1) / 2) * 0.4
            fill: dict[str, Any] = {"color": color, "alpha": 0.55 if k else 1}
            if one.lacks:
                fill = {"fc": "none", "ec": color, "hatch": "/////", "lw": 0}
            bar = ax.barh(place, middle - 1, 0.34, left=1, zorder=3, **fill)
            bar.set_label(f"{one.name}, {threads}")
            ax.plot([lower, upper], [place, place], color=INK, lw=0.9, zorder=4)
            weight = "bold" if one.name == OURS else "normal"
            style: dict[str, Any] = {"va": "center_baseline", "textcoords": "offset points"}
            ax.annotate(f"{middle:.2f}", (max(upper, 1), place), (3, 0), weight=weight, **style)
            ends += [lower, upper]
    ax.set(xscale="log", xlim=(0.97 * min(1, *ends), max(ends) ** 1.2), yticks=[])
    ax.set_ylim(len(each) - 0.5, -0.5)
    ax.axvline(1, color=FAINT, lw=1, zorder=2)
    ax.set_xticks([1], ["1"])
    ax.set_xticks([], minor=True)


def _spread(value: Timing | float) -> tuple[float, float, float]:
    """Quartiles and median; a number without them is all three."""
    return (value.lower, value.ratio, value.upper) if isinstance(value, Timing) else (value,) * 3


def headline(each: list[Steps]) -> str:
    """What the first panel shows, over all numbers of threads."""
    ours = next((one for one in each if one.name == OURS), None)
    if ours is None or not ours.time:
        return "A whole training step"
    ratios = [f"{timing.ratio:.2f}" for timing in ours.time.values()]
    time = " to ".join(dict.fromkeys((min(ratios), max(ratios))))
    memory = f", {next(iter(ours.memory.values())):.2f} x its memory" if ours.memory else ""
    return f"A training step with {OURS}: {time} x plain's time{memory}"


def _small_print(record: Record) -> list[str]:
    about = record.machine
    where = [f"{about[k]}" for k in ("gpu", "processor") if k in about][:1]
    where += [f"{about['cores']} cores", f"torch {about['torch']}", f"commit {about['commit']}"]
    return [
        "Medians of ratios to plain torch in the same interleaved rounds; lines: quartiles. "
        "Hatched: norms not of every sample, or not of all parameters.",
        f"Record {record.name}: {', '.join(where)}.",
    ]


def svg(record: Record) -> str:
    """As SVG, the same text for the same record: no date, no random names. Dark on dark pages."""
    import matplotlib

    metadata = {"Date": None, "Creator": None, "Title": "Cost beside plain torch"}
    metadata["Identifier"] = signature(record)
    with matplotlib.rc_context(), io.StringIO() as file:
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(STYLE)
        draw(record).savefig(file, format="svg", metadata=metadata)
        text = file.getvalue()
    dark = "".join(
        f"[style*='{kind}: {light}']{{{kind}:{shade}!important}}"
        for light, shade in DARK.items()
        for kind in ("fill", "stroke")
    )
    css = f"text{{font-family:{FONTS}!important}}@media(prefers-color-scheme:dark){{{dark}}}"
    return text.replace("<defs>", f"<style>{css}</style>\n<defs>", 1)


def write(record: Record) -> Path:
    """Beside the record."""
    path = record.path.with_suffix(".svg")
    path.write_text(svg(record), encoding="utf-8")
    return path


def signature_of(path: Path) -> str:
    """The ``signature`` when this figure was drawn."""
    found = re.search(r"<dc:identifier>(.*?)</dc:identifier>", path.read_text(encoding="utf-8"))
    return found.group(1) if found else ""
