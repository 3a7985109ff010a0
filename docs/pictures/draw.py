# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages, each for light and for dark pages.

PYTHONPATH=. python docs/pictures/draw.py

What is simulated is drawn from a fixed seed. What is measured comes from the
records in ``benchmarks/results``.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

import gnsfast

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
INK, FAINT = (
    {"light": "#1f2328", "dark": "#e6e9ee"},
    {"light": "#6a737d", "dark": "#9aa4b2"},
)
ORANGE, BLUE, GREEN, PINK = "#d55e00", "#2a8fc7", "#009e73", "#cc79a7"


def main() -> None:
    for name, draw in PICTURES.items():
        for scheme in ("light", "dark"):
            style = {
                "axes.edgecolor": FAINT[scheme],
                "axes.facecolor": "none",
                "axes.labelcolor": INK[scheme],
                "axes.spines.right": False,
                "axes.spines.top": False,
                "font.size": 10,
                "legend.frameon": False,
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "text.color": INK[scheme],
                "xtick.color": FAINT[scheme],
                "ytick.color": FAINT[scheme],
                "xtick.labelcolor": INK[scheme],
                "ytick.labelcolor": INK[scheme],
            }
            with matplotlib.rc_context(style):
                figure = draw(scheme)
                figure.savefig(
                    HERE / f"{name}-{scheme}.svg",
                    transparent=True,
                    metadata={"Date": None},
                )


def batches(scheme: str) -> Figure:
    """Batches' gradients around the true gradient; the noise scale is 64."""
    figure = Figure(figsize=(8, 2.7), layout="constrained")
    generator = torch.Generator().manual_seed(0)
    titles = {
        4: "batch far below it: 4",
        64: "batch equal to it: 64",
        1024: "far above it: 1,024",
    }
    for ax, (batch, title) in zip(
        figure.subplots(1, 3, sharex=True, sharey=True), titles.items()
    ):
        # tr Σ = 64 for |G|² = 1: a batch's mean has the variance 64 / batch, half
        # of it along each axis.
        spread = math.sqrt(64 / batch / 2)
        x, y = (
            torch.randn(60, 2, generator=generator) * spread
            + torch.tensor([1.0, 0.0])
        ).T
        for end in zip(x.tolist(), y.tolist()):
            ax.plot([0, end[0]], [0, end[1]], color=BLUE, alpha=0.25, lw=0.9)
        ax.scatter(x, y, s=9, color=BLUE, zorder=3)
        arrow = {
            "arrowstyle": "-|>",
            "color": ORANGE,
            "lw": 2.4,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate("", (1, 0), (0, 0), arrowprops=arrow, zorder=5)
        ax.set(
            title=title, xlim=(-3.4, 4.4), ylim=(-3.4, 3.4), xticks=[], yticks=[]
        )
        ax.set_aspect("equal")
        ax.spines[:].set_visible(False)
    return figure


def costs(scheme: str) -> Figure:
    """Steps and samples at a batch size: 1 + B_crit / B and 1 + B / B_crit."""
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    ax = figure.subplots()
    at = torch.logspace(-1.5, 1.5, 61)
    ax.plot(at, 1 + 1 / at, color=BLUE, lw=2.2)
    ax.plot(at, 1 + at, color=ORANGE, lw=2.2)
    ax.axvline(1, color=FAINT[scheme], lw=0.9, ls=":")
    ax.annotate(
        "steps / fewest steps",
        (0.06, 1 + 1 / 0.06),
        (10, 2),
        textcoords="offset points",
    )
    ax.annotate(
        "samples / fewest samples",
        (16, 17),
        (-10, 2),
        textcoords="offset points",
        ha="right",
    )
    ax.annotate("both twice the fewest", (1, 6), ha="center")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="batch size / critical batch size",
        ylim=(0.9, 35),
    )
    ax.set_xticks([1 / 16, 1 / 4, 1, 4, 16], ["1/16", "1/4", "1", "4", "16"])
    ax.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    ax.minorticks_off()
    return figure


def intervals(scheme: str) -> Figure:
    """What the estimator says after updates of 4 samples; the truth is 100."""
    torch.manual_seed(2)
    width, truth = 200, 100.0
    model = torch.nn.Linear(width, 1, bias=False)
    gns = gnsfast.GradientNoiseScale(model, window=512)
    mean = math.sqrt(
        width / truth / width
    )  # samples' gradients: N(mean, 1) in each coordinate
    at = (4, 8, 16, 32, 64, 128, 256, 512)
    found = {}
    for update in range(1, at[-1] + 1):
        with gns.update(4):
            model(torch.randn(4, width) + mean).mean().backward()
        model.zero_grad()
        if update in at:
            found[update] = gns.compute()
    figure = Figure(figsize=(6.4, 3.3), layout="constrained")
    ax = figure.subplots()
    ax.axhline(truth, color=FAINT[scheme], lw=1, ls="--")
    ax.annotate("truth", (640, truth), (4, -3), textcoords="offset points")
    for update, one in found.items():
        if one.resolved:
            ax.plot(
                [update] * 2,
                [one.lower, one.upper],
                color=BLUE,
                lw=2.2,
                solid_capstyle="butt",
            )
            ax.plot(update, one.noise_scale, "o", color=BLUE, ms=6)
        else:
            ax.annotate(
                "",
                (update, 1500),
                (update, max(one.lower, 10)),
                arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 1.8},
            )
            ax.plot(update, one.lower, "_", color=ORANGE, ms=12, mew=2.2)
    ax.set(
        xscale="log", yscale="log", xlabel="updates of 4 samples in the window"
    )
    ax.set(ylabel="noise scale, samples", xlim=(3.2, 640), ylim=(10, 1600))
    ax.set_xticks(at, [str(n) for n in at])
    ax.minorticks_off()
    _plain(ax, "y")
    return figure


