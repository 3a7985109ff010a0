# SPDX-License-Identifier: Apache-2.0
"""A demo run from its first line to its report, however it ends."""

from pathlib import Path
from typing import Any

from rich.console import Console

from gnsfast.cli.panel import Lines, Panel
from gnsfast.cli.records import read_runs
from gnsfast.cli.report import write_report
from gnsfast.cli.run import Demo
from gnsfast.integrations.trackers import JSONLTracker


def run_demo(demo: Demo, folder: Path, console: Console) -> dict[str, Any]:
    """Train, show and record the demo; its result, also after Ctrl-C."""
    view = (Panel if console.is_terminal else Lines)(demo, console)
    log, interrupted = folder / "metrics.jsonl", False
    tracker = JSONLTracker(log, run=demo.header())
    try:
        with view:
            for progress in demo.train():
                tracker.log(progress.metrics(), progress.step)
                view.step(progress)
            check = demo.check(view.checking)
            tracker.record(check.record())
            view.checked(check)
    except KeyboardInterrupt:
        interrupted = True
        tracker.record({"kind": "interrupted"})
    finally:
        tracker.close()
    [run] = read_runs([log])
    report = write_report([run], folder / "report.html")
    if interrupted:
        console.print("Interrupted.", highlight=False)
    console.print(f"Report: {report}\nMetrics: {log}")
    last = run.end
    return {
        **run.header,
        "kind": "result",
        "interrupted": interrupted,
        "last": {"step": last.step, **last.values} if last else None,
        "check": run.check,
        "report": str(report),
        "metrics": str(log),
    }
