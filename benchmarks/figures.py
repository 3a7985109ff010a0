# SPDX-License-Identifier: Apache-2.0
"""The README's figure, drawn from a record alone: whole steps and their memory, overhead against T,
cost against B.
"""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Timing
from benchmarks.record import Record, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
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
WIDTH, TOP, BOTTOM, ROW = 830, 46, 66, 27
"""Pixels: a README's text on GitHub, above the axes, below them, a contestant's row."""
TICKS = (0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100)


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
    return signed(record, drawn)


def signed(record: Record, drawn: Any) -> str:
    """The record's name and a hash of what is drawn of it."""
    text = json.dumps(drawn, sort_keys=True, default=vars)
    return f"{record.name} sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def draw(record: Record) -> "Figure":
    """The figure; its axes are labelled ``time``, ``memory``, ``T`` and ``B``."""
    import matplotlib
    from matplotlib.figure import Figure

    each = steps(record)
    for title in (OVER_T, OVER_B):
        missing = dict.fromkeys(row["contestant"] for row in _rows(record, title))
        each += [Steps(name, "no whole step") for name in missing if name not in _names(each)]
    peers = iter(range(len(each)))
    looks = {one.name: OURS_LOOK if one.name == OURS else _look(next(peers)) for one in each}
    height = TOP + ROW * max(len(each), 7) + BOTTOM
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 1.2}):
        figure = Figure(figsize=(WIDTH / 96, height / 96), dpi=96, facecolor=PAPER)

        def axes(label: str, left: int, right: int) -> "Axes":
            inner = 1 - (TOP + BOTTOM) / height
            place = left / WIDTH, BOTTOM / height, (right - left) / WIDTH, inner
            ax: Axes = figure.add_axes(place, label=label, facecolor=PAPER)
            ax.tick_params(which="both", length=0, labelcolor=FAINT, labelsize=7.5)
            ax.spines[:].set_visible(False)
            return ax

        time, memory = axes("time", 152, 320), axes("memory", 346, 434)
        for y, one in enumerate(each):
            _bars(time, y, one, one.time, looks[one.name])
            _bars(memory, y, one, one.memory, looks[one.name])
            _name(time, y, one, looks[one.name])
        threads = sorted({n for one in each for n in one.time})
        paler = f", {threads[1]} (paler)" if len(threads) > 1 else ""
        _frame(time, each)
        _frame(memory, each)
        _title(figure, 8, headline(each))
        _title(figure, 152, f"time / plain, threads: {threads[0]}{paler}", small=True)
        _title(figure, 346, "peak memory / plain", small=True)
        for label, title, left, right in (("T", OVER_T, 484, 640), ("B", OVER_B, 688, 820)):
            found = curves(record, title, label)
            _lines(axes(label, left, right), found, looks, label)
            _title(figure, left - 24, _range_of(found, label))
            _title(figure, left - 24, _case(record, title), small=True)
        for y, text in zip((22, 8), _small_print(record)):
            figure.text(8 / WIDTH, y / height, text, color=FAINT, fontsize=7.2)
    return figure


def _names(each: list[Steps]) -> set[str]:
    return {one.name for one in each}


def _look(peer: int) -> dict[str, Any]:
    style = {"color": COLORS[peer % len(COLORS)], "marker": MARKERS[peer % len(MARKERS)]}
    return style | {"lw": 1.1, "ms": 3.4, "zorder": 3}


def _bars(ax: "Axes", y: int, one: Steps, values: dict[int, Any], look: dict[str, Any]) -> None:
    """Bars from plain's 1, one for each number of threads, hatched if norms are missing."""
    for k, threads in enumerate(sorted(values)):
        value = values[threads]
        middle = value.ratio if isinstance(value, Timing) else value
        place = y + (k - (len(values) - 1) / 2) * 0.4
        fill: dict[str, Any] = {"color": look["color"], "alpha": 0.55 if k else 1}
        if one.lacks:
            fill = {"fc": "none", "ec": look["color"], "hatch": "/////", "lw": 0}
        bar = ax.barh(place, middle - 1, 0.34, left=1, zorder=3, **fill)
        bar.set_label(f"{one.name}, {threads}")
        end = max(middle, 1)
        if isinstance(value, Timing):
            ax.plot([value.lower, value.upper], [place, place], color=INK, lw=0.9, zorder=4)
            end = max(value.upper, 1)
        weight = "bold" if one.name == OURS else "normal"
        style: dict[str, Any] = {"color": INK, "fontsize": 7.5, "weight": weight}
        style |= {"va": "center_baseline", "textcoords": "offset pixels"}
        ax.annotate(f"{middle:.2f}", (end, place), (4, 0), **style)