def branches(scheme: str) -> Figure:
    """Losses of branches at one checkpoint, and the rule that reads them."""
    [*_, row] = _tables("2026-11-21-cpu-batch-size")["Losses of these branches"]
    losses = {
        float(k.split()[-1]): float(v)
        for k, v in row.items()
        if k.startswith("k = ")
    }
    figure = Figure(figsize=(6.4, 3.3), layout="constrained")
    ax = figure.subplots()
    lowest = math.inf
    for k, loss in losses.items():
        fine = loss <= lowest + 0.01
        lowest = min(lowest, loss)
        ax.plot(8 * k, loss, "o", ms=8, color=BLUE if fine else ORANGE)
    limit = lowest + 0.01
    ax.axhline(limit, color=FAINT[scheme], ls="--", lw=1)
    ax.annotate(
        "lowest loss + 0.01", (2, limit), (0, 4), textcoords="offset points"
    )
    ax.set(
        xscale="log", xlabel="batch size of the branch, samples", ylabel="loss"
    )
    ax.set_xticks([8 * k for k in losses], [f"{8 * k:g}" for k in losses])
    ax.minorticks_off()
    return figure


def geometries(scheme: str) -> Figure:
    """Noise scales in three norms beside the measured critical batch size."""
    found = next(iter(_tables("2026-11-23-cpu-geometry").values()))
    rows = [row for row in found if row["width"] == 32]
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    looks = {
        "euclidean": (BLUE, "o"),
        "sign": (GREEN, "s"),
        "spectral": (PINK, "D"),
    }
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for ax, name in zip(
        figure.subplots(1, len(optimizers), sharey=True), optimizers
    ):
        for x, row in enumerate(row for row in rows if row["optimizer"] == name):
            low, high = (float(v) for v in row["CBS"].split(" to "))
            ax.bar(
                x, min(high, 2e3) - low, 0.9, low, color=FAINT[scheme], alpha=0.3
            )
            for shift, (metric, (color, marker)) in zip(
                (-0.25, 0, 0.25), looks.items()
            ):
                value, lower, upper = map(
                    float, re.findall(r"[\d.]+", row[metric])
                )
                ax.plot([x + shift] * 2, [lower, upper], color=color, lw=1.6)
                ax.plot(x + shift, value, marker, color=color, ms=5)
        ax.set(yscale="log", ylim=(1, 700), title=name, xlabel="step")
        ax.set_xticks(range(3), ["200", "800", "2000"])
        ax.tick_params(axis="y", which="minor", length=0)
    figure.axes[0].set_ylabel("samples")
    _plain(figure.axes[0], "y")
    handles = [
        matplotlib.lines.Line2D(
            [], [], color=c, marker=m, label=f"{metric} noise scale"
        )
        for metric, (c, m) in looks.items()
    ]
    measured = matplotlib.patches.Patch(
        color=FAINT[scheme], alpha=0.3, label="measured critical batch size"
    )
    figure.legend(
        handles=[*handles, measured],
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    return figure


def step(scheme: str) -> Figure:
    """Time of a training step with norms over plain torch's."""
    rows = [
        row
        for row in _tables("2026-11-23-cpu-step")["Whole training step"]
        if row["threads"] == 1 and row["contestant"] != "plain"
    ]
    rows.sort(key=lambda row: -row["ratio"]["ratio"])
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    ax = figure.subplots()
    for y, row in enumerate(rows):
        ratio = row["ratio"]
        color = ORANGE if row["contestant"] == "gnsfast" else BLUE
        ax.barh(y, ratio["ratio"] - 1, 0.62, 1, color=color)
        ax.plot(
            [ratio["lower"], ratio["upper"]], [y, y], color=INK[scheme], lw=1.1
        )
        ax.annotate(
            f"{ratio['ratio']:.2f}",
            (max(ratio["upper"], 1), y),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set_yticks(range(len(rows)), [row["contestant"] for row in rows])
    ax.axvline(1, color=FAINT[scheme], lw=1)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set(
        xlabel="time of a step / time without norms, 1 thread", xlim=(0.95, 1.52)
    )
    return figure


def _plain(ax: Axes, axis: str) -> None:
    """Numbers such as 100 in place of powers of ten."""
    which = getattr(ax, f"{axis}axis")
    which.set_major_formatter(StrMethodFormatter("{x:g}"))
    which.set_minor_formatter(NullFormatter())


def _tables(name: str) -> dict[str, list[dict[str, Any]]]:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    tables: dict[str, list[dict[str, Any]]] = record["tables"]
    return tables


PICTURES: dict[str, Callable[[str], Figure]] = {
    each.__name__: each
    for each in (batches, costs, intervals, branches, geometries, step)
}

if __name__ == "__main__":
    main()
