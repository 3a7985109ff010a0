# SPDX-License-Identifier: Apache-2.0
"""A demo run from its first line to its report, however it ends."""

from pathlib import Path
from typing import Any

from rich.console import Console

from gnsfast.cli.panel import Lines, Panel
from gnsfast.cli.records import read_runs
from gnsfast.cli.report import write_report
from gnsfast.cli.run import Run
from gnsfast.integrations.trackers import JSONLTracker


class Session:
    """Runs, shows and records the demo; ``go`` returns the result, also after Ctrl-C."""

    def __init__(self, run: Run, folder: Path, console: Console) -> None:
        self.run, self.folder, self.console = run, folder, console
        self.interrupted = False

    def go(self) -> dict[str, Any]:
        view = (Panel if self.console.is_terminal else Lines)(self.run, self.console)
        log = self.folder / "metrics.jsonl"
        tracker = JSONLTracker(log, run=self.run.header())
        try:
            with view:
                for progress in self.run.train():
                    tracker.log(progress.metrics(), progress.step)
                    view.step(progress)
                check = self.run.check(view.checking)
                tracker.record(check.record())
                view.checked(check)
        except KeyboardInterrupt:
            self.interrupted = True
            tracker.record({"kind": "interrupted"})
        finally:
            tracker.close()
        [run] = read_runs([log])
        report = write_report([run], self.folder / "report.html")
        if self.interrupted:
            self.console.print("Interrupted.", highlight=False)
        self.console.print(f"Report: {report}\nMetrics: {log}")
        last = run.points[-1] if run.points else None
        return {
            **run.header,
            "kind": "result",
            "interrupted": self.interrupted,
            "last": {"step": last.step, **last.values} if last else None,
            "check": run.check,
            "report": str(report),
            "metrics": str(log),
        }
