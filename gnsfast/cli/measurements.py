# SPDX-License-Identifier: Apache-2.0
"""A user's own critical batch sizes: a CSV file, JSON lines, folders of runs or of branches."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gnsfast.critical_batch.branches import RESULT
from gnsfast.critical_batch.counts import parse_number
from gnsfast.critical_batch.laws import read_records


class Measured(NamedTuple):
    """A critical batch size in samples with its interval, measured after ``tokens`` tokens."""

    tokens: float
    value: float
    lower: float
    upper: float


class Measurements(NamedTuple):
    """``left_out`` counts measurements without a value, ``doubtful`` those with doubts."""

    points: list[Measured]
    left_out: int = 0
    doubtful: int = 0


def read_measurements(path: str) -> Measurements:
    """Read the columns ``tokens`` and ``value`` of a CSV file, or these fields of JSON lines whose
    kind is "critical batch" or missing. In a folder without JSON lines, read the folders of
    branches. Measurements without a finite value, or with ``doubts``, are left out.

    Raises:
        ValueError: if there is no measurement, or a field is not a number.
    """
    found = _collected(path, _rows(Path(path)))
    if not found.points:
        parts = {"without a value": found.left_out, "not to be trusted": found.doubtful}
        why = ", ".join(f"{n} {what}" for what, n in parts.items() if n)
        raise ValueError(
            f"{path} holds no measurements: tokens and value{f' ({why})' if why else ''}"
        )
    return found


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, skipinitialspace=True))
    records: list[dict[str, Any]] = []
    inside = sorted(path.glob(f"*/{RESULT}")) if path.is_dir() else []
    for each in [path] if not inside or any(path.glob("*.jsonl")) else inside:
        records += read_records(each)
    return [r for r in records if r.get("kind", "critical batch") == "critical batch"]


def _collected(path: str, rows: Iterable[Mapping[str, Any]]) -> Measurements:
    found = Measurements([])
    for row in rows:
        if "tokens" not in row or "value" not in row:
            continue
        try:
            tokens, value = (_number(row[name], name) for name in ("tokens", "value"))
            bounds = [_number(row.get(name), name) for name in ("lower", "upper")]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if row.get("doubts"):
            found = found._replace(doubtful=found.doubtful + 1)
        elif not math.isfinite(value):
            found = found._replace(left_out=found.left_out + 1)
        else:
            lower, upper = (value if math.isnan(b) else b for b in bounds)
            found.points.append(Measured(tokens, value, lower, upper))
    return found


def _number(field: Any, name: str) -> float:
    """A JSON number or a CSV field as a float; NaN if it is null, empty or not finite."""
    if isinstance(field, (int, float)):
        return float(field)
    text = "" if field is None else str(field).strip()
    if text.lower() in ("", "nan", "inf", "null"):
        return math.nan
    return float(parse_number(text, name))
