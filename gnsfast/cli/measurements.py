# SPDX-License-Identifier: Apache-2.0
"""A user's own critical batch sizes: a CSV file, JSON lines or a run folder."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gnsfast.critical_batch.counts import parse_number
from gnsfast.critical_batch.run_records import read_records


class Measurements(NamedTuple):
    """Critical batch sizes in samples against tokens; ``left_out`` had no value."""

    tokens: list[float]
    batch_sizes: list[float]
    left_out: int


def read_measurements(path: str) -> Measurements:
    """Columns ``tokens`` and ``value`` of a CSV file, or such fields of JSON lines: of records of
    kind "critical batch", and of lines without a kind. A value that is null or not finite was not
    resolved, and is left out.

    Raises:
        ValueError: for a file without measurements, and for a field that is no number.
    """
    if Path(path).suffix.lower() == ".csv":
        with open(path, newline="", encoding="utf-8") as file:
            found = _collected(csv.DictReader(file))
    else:
        found = _collected(
            r for r in read_records(path) if r.get("kind", "critical batch") == "critical batch"
        )
    if not found.tokens:
        without = f" ({found.left_out} without a value)" if found.left_out else ""
        raise ValueError(f"{path} holds no measurements: tokens and value{without}")
    return found


def _collected(rows: Iterable[Mapping[str, Any]]) -> Measurements:
    found = Measurements([], [], 0)
    for row in rows:
        if "tokens" not in row or "value" not in row:
            continue
        value = _number(row["value"], "value")
        if not math.isfinite(value):
            found = found._replace(left_out=found.left_out + 1)
            continue
        found.tokens.append(_number(row["tokens"], "tokens"))
        found.batch_sizes.append(value)
    return found


def _number(field: Any, name: str) -> float:
    """A JSON number or the text of a CSV field; NaN for null, nothing and what is not finite."""
    if isinstance(field, (int, float)):
        return float(field)
    text = "" if field is None else str(field).strip()
    if text.lower() in ("", "nan", "inf", "null"):
        return math.nan
    return float(parse_number(text, name))
