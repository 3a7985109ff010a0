# SPDX-License-Identifier: Apache-2.0
"""The logs of a run, one .jsonl file or all of a folder, also while they are written."""

import bisect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gnsfast.critical_batch.laws import JsonLines
from gnsfast.integrations.trackers import FORMAT
from gnsfast.interval import Interval

LAYERS = ("gns/layer/", "gns/layer_lo/", "gns/layer_hi/")
PREFIXES = ("gns/", "batch/", "cbs/")
NAMES = ("loss", "tokens", "seconds", "share")
DECIDED = ("tokens", "phase", "old", "new", "warning")
LAYER_LINES = 256
"""How many lines with layers are kept at most, evenly spread: enough columns for a screen."""


class RecordsError(ValueError):
    """A log cannot be read. The message is one line with the file and the line's number."""


class NothingYet(RecordsError):
    """Nothing was logged there yet, but a run may still begin."""


@dataclass
class Point:
    """The numbers of a step; None is NaN or infinite."""

    step: int
    values: dict[str, float | None]

    @property
    def tokens(self) -> float | None:
        return self.values.get("tokens")


class LayerLine(NamedTuple):
    """The noise scale of each module at a step, by path."""

    step: int
    tokens: float | None
    values: dict[str, float | None]


@dataclass(eq=False)
class Run:
    """What was read from one file, or from all files of a run."""

    name: str = ""
    path: Path = Path()
    header: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    layers: list[LayerLine] = field(default_factory=list)
    last_layers: dict[str, Interval] = field(default_factory=dict)
    """By path, of the last line that has layers."""
    decisions: list[dict[str, Any]] = field(default_factory=list)
    critical: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] | None = None
    state: str = "open"
    """Or ``"ended"`` or ``"interrupted"``, once a line says so."""
    notes: dict[str, None] = field(default_factory=dict)
    """What a reader of the report must know, in order."""


class LogFile:
    """One file: ``poll`` reads what was added since the last time."""

    def __init__(self, path: Path) -> None:
        self.lines = JsonLines(path, lambda number, what: RecordsError(f"{path}:{number}: {what}"))
        self._start()

    def _start(self) -> None:
        self.log, self._seen_layers, self._stride = Run(path=self.lines.path), 0, 1
        self._newest: dict[str, dict[str, float | None]] = {"value": {}, "lower": {}, "upper": {}}

    def poll(self) -> bool:
        """Read on; whether there was anything new."""
        before = self.lines.offset
        if self.lines.shrank():
            self._start()
            before = 0
        for number, record in self.lines.read():
            try:
                self._take(record)
            except (KeyError, TypeError) as error:
                raise self.lines.error(number, str(error.args[0])) from None
        return self.lines.offset != before

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("format", FORMAT) != FORMAT:
            raise TypeError(
                f"this line has format {record['format']!r}, but this version of gnsfast reads "
                f"format {FORMAT}"
            )
        if "kind" not in record:
            self._take_point(record)
            return
        log, kind = self.log, record["kind"]
        if kind == "run":
            log.header |= {k: v for k, v in record.items() if k not in ("kind", "format")}
            log.state = "open"
        elif kind == "decision":
            tokens = _number(record, "tokens", least=0)
            _number(record, "old", least=1), _number(record, "new", least=1)
            same = [record.get(name) for name in DECIDED]
            log.decisions = [
                d
                for d in log.decisions
                if d["tokens"] <= tokens and [d.get(name) for name in DECIDED] != same
            ]  # a restart repeats decisions
            log.decisions.append(record)
        elif kind == "critical batch":
            _number(record, "tokens", least=0), _number(record, "batch_size", least=1)
            log.critical.append(record)
        elif kind == "check":
            log.check = record
        elif kind == "interrupted":
            log.state = kind
        elif kind == "end":
            log.state = "interrupted" if log.state == "interrupted" else "ended"
        elif kind != "branch step":  # a measurement says how its branches ended
            name = self.lines.path.name
            log.notes[f"{name}: the report does not show lines of kind {kind!r}"] = None

    def _take_point(self, line: dict[str, Any]) -> None:
        if "step" not in line:
            raise KeyError("this line has neither a step nor a kind")
        step = _number(line, "step", least=0)
        if step != int(step):
            raise TypeError(f"step must be a whole number, not {step!r}")
        point = Point(int(step), {})
        for name in line:
            if name in NAMES or (name.startswith(PREFIXES) and not name.startswith(LAYERS)):
                point.values[sys.intern(name)] = _finite(line, name)
        if point.tokens is not None:
            _number(line, "tokens", least=0)
        points = self.log.points
        if points and point.step < points[-1].step:
            self._forget(point)
        if points and points[-1].step == point.step:
            points[-1].values |= point.values
        else:
            points.append(point)
        self._take_layers(line, point)
        self.log.state = "open"

    def _take_layers(self, line: dict[str, Any], point: Point) -> None:
        value, lower, upper = (
            {name[len(prefix) :]: _finite(line, name) for name in line if name.startswith(prefix)}
            for prefix in LAYERS
        )
        if not value and not lower:
            return
        self._newest = {"value": value, "lower": lower, "upper": upper}
        if self._seen_layers % self._stride == 0:
            kept = {sys.intern(path): value.get(path) for path in [*lower, *value]}
            self.log.layers.append(LayerLine(point.step, point.tokens, kept))
            if len(self.log.layers) > LAYER_LINES:
                self.log.layers = self.log.layers[::2]
                self._stride *= 2
        self._seen_layers += 1

    def last_layers(self) -> dict[str, Interval]:
        """By path, of the last line that has layers."""
        paths = dict.fromkeys([*self._newest["lower"], *self._newest["value"]])
        ends = ({end: found.get(p) for end, found in self._newest.items()} for p in paths)
        return dict(zip(paths, map(Interval.read, ends)))

    def _forget(self, restart: Point) -> None:
        """A restart went back to an earlier step: its own lines replace those from there on."""
        log = self.log
        first = bisect.bisect_left([p.step for p in log.points], restart.step)
        log.notes[
            f"{self.lines.path.name}: steps {log.points[first].step:,} to "
            f"{log.points[-1].step:,} were logged twice because of a restart; the report shows the "
            "later lines"
        ] = None
        del log.points[first:]
        log.layers = [line for line in log.layers if line.step < restart.step]
        if restart.tokens is not None:
            log.decisions = [d for d in log.decisions if d["tokens"] <= restart.tokens]


