# SPDX-License-Identifier: Apache-2.0
"""The README's figure, drawn from a record alone: whole steps and their memory, overhead against T,
cost against B.
"""

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

STEP, OVER_T, OVER_B = "Whole training step", "Overhead against T", "Cost against B"
OURS = "gnsfast"
OURS_LOOK = {"color": "#d55e00", "marker": "o", "lw": 2.6, "ms": 5, "zorder": 5}
COLORS = ("#1a80bb", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8a8f94")
"""Okabe and Ito's, as in the report of a run."""
MARKERS = "sD^vPXo<"
INK, FAINT, GRID, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
DARK = {INK: "#f0f6fc", FAINT: "#9198a1", GRID: "#3d444d", PAPER: "#0d1117"}
"""The same where the page is dark."""
FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
INCHES = 8.65, 4
"""As wide as a README's text on GitHub."""
TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
STYLE = {
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "grid.color": GRID,
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
    for row in _rows(record, STEP):
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


def curves(record: Record, title: str, over: str) -> dict[str, list[tuple[int, Timing]]]:
    """Each contestant's ratios over T or B, of the layer and threads of the table's first row."""
    found: dict[str, list[tuple[int, Timing]]] = {}
    rows = _rows(record, title)
    fixed = ("layer", "threads") if over == "T" else ("layer", "threads", "T")
    for row in rows:
        if all(row[key] == rows[0][key] for key in fixed):
            found.setdefault(row["contestant"], []).append((row[over], row["ratio"]))
    return {name: sorted(points, key=lambda p: p[0]) for name, points in found.items()}


def _rows(record: Record, title: str) -> Rows:
    if not record.tables.get(title):
        raise ValueError(f"{record.path} has no table '{title}', which the figure is drawn from")
    rows = (row for row in record.tables[title] if not row["contestant"].startswith("plain"))
    return [row for row in rows if row.get("ratio") is not None]


def signature(record: Record) -> str:
    """The record's name and a hash of what is drawn of it, which the figure carries."""
    drawn = [_rows(record, title) for title in (STEP, OVER_T, OVER_B)], _small_print(record)
    text = json.dumps(drawn, sort_keys=True, default=vars)
    return f"{record.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def draw(record: Record) -> "Figure":
    """The figure; its axes are labelled ``time``, ``memory``, ``T`` and ``B``."""
    from matplotlib.figure import Figure

    each = steps(record)
    named = {row["contestant"]: "" for title in (OVER_T, OVER_B) for row in _rows(record, title)}
    each += [Steps(name, "no whole step") for name in named if name not in {o.name for o in each}]
    peers = iter(range(len(each)))
    looks = {one.name: OURS_LOOK if one.name == OURS else _look(next(peers)) for one in each}
    figure = Figure(figsize=INCHES, facecolor=PAPER, layout="constrained")
    axes = figure.subplot_mosaic([["time", "memory", "T", "B"]], width_ratios=(5, 3, 5, 5))
    for label, ax in axes.items():
        ax.set(label=label, facecolor=PAPER)
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
    for label in ("time", "memory"):
        _steps(axes[label], each, looks)
    beside: dict[str, Any] = {"transform": axes["time"].get_yaxis_transform(), "clip_on": False}
    for y, one in enumerate(each):  # the legend: a name with its curves' line and marker
        axes["time"].plot(
            [-0.12, -0.07, -0.02], [y] * 3, markevery=[1], **beside, **looks[one.name]
        )
    words = [f"{one.name}\n{one.lacks}".strip() for one in each]
    axes["time"].set_yticks(range(len(each)), words, color=INK)
    axes["time"].tick_params("y", pad=22)
    threads = sorted({n for one in each for n in one.time})
    paler = f", {threads[1]} (paler)" if len(threads) > 1 else ""
    axes["time"].set_title(f"time / plain\nthreads: {threads[0]}{paler}")
    axes["memory"].set_title("peak memory\n/ plain")
    for label, title in (("T", OVER_T), ("B", OVER_B)):
        found = curves(record, title, label)
        _lines(axes[label], found, looks)
        axes[label].set_title(f"{_range_of(found, label)}\n{_case(record, title)}")
        axes[label].set_xlabel({"T": "T, tokens of a sample", "B": "B, samples"}[label])
    figure.suptitle(headline(each), x=0.01, ha="left", fontsize=9, weight="bold")
    figure.supxlabel("\n".join(_small_print(record)), x=0.01, ha="left", fontsize=7, color=FAINT)
    return figure


def _look(peer: int) -> dict[str, Any]:
    style = {"color": COLORS[peer % len(COLORS)], "marker": MARKERS[peer % len(MARKERS)]}
    return style | {"lw": 1.1, "ms": 3.4, "zorder": 3}


def _steps(ax: "Axes", each: list[Steps], looks: dict[str, Any]) -> None:
    """Bars from plain's 1, one for each number of threads, hatched if norms are missing."""
    ends = [1.2]
    for y, one in enumerate(each):
        values: dict[int, Any] = getattr(one, str(ax.get_label()))
        color = looks[one.name]["color"]
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
    ax.set(xscale="log", xlim=(0.97 * min(1, *ends), max(ends) ** 1.3), yticks=[])
    ax.set_ylim(len(each) - 0.5, -0.5)
    ax.axvline(1, color=FAINT, lw=1, zorder=2)
    ax.set_xticks([1], ["1"])
    ax.set_xticks([], minor=True)


def _spread(value: Timing | float) -> tuple[float, float, float]:
    """Quartiles and median; a number without them is all three."""
    return (value.lower, value.ratio, value.upper) if isinstance(value, Timing) else (value,) * 3


def _lines(ax: "Axes", found: dict[str, list[tuple[int, Timing]]], looks: dict[str, Any]) -> None:
    """Medians with quartiles."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for name, points in found.items():
        x, middle = [p[0] for p in points], [p[1].ratio for p in points]
        down = [t.ratio - t.lower for _, t in points]
        up = [t.upper - t.ratio for _, t in points]
        ax.errorbar(x, middle, (down, up), elinewidth=0.8, label=name, **looks[name])
    places = sorted({p[0] for points in found.values() for p in points})
    shown = places[:: math.ceil(len(places) / 6)]
    ax.set_xticks(shown, [_power(x) for x in shown])
    ax.set_xticks([], minor=True)
    low, high = ax.get_ylim()
    ticks = [t for t in TICKS if low <= t <= high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_yticks([], minor=True)
    ax.grid(linewidth=0.7)
    ax.axhline(1, color=FAINT, lw=1, zorder=2)


def _power(x: int) -> str:
    return f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else str(x)


def headline(each: list[Steps]) -> str:
    """What the first panel shows, over all numbers of threads."""
    ours = next((one for one in each if one.name == OURS), None)
    if ours is None or not ours.time:
        return "A whole training step"
    ratios = [f"{timing.ratio:.2f}" for timing in ours.time.values()]
    time = " to ".join(dict.fromkeys((min(ratios), max(ratios))))
    memory = f", {next(iter(ours.memory.values())):.2f} x its memory" if ours.memory else ""
    return f"A training step with {OURS}: {time} x plain's time{memory}"


def _range_of(found: dict[str, list[tuple[int, Timing]]], over: str) -> str:
    ratios = [timing.ratio for _, timing in found.get(OURS, [])]
    return f"Any {over}: at most {max(ratios):.2f} x plain" if ratios else over


def _case(record: Record, title: str) -> str:
    """The layer and threads of the curves over T; of those over B what differs from these."""
    of_T, row = _rows(record, OVER_T)[0], _rows(record, title)[0]
    n = row["threads"]
    layer = f"{row['layer']}, {n} thread{'s' if n > 1 else ''}"
    if title == OVER_T:
        return layer
    same = all(of_T[key] == row[key] for key in ("layer", "threads"))
    return f"{'the same' if same else layer}, T = {row['T']}"


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
