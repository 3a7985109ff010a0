# SPDX-License-Identifier: Apache-2.0
"""Dated records in ``benchmarks/results/``: what ran where, as JSON for programs and Markdown for
people.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, versions and commit of this run."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(_gpu() if torch.cuda.is_available() else {}),
        "commit": _line("git", "describe", "--always", "--dirty", "--abbrev=10") or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def _gpu() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _line(*query) or "unknown",
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
    }


def _line(*command: str) -> str:
    """The first line that a program prints; empty where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent)
    return done.stdout.strip().partition("\n")[0]


def write(name: str, command: str, tables: dict[str, list[dict[str, Any]]], folder: Path) -> Path:
    """Write ``<date>-<name>.json`` and ``.md``; returns the Markdown file's path."""
    about = machine()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{about['date']}-{name}"
    data = {"command": command, "machine": about, "tables": tables}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# {stem.name}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", *markdown(rows)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return stem.with_suffix(".md")


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table of the rows' shared columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(str(row.get(c, "-")) for c in columns) + " |" for row in rows]
    return lines