class Reader:
    """The files of a run: ``poll`` reads new lines, ``run`` puts the files together."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.suffix != ".jsonl":
            raise RecordsError(f"{path}: not a .jsonl file")
        self.path = path
        self.files: dict[Path, LogFile] = {}

    def poll(self) -> bool:
        """Read on; whether there was anything new."""
        if not self.path.exists():
            raise RecordsError(f"{self.path}: no such file or folder")
        paths = [self.path] if self.path.is_file() else sorted(self.path.glob("*.jsonl"))
        self.files = {p: self.files.get(p) or LogFile(p) for p in paths}
        return any([file.poll() for file in self.files.values()])

    def run(self) -> Run:
        """Everything that was read so far.

        Raises:
            NothingYet: if nothing was read.
            RecordsError: if two files contradict each other, because they belong to two runs.
        """
        if not self.files:
            raise NothingYet(f"{self.path}: this folder holds no .jsonl file")
        logs = [file.log for file in self.files.values()]
        run = Run(path=self.path)
        for log, file in zip(logs, self.files.values()):
            run.last_layers = file.last_layers() or run.last_layers
            run.header |= log.header
            run.decisions += log.decisions
            run.critical += log.critical
            run.layers += log.layers
            run.check = log.check or run.check
            run.state = log.state if log.state != "open" else run.state
            run.notes |= log.notes
        if not (run.header or run.decisions or run.critical or any(log.points for log in logs)):
            raise NothingYet(f"{self.path}: no line was logged yet")
        name = self.path.resolve().stem if self.path.is_file() else self.path.resolve().name
        run.name = str(run.header.get("name") or name)
        run.points = self._merged([log for log in logs if log.points])
        run.decisions.sort(key=lambda d: d["tokens"])
        run.critical.sort(key=lambda c: c["tokens"])
        run.layers.sort(key=lambda line: line.step)
        _add_notes(run)
        return run

    def _merged(self, logs: list[Run]) -> list[Point]:
        """Points of all files by step."""
        if len(logs) == 1:
            return logs[0].points
        by_step: dict[int, Point] = {}
        origin: dict[int, Path] = {}
        for log in logs:
            for point in log.points:
                old = by_step.setdefault(point.step, Point(point.step, {}))
                for key in old.values.keys() & point.values.keys():
                    if old.values[key] != point.values[key]:
                        raise RecordsError(
                            f"{self.path} holds two runs: {origin[point.step].name} and "
                            f"{log.path.name} both log {key} at step {point.step:,}. Pass the "
                            "files instead of the folder"
                        )
                old.values |= point.values
                origin[point.step] = log.path
        return [by_step[step] for step in sorted(by_step)]


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs as they are now, each under its own name.

    Raises:
        RecordsError: for a file that is missing, empty or broken; the message says where.
    """
    readers = [Reader(path) for path in paths]
    for reader in readers:
        reader.poll()
    return named([reader.run() for reader in readers])


def named(runs: list[Run]) -> list[Run]:
    """The same runs, where those that share a name get their paths as names."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    return runs


def _add_notes(run: Run) -> None:
    losses = [p.values["loss"] for p in run.points if "loss" in p.values]
    if missing := sum(loss is None for loss in losses):
        run.notes[
            f"{missing:,} of {len(losses):,} losses are NaN or infinite and missing from the curve"
        ] = None
    tokens = [p.tokens for p in run.points]
    known = [t for t in tokens if t is not None]
    if known and len(known) < len(tokens):
        run.notes[
            f"{len(tokens) - len(known):,} of {len(tokens):,} lines have no tokens, so the x-axis "
            "shows steps"
        ] = None
    elif any(b < a for a, b in zip(known, known[1:])):
        run.notes["tokens fall while steps rise, so the x-axis shows steps"] = None


def _number(record: Mapping[str, Any], name: str, least: float = -math.inf) -> float:
    if name not in record:
        raise KeyError(f"this line has no {name!r}")
    value = _finite(record, name)
    if value is None or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise TypeError(f"{name} must be a number{bound}, not {record[name]!r}")
    return value


def _finite(record: Mapping[str, Any], name: str) -> float | None:
    """A number, or None for null, NaN and infinities."""
    value = record[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return value if math.isfinite(value) else None
