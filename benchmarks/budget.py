# SPDX-License-Identifier: Apache-2.0
"""Committed counts in ``benchmarks/budgets/`` that may not grow: instructions on the CPU, registers
and instructions of the kernels. They are counted, not timed: a busy machine changes none.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "budgets"
RENEW = "python -m benchmarks budgets --write --only"

Rows = dict[str, dict[str, int]]

# How far a number may grow: by a share of itself, plus a number. Other columns only describe.
MARGINS = {
    "host": (0.02, 0),
    "torch": (0.02, 0),
    "kernels": (0.01, 0),
    "launches": (0.0, 0),
    "instructions": (0.05, 0),
    "registers": (0.0, 8),
    "shared": (0.05, 0),
    "spilled": (0.0, 0),
}
NEEDS = {"host": "python", "kernels": "compiler"}
"""Columns that are compared only where this version is the budget's. No column is compared where
another version differs."""
BUILDS = 0.05
"""Builds of one Python execute 0.5 to 2.7 % more or fewer instructions for the same program, so
``host`` is compared in proportion to what plain torch takes. Beyond this share it is not."""


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
    """Why nothing can be compared; empty if something can."""
    others = (_other(then, now, key) for key in then.versions if key not in NEEDS.values())
    return "; ".join(filter(None, others))


def _other(then: Budget, now: Budget, key: str) -> str:
    before, version = then.versions[key], now.versions[key]
    if before.partition("+")[0] == version.partition("+")[0]:
        return ""
    return f"counted with {key} {before}, but here it is {version}"


def not_compared(then: Budget, now: Budget) -> dict[str, str]:
    """Columns that cannot be compared here, and why."""
    why = {column: _other(then, now, key) for column, key in NEEDS.items() if key in then.versions}
    if "host" in why and not why["host"] and abs(builds(then, now) - 1) > BUILDS:
        why["host"] = (
            f"plain torch takes {builds(then, now):.2f} times as many instructions, "
            f"here on {now.build}, there on {then.build}"
        )
    return {column: reason for column, reason in why.items() if reason}


def builds(then: Budget, now: Budget) -> float:
    """What plain torch takes of the host here, as a multiple of what it took there."""
    both = [(then.rows[name], now.rows[name]) for name in now.rows if name in then.rows]
    shares = [here["plain"] / there["plain"] for there, here in both if there.get("plain")]
    return statistics.median(shares or [1.0])


def changes(then: Budget, now: Budget) -> list[tuple[str, str, int, int]]:
    """Name, column, before and now of every number that has changed, where it can be compared."""
    left_out, share, found = not_compared(then, now), builds(then, now), []
    for name, row in now.rows.items():
        for column, count in then.rows.get(name, {}).items():
            before = round(count * share) if column == "host" else count
            if row[column] != before and column not in left_out:
                found.append((name, column, before, row[column]))
    return found


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
    """Raise if a number has grown beyond its margin. Returns what was not compared, or ''."""
    then = read(name)
    if why := unlike(then, now):
        return f"the budget {name} is not compared: {why}; to renew it: {renew(name)}"
    print("\n".join(_line(*change) for change in changes(then, now)))
    if found := complaints(then, now, whole):
        text = "\n".join(found)
        raise AssertionError(f"more than the budget {name}:\n{text}\nif meant: {renew(name)}")
    left_out = [f"{column}: {why}" for column, why in not_compared(then, now).items()]
    return f"not compared in the budget {name}: {'; '.join(left_out)}" if left_out else ""


def table(then: Budget, now: Budget) -> list[dict[str, Any]]:
    """A row for each of ``now``, with the budget's number where it differs."""
    return [
        {"": name, **{c: _cell(then, name, c, value) for c, value in row.items()}}
        for name, row in now.rows.items()
    ]


def _cell(then: Budget, name: str, column: str, value: int) -> str:
    before = then.rows.get(name, {}).get(column)
    return f"{value:,}" if before in (None, value) else f"{value:,} (was {before:,})"
