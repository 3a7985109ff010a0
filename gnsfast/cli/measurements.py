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


class Measured(NamedTuple):
    """A critical batch size in samples with its interval, measured after ``tokens`` tokens.

    ``tokens_per_sample`` is None where the measurement does not say how long its samples are.
    """

    tokens: float
    value: float
    lower: float
    upper: float
    tokens_per_sample: float | None = None


class Measurements(NamedTuple):
    """The usable measurements, and how many were left out.

    ``left_out`` counts measurements without a value, ``doubtful`` those with doubts.
    ``tokens_per_sample`` is the same in all points, None where no point says it.
    """

    points: list[Measured]
    tokens_per_sample: float | None = None
    left_out: int = 0
    doubtful: int = 0


def read_measurements(path: str) -> Measurements:
    """Read the columns ``tokens``, ``value`` and ``tokens_per_sample`` of a CSV file, or these
    fields of JSON lines whose kind is "critical batch" or missing. In a folder without JSON lines,
    read the folders of branches. Measurements without a finite value, or with ``doubts``, are left
    out.

    Raises:
        ValueError: if there is no measurement, if a field is not a number, or if the measurements
            differ in their tokens per sample, so that their batch sizes cannot be compared.
    """
    found = _collected(path, _rows(Path(path)))
    if not found.points:
        parts = {"without a value": found.left_out, "with doubts": found.doubtful}
        why = ", ".join(f"{n} {what}" for what, n in parts.items() if n)
        raise ValueError(
            f"{path} holds no usable measurement, which needs tokens and value"
            + (f" ({why} left out)" if why else "")
        )
    lengths = {p.tokens_per_sample for p in found.points}
    if len(lengths) > 1:
        named = [
            f"{n:,.0f} tokens" if n else "an unknown number of tokens"
            for n in sorted(lengths, key=lambda n: n or 0)
        ]
        raise ValueError(
            f"{path} mixes samples of {' and of '.join(named)}: keep only the measurements of one "
            "sample length"
        )
    return found._replace(tokens_per_sample=lengths.pop())


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
            lower, upper = _end(row, "lower", value, 0.0), _end(row, "upper", value, math.inf)
            length = _number(row.get("tokens_per_sample"), "tokens_per_sample")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if str(row.get("doubts") or "").strip().lower() not in ("", "0", "false"):
            found = found._replace(doubtful=found.doubtful + 1)
        elif not math.isfinite(value):
            found = found._replace(left_out=found.left_out + 1)
        else:
            if not 0 <= tokens < math.inf or value <= 0:
                raise ValueError(
                    f"{path} holds a measurement with tokens={row['tokens']!r} and "
                    f"value={row['value']!r}: tokens must be a number from 0 on, and value a "
                    "positive number"
                )
            known = None if math.isnan(length) else length
            found.points.append(Measured(tokens, value, lower, upper, known))
    return found


def _end(row: Mapping[str, Any], name: str, missing: float, unbounded: float) -> float:
    """An end of the interval; null and inf mean that the interval is open on this side."""
    if str(row.get(name, "")).strip() == "":
        return missing
    end = _number(row[name], name)
    return end if math.isfinite(end) else unbounded


def _number(field: Any, name: str) -> float:
    """A JSON number or a CSV field as a float; NaN if it is null, empty or not finite."""
    if isinstance(field, (int, float)):
        return float(field)
    text = "" if field is None else str(field).strip()
    if text.lower() in ("", "nan", "inf", "null"):
        return math.nan
    return float(parse_number(text, name))
