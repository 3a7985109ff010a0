# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file about one or more runs: what ``templates/report.html`` shows."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from plotly.offline import get_plotlyjs
from typer import Argument

import gnsfast
from gnsfast.cli.figures import View, all_figures
from gnsfast.cli.runs import Run
from gnsfast.cli.words import factors_in, page
from gnsfast.counts import three_digits
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.noise_scale import METRICS, OTHERS, OVER


@dataclass(frozen=True)
class Options:
    """Which runs a page shows, and when it is written.

    Args:
        runs: Run folders with .jsonl files, or such files.
        out: The page (RUN/report.html, or report.html for many runs).
        live: Rewrite it until all runs end.
        every: Seconds between two reads.
    """

    runs: Annotated[list[Path], Argument] = field(metadata={"metavar": "RUN..."})
    out: Path | None = None
    live: bool = False
    every: float = field(default=5.0, metadata={"min": 0.5})


def default_page(paths: list[Path]) -> Path:
    """Beside the run; for several runs in the working directory."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0].with_suffix(".html") if paths[0].is_file() else paths[0] / "report.html"


def write_report(runs: list[Run], path: Path, live: dict[str, float] | None = None) -> Path:
    """Replace ``path`` at once, so that nobody reads half a page.

    Args:
        live: the seconds until an open page reloads itself, ``refresh``, and until it says that its
            writer has stopped, ``stale``.
    """
    view, now = View(runs), time.time()
    figures = all_figures(view)
    names = {"euclidean": "noise scale"} | OTHERS
    headers = {run.name: run.header for run in runs if run.header}
    points = [p for run in runs for p in run.points]
    factors = [(run, each, factors_in(each)) for run in runs for each in run.critical]
    text: str = page("report.html").render(
        view=view,
        live=live and {"written": 1000 * now, **live},
        clock=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)),
        others=OTHERS,
        names=names,
        keys=SCALES,
        present=PRESENT,
        most=OVER,
        units=dict.fromkeys(str(r.header["loss_unit"]) for r in runs if "loss_unit" in r.header),
        logged={name for p in points for name in p.values},
        factors=factors,
        metrics={m: names[m] for m in METRICS if any(m in found for _, _, found in factors)},
        three_digits=three_digits,
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
