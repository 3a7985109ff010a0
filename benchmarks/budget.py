# SPDX-License-Identifier: Apache-2.0
"""Committed counts in ``benchmarks/budgets/`` that may not grow: instructions on the CPU, registers
and instructions of the kernels. They are counted, not timed: a busy machine changes none.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "budgets"
RENEW = "python -m benchmarks budgets --write --only"

Rows = dict[str, dict[str, int]]

# How far a number may grow: by a share of itself, plus a number. Other columns only describe.
MARGINS = {
    "added": (0.02, 0),
    "launches": (0.0, 0),
    "instructions": (0.05, 0),
    "registers": (0.0, 8),
    "shared": (0.05, 0),
    "spilled": (0.0, 0),
}
STEADY = 0.01
"""Plain torch's own count may differ by this share: it differs by 0.1 % from run to run, by up to
0.4 % with another memory layout, by 0.5 to 2.7 % between builds of Python 3.11. Beyond it the case
or the machine has changed, and nothing is compared."""


@dataclass(frozen=True)
class Budget:
    """Rows by name, and the versions and the build that they were counted with."""

    versions: dict[str, str]
    rows: Rows
    build: str = ""

    def write(self, name: str) -> Path:
        """A line for each row, so that a change reads well."""
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{name}.json"
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(row)}" for k, row in self.rows.items())
        about = f' "versions": {json.dumps(self.versions)},\n "build": {json.dumps(self.build)},\n'
        path.write_text(f'{{\n{about} "rows": {{\n{rows}\n }}\n}}\n', encoding="utf-8")
        return path


def read(name: str) -> Budget:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    return Budget(**json.loads(text))


def renew(name: str) -> str:
    return f"{RENEW} {name.partition('-')[0]}"


def unlike(then: Budget, now: Budget) -> str:
    """Why the two cannot be compared; empty if they can."""
    for key, version in then.versions.items():
        if now.versions[key].partition("+")[0] != version.partition("+")[0]:
            return f"counted with {key} {version}, but here it is {now.versions[key]}"
    moved = plain_moved(then, now)
    return moved and f"{moved}, here on {now.build}, there on {then.build}"


def plain_moved(then: Budget, now: Budget) -> str:
    """Where plain torch's own number of instructions has changed; empty if nowhere."""
    for name, row in now.rows.items():
        before = then.rows.get(name, row).get("plain", 0)
        if abs(row.get("plain", 0) - before) > STEADY * before:
            return f"{name}: plain torch takes {row['plain']} instructions instead of {before}"
    return ""


def changes(then: Budget, now: Budget) -> list[tuple[str, str, int, int]]:
    """Name, column, before and now of every number that has changed."""
    return [
        (name, column, before, now.rows[name][column])
        for name in now.rows
        for column, before in then.rows.get(name, {}).items()
        if now.rows[name][column] != before
    ]


def complaints(then: Budget, now: Budget, whole: bool = True) -> list[str]:
    """What has grown, and rows that the budget lacks, or if ``whole`` that ``now`` lacks."""
    found = [f"{name}: not in the budget" for name in now.rows if name not in then.rows]
    if whole:
        found += [f"{name}: only in the budget" for name in then.rows if name not in now.rows]
    return found + [_line(*change) for change in changes(then, now) if grown(*change[1:])]


def _line(name: str, column: str, before: int, value: int) -> str:
    share = f" ({value / before - 1:+.1%})" if before else ""
    return f"{name}: {column} {before:,} -> {value:,}{share}"


def grown(column: str, before: int, value: int) -> bool:
    if column == "blocks":  # that fit one SM
        return value < before
    if column not in MARGINS:
        return False
    share, more = MARGINS[column]
    return value > before * (1 + share) + more


def hold(name: str, now: Budget, whole: bool = True) -> str:
    """Raise if a number has grown beyond its margin. Returns why nothing was compared, or ''."""
    then = read(name)
    if why := unlike(then, now):
        return f"the budget {name} is not compared: {why}; to renew it: {renew(name)}"
    print("\n".join(_line(*change) for change in changes(then, now)))
    if found := complaints(then, now, whole):
        text = "\n".join(found)
        raise AssertionError(f"more than the budget {name}:\n{text}\nif meant: {renew(name)}")
    return ""


def table(then: Budget, now: Budget) -> list[dict[str, Any]]:
    """A row for each of ``now``, with the budget's number where it differs."""
    return [
        {"": name, **{c: _cell(then, name, c, value) for c, value in row.items()}}
        for name, row in now.rows.items()
    ]


def _cell(then: Budget, name: str, column: str, value: int) -> str:
    before = then.rows.get(name, {}).get(column)
    return f"{value:,}" if before in (None, value) else f"{value:,} (was {before:,})"