def _name(ax: "Axes", y: int, one: Steps, look: dict[str, Any]) -> None:
    """The legend: a name at the left of the figure, with its curves' line and marker."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import blended_transform_factory

    figure = ax.figure
    across = blended_transform_factory(figure.transFigure, ax.transData)
    ends = [8 / WIDTH, 15 / WIDTH, 22 / WIDTH]
    figure.add_artist(Line2D(ends, [y] * 3, transform=across, markevery=[1], **look))
    style: dict[str, Any] = {"transform": across, "va": "center_baseline"}
    weight = "bold" if one.name == OURS else "normal"
    name, _, rest = one.name.partition(", ")
    small = ", ".join(filter(None, (rest, one.lacks)))
    up = y - 0.2 if small else y
    figure.text(29 / WIDTH, up, name, color=INK, fontsize=8, weight=weight, **style)
    figure.text(29 / WIDTH, y + 0.22, small, color=FAINT, fontsize=6.8, **style)


def _frame(ax: "Axes", each: list[Steps]) -> None:
    """A logarithmic axis from the least to the largest, with room for the numbers."""
    values = [v for one in each for v in getattr(one, str(ax.get_label())).values()]
    ends = [1.0, *_ends(values)]
    low, high = math.log(min(ends)), math.log(max(max(ends), 1.2))
    ax.set_xscale("log")
    ax.set_xlim(math.exp(1.1 * low), math.exp(high + 0.28 * (high - low)))
    _ticks(ax.xaxis, ax.bbox.width)
    ax.set_ylim(len(each) - 0.5, -0.5)
    ax.set_yticks([])
    ax.axvline(1, color=FAINT, linewidth=1, zorder=2, clip_on=False)


def _ends(values: Iterable[Timing | float]) -> list[float]:
    """The quartiles of ratios, or numbers without them."""
    pairs = ((v.lower, v.upper) if isinstance(v, Timing) else (v,) for v in values)
    return [end for pair in pairs for end in pair]


def _lines(
    ax: "Axes", found: dict[str, list[tuple[int, Timing]]], looks: dict[str, Any], over: str
) -> None:
    """Medians with quartiles. The axis is stretched around 1: half of it lies below 1.5."""
    ends = _ends(t for points in found.values() for _, t in points)
    low, high = _stretch(min(1.0, *ends)), _stretch(max(1.2, *ends))
    limits = _unstretch(low - 0.1), _unstretch(high + 0.1)
    ax.set_ylim(limits)
    ax.set_yscale("function", functions=(_stretch, _unstretch))
    ax.set_xscale("log", base=2)
    for name, points in found.items():
        x, middle = [p[0] for p in points], [p[1].ratio for p in points]
        down = [t.ratio - t.lower for _, t in points]
        up = [t.upper - t.ratio for _, t in points]
        ax.errorbar(x, middle, (down, up), elinewidth=0.8, label=name, **looks[name])
    ax.set_ylim(limits)
    places = sorted({p[0] for points in found.values() for p in points})
    shown = places[:: math.ceil(len(places) / 6)]
    ax.set_xticks(shown, [_power(x) for x in shown])
    ax.set_xticks([], minor=True)
    _ticks(ax.yaxis, ax.bbox.height)
    ax.grid(color=GRID, linewidth=0.7)
    ax.axhline(1, color=FAINT, linewidth=1, zorder=2)
    label = {"T": "T, tokens of a sample", "B": "B, samples"}[over]
    ax.set_xlabel(label, color=FAINT, fontsize=7.5)


def _stretch(ratio: Any) -> Any:
    import numpy as np

    above_0 = np.maximum(ratio, 0.01)  # matplotlib asks for 0 where it lays out labels
    return np.arcsinh(np.log(above_0) / 0.1)


def _unstretch(place: Any) -> Any:
    import numpy as np

    return np.exp(0.1 * np.sinh(place))


def _ticks(axis: "Axis", pixels: float) -> None:
    """Those of ``TICKS`` that are 16 pixels or more from the ones before; 1 is always there."""
    transform, (low, high) = axis.get_transform(), sorted(axis.get_view_interval())
    place = {t: float(transform.transform(t)) for t in (*TICKS, low, high)}
    near = 16 / pixels * (place[high] - place[low])
    ticks: list[float] = []
    for t in sorted(TICKS, key=lambda t: (t != 1, TICKS.index(t))):
        if low <= t <= high and all(abs(place[t] - place[other]) >= near for other in ticks):
            ticks.append(t)
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)


def _power(x: int) -> str:
    return f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else str(x)


def _title(figure: "Figure", x: int, text: str, small: bool = False) -> None:
    style: dict[str, Any] = {"color": INK, "fontsize": 9, "weight": "bold"}
    if small:
        style = {"color": FAINT, "fontsize": 7.5}
    figure.text(x / WIDTH, 1 - (34 if small else 16) / figure.bbox.height, text, **style)


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
        f"Record {record.name}: {', '.join(where)}. The curves' axes are stretched about 1.",
    ]


def svg(record: Record) -> str:
    """The same text for the same record."""
    return rendered(lambda: draw(record), "Cost beside plain torch", signature(record))


def rendered(draw: "Callable[[], Figure]", title: str, identifier: str) -> str:
    """A figure as SVG: no date, no random names. Dark on dark pages."""
    import matplotlib

    metadata = {"Date": None, "Creator": None, "Title": title, "Identifier": identifier}
    with matplotlib.rc_context(), io.StringIO() as file:
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update({"svg.hashsalt": OURS, "svg.fonttype": "none"})
        draw().savefig(file, format="svg", metadata=metadata)
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
