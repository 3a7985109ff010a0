# SPDX-License-Identifier: Apache-2.0
"""A demo run from its first line to its report, whatever ends it."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from gnsfast.cli.panel import Lines, Panel
from gnsfast.cli.report import write_report
from gnsfast.cli.run import Check, Progress, Run


class Session:
    """Runs, shows and records; ``go`` returns the result also after Ctrl-C."""

    def __init__(self, run: Run, folder: Path, console: Console) -> None:
        self.run, self.folder, self.console = run, folder, console
        self.records: list[dict[str, Any]] = [run.header()]
        self.interrupted = False

    def go(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        view = (Panel if self.console.is_terminal else Lines)(self.run, self.console)
        last: Progress | None = None
        check: Check | None = None
        with open(self.folder / "metrics.jsonl", "w", buffering=1) as metrics:

            def keep(record: dict[str, Any]) -> None:
                self.records.append(record)
                metrics.write(json.dumps(record) + "\n")

            metrics.write(json.dumps(self.records[0]) + "\n")
            try:
                with view:
                    for last in self.run.train():
                        keep(last.record())
                        view.step(last)
                    check = self.run.check(view.checking)
                    keep(check.record())
                    view.checked(check)
            except KeyboardInterrupt:
                self.interrupted = True
                keep({"kind": "interrupted"})
        report = write_report(self.records, self.folder / "report.html")
        if self.interrupted:
            self.console.print("Interrupted.", highlight=False)
        self.console.print(f"Report: {report}\nMetrics: {self.folder / 'metrics.jsonl'}")
        return {
            **self.records[0],
            "kind": "result",
            "interrupted": self.interrupted,
            "last": last.record() if last else None,
            "check": check.record() if check else None,
            "report": str(report),
            "metrics": str(self.folder / "metrics.jsonl"),
        }
