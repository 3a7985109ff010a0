# SPDX-License-Identifier: Apache-2.0
"""Dated records in ``benchmarks/results/``: what ran where, as JSON for programs and Markdown for
people. A cell is a word, a number, None or a ``Timing``. ``Growing`` tables keep what is finished.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.measure import Timing
from gnsfast.ops import backends, cpu

RESULTS = Path(__file__).parent / "results"
PEERS = {"opacus", "backpack-for-pytorch"}
"""Measured beside gnsfast where they are installed."""
LOAD = os.getloadavg()[0]
"""Of the minute before the measurements, which add to it themselves."""
WRITTEN = re.compile(r"(\d+(?:\.\d+)?) \((\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)\)")
"""A ratio with its interval as older records hold it, a string."""

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]
Case = TypeVar("Case")

FAILED = "Failed"
"""The table of what raised."""
INTERLEAVED = "; ratios: median (quartiles) of interleaved rounds"
"""What ``show`` adds to a title."""


@dataclass(frozen=True)
class Record:
    """A record as it was read; its ratios are ``Timing``s again."""

    path: Path
    command: str
    machine: dict[str, Any]
    tables: Tables

    @property
    def name(self) -> str:
        return self.path.stem


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, help="folder for the record, else only printed")


def machine() -> dict[str, Any]:
    """Processor, cores, load, versions and commit of this run."""
    known: dict[str, str] = {}  # of the last core
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        known = {key.strip(): value.strip() for key, _, value in lines}
    flags = known.get("flags", "").split()
    return {
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "instruction sets": ", ".join(name for name in SETS if name in flags) or "unknown",
        "torch's products": products(torch.__config__.show()),
        "cores": os.cpu_count(),
        "load at start": round(LOAD, 2),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{d.name: d.version for d in importlib.metadata.distributions() if d.name in PEERS},
        "CPU kernel": _cpu_kernel(),
        **(_gpu() if torch.cuda.is_available() else {}),
        "commit": os.environ.get("GNSFAST_COMMIT")  # where a checkout travels without its history
        or _line("git", "describe", "--always", "--dirty", "--abbrev=10")
        or "unknown",
        "date": datetime.date.today().isoformat(),
    }


SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")
"""What products use of a processor, as Linux writes it."""


def products(config: str) -> str:
    """The libraries of torch's matrix products, from what it says of its build."""
    found = [
        f"{name} {version[1]}"
        for name, words in (
            ("MKL", r"Math Kernel Library Version ([\d.]+)"),
            ("oneDNN", r"DNN v([\d.]+)"),
        )
        if (version := re.search(words, config))
    ]
    blas = re.search(r"BLAS_INFO=(\w+)", config)
    return ", ".join([*found, *([f"BLAS is {blas[1]}"] if blas else [])]) or "unknown"


def _cpu_kernel() -> str:
    if backends.backend("cpu") == "reference":
        return "none"
    return ", ".join(filter(None, (cpu.instructions(), cpu.for_bfloat16())))


def _gpu() -> dict[str, Any]:
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem"
    line = _line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader") or "unknown"
    driver, _, clocks = line.partition(", ")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "clocks: SM, SM at most, memory": clocks or "unknown",
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
    }


@functools.cache
def _line(*command: str) -> str:
    """The first line that a program prints; empty if it is missing or fails. Cached: a growing
    record is written after each case.
    """
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent)
    return done.stdout.strip().partition("\n")[0]


def write(name: str, command: str, tables: Tables, folder: Path) -> Path:
    """Write ``<date>-<name>.json`` and ``.md``, each whole or not at all; returns the Markdown
    file's path.
    """
    about = machine()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{about['date']}-{name}"
    data = {"command": command, "machine": about, "tables": tables}
    _replace(stem.with_suffix(".json"), json.dumps(data, indent=1, default=_numbers) + "\n")
    lines = [f"# {stem.name}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", *markdown(rows)]
    return _replace(stem.with_suffix(".md"), "\n".join(lines) + "\n")


def show(tables: Tables, about: str = "") -> None:
    """Print all tables; ``about`` follows their titles."""
    for title, rows in tables.items():
        print(f"\n{title}{about}\n\n" + "\n".join(markdown(rows)), flush=True)


def publish(name: str, command: str, tables: Tables, folder: Path | None, about: str = "") -> None:
    """Print all tables, and write them as a record if there is a ``folder`` for it."""
    show(tables, about)
    if folder:
        print(f"\nwritten: {write(name, command, tables, folder)}")


def _replace(path: Path, text: str) -> Path:
    """Write at once: readers find the old text or the new one, also after a kill."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    return partial.replace(path)


def write_unfinished(name: str, command: str, tables: Tables, folder: Path) -> Path:
    """Write a record that still grows under another name: it replaces no whole one."""
    return write(f"{name}-unfinished", command, tables, folder)


def write_whole(name: str, command: str, tables: Tables, folder: Path) -> Path:
    """Replace the unfinished record; the GPU's clocks are those at the end."""
    _line.cache_clear()
    written = write(name, command, tables, folder)
    for unfinished in folder.glob(f"????-??-??-{name}-unfinished.*"):
        unfinished.unlink()
    return written


def read(path: Path) -> Record:
    """A record from the JSON of any version; ValueError if it is not a record."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tables = {
            title: [{key: _cell(value) for key, value in row.items()} for row in rows]
            for title, rows in data["tables"].items()
        }
        return Record(path, data["command"], dict(data["machine"]), tables)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record: JSON with a command, a machine and tables of rows"
        ) from error


def newest(name: str, folder: Path = RESULTS) -> Record | None:
    """The last dated record of this name."""
    paths = folder.glob(f"????-??-??-{name}.json")
    return max(map(read, paths), key=lambda each: each.name, default=None)


def _numbers(value: object) -> dict[str, float]:
    if isinstance(value, Timing):
        return asdict(value)
    raise TypeError(f"a record cannot hold {value!r}: words, numbers, None and Timings only")


def _cell(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {each.name for each in fields(Timing)}:
        return Timing(**value)
    if isinstance(value, str) and (written := WRITTEN.fullmatch(value)):
        return Timing(math.nan, *map(float, written.groups()))
    return value


def markdown(rows: Rows) -> list[str]:
    """A Markdown table of the rows' shared columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    return lines + ["| " + " | ".join(shown(row.get(c)) for c in columns) + " |" for row in rows]


def shown(value: Any) -> str:
    """A cell for people: four digits of a number."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value)


class Growing:
    """The tables so far: a run that is killed keeps every case that it finished, and a case that
    fails does not cost the others.
    """

    def __init__(self) -> None:
        self.tables: Tables = {}

    def over(
        self, title: str, cases: Iterable[Case], rows_of: Callable[[Case], Rows]
    ) -> Iterator[Tables]:
        """Each case's rows under ``title``; all tables after each case."""
        for case in cases:
            try:
                table, rows = title, rows_of(case)
            except (Exception, SystemExit) as error:  # a failed gate exits
                table, rows = FAILED, [failure(f"{title}: {getattr(case, 'name', case)}", error)]
            self.tables.setdefault(table, []).extend(rows)
            yield self.tables


def failure(what: str, error: BaseException) -> dict[str, Any]:
    """A row that makes the run exit with 1; the traceback is printed."""
    traceback.print_exception(error)
    return {"check": what, "exit status": 1, "result": raised(error)}


def raised(error: BaseException) -> str:
    return f"raises {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
