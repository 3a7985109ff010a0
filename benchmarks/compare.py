# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks compare A.json B.json``: what changed between two records, and whether
that is more than their noise.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.measure import Timing
from benchmarks.record import Record, Rows

UNITS = {"ms", "s", "MiB", "GiB", "TFLOP/s", "%"}
"""A column with one of them in its name is measured, even if its numbers are whole."""
ATTRIBUTES = {"reason", "rounds", "route", "runs", "version"}
"""Columns that may change between records, so they do not name a row."""
MACHINE = {"processor", "cores", "OMP_NUM_THREADS", "gpu"}
PASSING = {"date", "load at start", "clocks: SM, SM at most, memory"}
"""They always differ, and are not reported."""

Key = tuple[Any, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")


def run(options: argparse.Namespace) -> None:
    try:
        found = compare(record.read(options.before), record.read(options.after))
    except (ValueError, OSError) as error:
        print(f"benchmarks compare: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(lines(found)))


def compare(before: Record, after: Record) -> dict[str, Any]:
    """Everything that ``lines`` shows."""
    titles = [title for title in before.tables if title in after.tables]
    if not titles:
        raise ValueError(f"{before.path} and {after.path} have no table of the same title")
    keys = dict.fromkeys([*before.machine, *after.machine])
    both = {key: [before.machine.get(key), after.machine.get(key)] for key in keys}
    return {
        "before": before.name,
        "after": after.name,
        "differs": {k: v for k, v in both.items() if k not in PASSING and v[0] != v[1]},
        "tables": {t: _table(before.tables[t], after.tables[t]) for t in titles},
        "only_before": [title for title in before.tables if title not in after.tables],
        "only_after": [title for title in after.tables if title not in before.tables],
    }


def _table(before: Rows, after: Rows) -> dict[str, Any]:
    columns = identity(before, after)
    old, new = _by_key(columns, before), _by_key(columns, after)
    rows = []
    for key in old:
        for column, was in _ratios(old[key]).items():
            now = _ratios(new.get(key, {})).get(column)
            if now is not None:
                row = dict(zip(columns, key)) | {"of": column, "before": was, "after": now}
                row |= {"change": _middle(now) / _middle(was) - 1, "verdict": verdict(was, now)}
                rows.append(row)
    alike = _twice(columns, before) | _twice(columns, after)
    only = {
        "only_before": [list(key) for key in old if key not in new and key not in alike],
        "only_after": [list(key) for key in new if key not in old and key not in alike],
        "alike": [list(key) for key in alike],
    }
    return {"rows": rows, **only}


def identity(before: Rows, after: Rows) -> list[str]:
    """The columns that name a row: words and whole numbers that both tables have, left of the first
    measured column.
    """
    named: list[str] = []
    columns = dict.fromkeys(key for row in before + after for key in row if key not in ATTRIBUTES)
    for column in columns:
        if any(_measured(column, row.get(column)) for row in before + after):
            break
        if all(any(column in row for row in rows) for rows in (before, after)):
            named.append(column)
    return named


def _measured(column: str, value: Any) -> bool:
    return isinstance(value, float | Timing) or _number(value) or bool(UNITS & {*column.split()})


def _number(value: Any) -> bool:
    """A number that an older record holds as a string, ``1.001`` or ``0.09%``."""
    return isinstance(value, str) and value.rstrip("%").replace(".", "", 1).isdecimal()


def _by_key(columns: list[str], rows: Rows) -> dict[Key, dict[str, Any]]:
    """Rows by their names, without those that share one."""
    alike = _twice(columns, rows)
    keyed = ((tuple(row.get(column) for column in columns), row) for row in rows)
    return {key: row for key, row in keyed if key not in alike}


def _twice(columns: list[str], rows: Rows) -> set[Key]:
    counts = Counter(tuple(row.get(column) for column in columns) for row in rows)
    return {key for key, count in counts.items() if count > 1}


def _ratios(row: dict[str, Any]) -> dict[str, Timing | float]:
    """Ratios of times, and of peak memory, which have no spread."""
    found: dict[str, Timing | float] = {}
    for column, value in row.items():
        if isinstance(value, Timing):
            found[column] = value
        elif column == "memory" or " / " in column:
            if isinstance(value, float) or _number(value):
                found[column] = float(value)
    return found


def _middle(value: Timing | float) -> float:
    return value.ratio if isinstance(value, Timing) else value


def verdict(was: Timing | float, now: Timing | float) -> str:
    """A ratio has changed if the quartiles of both do not overlap."""
    if not (isinstance(was, Timing) and isinstance(now, Timing)):
        return "no spread was recorded"
    if now.lower > was.upper:
        return "HIGHER"
    return "LOWER" if now.upper < was.lower else "within noise"


def lines(found: dict[str, Any]) -> list[str]:
    differs = found["differs"]
    text = [f"before: {found['before']}", f"after:  {found['after']}"]
    text += [f"{key}: {was} before, {now} after" for key, (was, now) in differs.items()]
    if MACHINE & differs.keys():
        text.append("other machines: only ratios are compared, not milliseconds")
    for title, table in found["tables"].items():
        text += ["", title, ""]
        rows = [{**row, "change": f"{row['change']:+.1%}"} for row in table["rows"]]
        for row in rows:
            numbers = {when: row[when] for when in ("before", "after")}
            row |= {when: v if isinstance(v, Timing) else f"{v:.3f}" for when, v in numbers.items()}
        text += record.markdown(rows) if rows else ["no ratio is in both records"]
        for which, what in (
            ("only_before", "only before"),
            ("only_after", "only after"),
            ("alike", "several rows of this name, not compared"),
        ):
            text += [f"{what}: {', '.join(map(record.shown, key))}" for key in table[which]]
    for when in ("before", "after"):
        text += [f"\ntable only {when}: {title}" for title in found[f"only_{when}"]]
    return text
