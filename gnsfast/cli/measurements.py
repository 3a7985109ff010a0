# SPDX-License-Identifier: Apache-2.0
"""Reads a user's critical batch sizes from CSV, JSON lines, run folders or branch folders."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gnsfast.counts import parse_number
from gnsfast.critical_batch.branches import RESULT
from gnsfast.critical_batch.laws import read_records
from gnsfast.interval import Interval


class Measured(NamedTuple):
    """A critical batch size in samples, measured after ``tokens`` tokens.

    ``tokens_per_sample`` is None where the measurement does not say how long its samples are.
    """

    tokens: float
    critical: Interval
    tokens_per_sample: float | None = None


class Measurements(NamedTuple):
    """The usable measurements, and how many were left out.

    ``left_out`` counts measurements without a value, ``doubtful`` those with doubts.
    ``tokens_per_sample`` is the same in all points, None where no point says it.
    """

    points: list[Measured]
    tokens_per_sample: float | None
    left_out: int
    doubtful: int


def read_measurements(path: str) -> Measurements:
    """Read the columns ``tokens``, ``value`` and ``tokens_per_sample`` of a CSV file, or these
    fields of JSON lines whose kind is "critical batch" or missing. In a folder without JSON lines,
    read the folders of branches. Measurements without a finite value, or with ``doubts``, are left
    out.

    Raises:
        ValueError: if there is no measurement, if a field is not a number, or if the measurements
            differ in their tokens per sample, so that their batch sizes cannot be compared.
    """
    points: list[Measured] = []
    left_out = doubtful = 0
    for row in _rows(Path(path)):
        if "tokens" not in row or "value" not in row:
            continue
        try:
            found = _measured(row)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if str(row.get("doubts") or "").strip().lower() not in ("", "0", "false"):
            doubtful += 1
        elif not math.isfinite(found.critical.value):
            left_out += 1
        elif not 0 <= found.tokens < math.inf or found.critical.value <= 0:
            raise ValueError(
                f"{path} holds a measurement with tokens={row['tokens']!r} and "
                f"value={row['value']!r}: tokens must be a number from 0 on, and value a positive "
                "number"
            )
        else:
            points.append(found)
    if not points:
        why = unused(left_out, doubtful)
        raise ValueError(
            f"{path} holds no usable measurement, which needs tokens and value"
            + (f" ({why} left out)" if why else "")
        )
    lengths = sorted({p.tokens_per_sample or 0 for p in points})
    if len(lengths) > 1:
        named = [f"{n:,.0f} tokens" if n else "an unknown number of tokens" for n in lengths]
        raise ValueError(
            f"{path} mixes samples of {' and of '.join(named)}: keep only the measurements of one "
            "sample length"
        )
    return Measurements(points, lengths[0] or None, left_out, doubtful)


def unused(left_out: int, doubtful: int) -> str:
    """How many measurements were left out, and why."""
    parts = {"without a value": left_out, "with doubts": doubtful}
    return ", ".join(f"{n} {what}" for what, n in parts.items() if n)


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, skipinitialspace=True))
    inside = sorted(path.glob(f"*/{RESULT}")) if path.is_dir() else []
    paths = [path] if not inside or any(path.glob("*.jsonl")) else inside
    records = [record for each in paths for record in read_records(each)]
    return [r for r in records if r.get("kind", "critical batch") == "critical batch"]


def _measured(row: Mapping[str, Any]) -> Measured:
    """null and inf mean that the interval is open on a side; a missing end is the value itself."""
    tokens, value = (_number(row[name], name) for name in ("tokens", "value"))
    ends = []
    for name, unbounded in (("lower", 0.0), ("upper", math.inf)):
        missing = str(row.get(name, "")).strip() == ""
        end = value if missing else _number(row[name], name)
        ends.append(end if missing or math.isfinite(end) else unbounded)
    length = _number(row.get("tokens_per_sample"), "tokens_per_sample")
    return Measured(tokens, Interval(value, *ends), None if math.isnan(length) else length)


def _number(field: Any, name: str) -> float:
    """A JSON number or a CSV field as a float; NaN if it is null, empty or not finite."""
    if isinstance(field, (int, float)):
        return float(field)
    text = "" if field is None else str(field).strip()
    if text.lower() in ("", "nan", "inf", "null"):
        return math.nan
    return float(parse_number(text, name))
