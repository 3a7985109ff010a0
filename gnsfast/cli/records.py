# SPDX-License-Identifier: Apache-2.0
"""The logs of a run, one .jsonl file or all of a folder, also while they are written."""

import bisect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnsfast.cli.runs import LayerLine, Point, Run
from gnsfast.critical_batch.laws import JsonLines
from gnsfast.estimator import LargestSample
from gnsfast.integrations.trackers import FORMAT, LARGEST
from gnsfast.interval import Interval

LAYERS = VALUE, LOWER, _ = ("gns/layer/", "gns/layer_lo/", "gns/layer_hi/")
PREFIXES = ("gns/", "batch/", "cbs/")
NAMES = ("loss", "tokens", "seconds", "share")
DECIDED = ("tokens", "phase", "old", "new", "warning")
LAYER_LINES = 256
"""How many lines with layers are kept at most, evenly spread: enough columns for a screen."""


class RecordsError(ValueError):
    """A log cannot be read. The message is one line with the file and the line's number."""


class NothingYet(RecordsError):
    """Nothing was logged there yet, but a run may still begin."""


class LogFile(Run):
    """One file: ``poll`` reads what was added since the last time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=path)
        self.lines = JsonLines(path, lambda number, what: RecordsError(f"{path}:{number}: {what}"))
        self._seen_layers, self._stride = 0, 1
        self._newest: dict[str, float | None] = {}

    def poll(self) -> bool:
        """Read on; whether there was anything new."""
        before = self.lines.offset
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
        kind = record["kind"]
        if kind == "run":
            self.header |= {k: v for k, v in record.items() if k not in ("kind", "format")}
            self.state = "open"
        elif kind == "decision":
            tokens = _number(record, "tokens", least=0)
            _number(record, "old", least=1), _number(record, "new", least=1)
            same = [record.get(name) for name in DECIDED]
            self.decisions = [
                d
                for d in self.decisions
                if d["tokens"] <= tokens and [d.get(name) for name in DECIDED] != same
            ]  # a restart repeats decisions
            self.decisions.append(record)
        elif kind == "critical batch":
            _number(record, "tokens", least=0), _number(record, "batch_size", least=1)
            self.critical.append(record)
        elif kind == LARGEST:
            self._take_largest(record)
        elif kind == "check":
            self.check = record
        elif kind == "interrupted":
            self.state = kind
        elif kind == "end":
            self.state = "interrupted" if self.state == "interrupted" else "ended"
        elif kind != "branch step":  # a measurement says how its branches ended
            name = self.path.name
            self.notes[f"{name}: the report does not show lines of kind {kind!r}"] = None

    def _take_largest(self, line: dict[str, Any]) -> None:
        step, samples = _step(line), line.get("samples")
        if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
            raise TypeError(f"samples must be a list of objects, not {samples!r}")
        if self.points and step < self.points[-1].step:
            self._forget(Point(step, {}))
        for each in samples:
            if missing := [name for name in LargestSample._fields if name not in each]:
                raise KeyError(f"a sample of this line has no {missing[0]!r}")
            numbers = {name: _finite(each, name) for name in ("share", "times_median")}
            # A window may hold a sample at several steps: it belongs to the first.
            same = repr((each["update"], each["id"], each["sqnorm"]))
            self.largest.setdefault(same, {**each, **numbers, "step": step})

    def _take_point(self, line: dict[str, Any]) -> None:
        if "step" not in line:
            raise KeyError("this line has neither a step nor a kind")
        step = _step(line)
        values = {
            sys.intern(k): _finite(line, k) for k in line if k in NAMES or k.startswith(PREFIXES)
        }
        layers = {name: values.pop(name) for name in [*values] if name.startswith(LAYERS)}
        point = Point(step, values)
        if point.tokens is not None:
            _number(line, "tokens", least=0)
        points = self.points
        if points and point.step < points[-1].step:
            self._forget(point)
        if points and points[-1].step == point.step:
            points[-1].values |= point.values
        else:
            points.append(point)
        if paths := _paths(layers):
            self._newest = layers
            self._keep(
                LayerLine(point.step, point.tokens, {p: layers.get(VALUE + p) for p in paths})
            )
        self.state = "open"

    def _keep(self, line: LayerLine) -> None:
        if self._seen_layers % self._stride == 0:
            self.layers.append(line)
            if len(self.layers) > LAYER_LINES:
                self.layers = self.layers[::2]
                self._stride *= 2
        self._seen_layers += 1

    def newest_layers(self) -> dict[str, Interval]:
        """Those of the last line that has layers, for ``last_layers``."""
        newest = self._newest
        return {p: Interval.read(newest, *(name + p for name in LAYERS)) for p in _paths(newest)}

    def _forget(self, restart: Point) -> None:
        """A restart went back to an earlier step: its own lines replace those from there on."""
        first = bisect.bisect_left([p.step for p in self.points], restart.step)
        self.notes[
            f"{self.path.name}: steps {self.points[first].step:,} to {self.points[-1].step:,} were "
            "logged twice because of a restart; the report shows the later lines"
        ] = None
        del self.points[first:]
        self.layers = [line for line in self.layers if line.step < restart.step]
        self.largest = {k: each for k, each in self.largest.items() if each["step"] < restart.step}
        if restart.tokens is not None:
            self.decisions = [d for d in self.decisions if d["tokens"] <= restart.tokens]


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
        known = {
            p: file for p, file in self.files.items() if p in paths and not file.lines.shrank()
        }
        self.files = {p: known.get(p) or LogFile(p) for p in paths}
        return any([file.poll() for file in self.files.values()])

    def run(self) -> Run:
        """Everything that was read so far.

        Raises:
            NothingYet: if nothing was read.
            RecordsError: if two files contradict each other, because they belong to two runs.
        """
        if not self.files:
            raise NothingYet(f"{self.path}: this folder holds no .jsonl file")
        run, logs = Run(path=self.path), self.files.values()
        for log in logs:
            run.last_layers = log.newest_layers() or run.last_layers
            run.header |= log.header
            run.decisions += log.decisions
            run.critical += log.critical
            run.layers += log.layers
            run.largest |= log.largest
            run.check = log.check or run.check
            run.state = log.state if log.state != "open" else run.state
            run.notes |= log.notes
        alone = run.header or run.decisions or run.critical or run.largest
        if not (alone or any(log.points for log in logs)):
            raise NothingYet(f"{self.path}: no line was logged yet")
        name = self.path.resolve().stem if self.path.is_file() else self.path.resolve().name
        run.name = str(run.header.get("name") or name)
        run.points = self._merged([log for log in logs if log.points])
        run.decisions.sort(key=lambda d: d["tokens"])
        run.critical.sort(key=lambda c: c["tokens"])
        run.layers.sort(key=lambda line: line.step)
        losses = run.losses
        if missing := losses.count(None):
            run.notes[
                f"{missing:,} of {len(losses):,} losses are NaN or infinite and missing from the "
                "curve"
            ] = None
        if note := run.without_tokens():
            run.notes[note] = None
        return run

    def _merged(self, logs: list[LogFile]) -> list[Point]:
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


def _paths(layers: dict[str, float | None]) -> list[str]:
    """The modules that have a value or a lower end."""
    starts = LOWER, VALUE
    names = [name for start in starts for name in layers if name.startswith(start)]
    return list(dict.fromkeys(sys.intern(name.split("/", 2)[2]) for name in names))


def _number(record: Mapping[str, Any], name: str, least: float = -math.inf) -> float:
    if name not in record:
        raise KeyError(f"this line has no {name!r}")
    value = _finite(record, name)
    if value is None or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise TypeError(f"{name} must be a number{bound}, not {record[name]!r}")
    return value


def _step(record: Mapping[str, Any]) -> int:
    step = _number(record, "step", least=0)
    if step != int(step):
        raise TypeError(f"step must be a whole number, not {step!r}")
    return int(step)


def _finite(record: Mapping[str, Any], name: str) -> float | None:
    """A number, or None for null, NaN and infinities."""
    value = record[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return value if math.isfinite(value) else None
