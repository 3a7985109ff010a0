# SPDX-License-Identifier: Apache-2.0
"""A run's results, in numbers and in words."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gnsfast.cli.records import Point, Run
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.noise_scale import METRICS, OTHERS

OVER = 1.2
"""A batch larger than this many times the estimated critical batch size is flagged."""


@dataclass(frozen=True)
class Interval:
    """A number of samples with its 95 % interval. None means unknown, or an open end."""

    value: float | None
    lower: float | None
    upper: float | None

    @property
    def drawn(self) -> bool:
        """Whether a logarithmic axis can show it: positive, with both ends or none."""
        bounded = self.lower is None or (self.lower > 0 and self.upper is not None)
        return self.value is not None and self.value > 0 and bounded

    @property
    def at_least(self) -> float | None:
        """The lower end, if there is no upper one."""
        return self.lower if not self.drawn and self.upper is None and self.lower else None

    @property
    def at_most(self) -> float | None:
        """The upper end, if the lower one is 0."""
        return self.upper if self.lower == 0 and self.upper else None

    @property
    def bound(self) -> float | None:
        """The only end that is known."""
        return self.at_least or self.at_most

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"at least {number(self.at_least)} (95 %)"
        if self.at_most is not None:
            return f"at most {number(self.at_most)} (95 %)"
        if not self.drawn or self.value is None:
            return "not resolved"
        if self.lower is None or self.upper is None:
            return number(self.value)
        return f"{number(self.value)} (95 %: {number(self.lower)} to {number(self.upper)})"

    def record(self) -> dict[str, float | None]:
        return {"value": self.value, "lower": self.lower, "upper": self.upper}


@dataclass(frozen=True)
class Over:
    """A stretch on which the batch was larger than ``OVER`` times the estimate."""

    start: Point
    end: Point
    ratio: float


def number(x: float) -> str:
    """Three digits, and no exponent below a million."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e6 else f"{x:,.3g}"


def count(x: float) -> str:
    """Steps and tokens: 26.2M."""
    if abs(x) < 1e4:
        return f"{x:,.0f}"
    mantissa, _, exponent = f"{x:.2e}".partition("e")
    scale = min(4, int(exponent) // 3)
    return f"{float(mantissa) * 10 ** (int(exponent) - 3 * scale):.4g}{' kMBT'[scale]}"


def scale_at(point: Point, name: str) -> Interval | None:
    """A noise scale or an estimate at a point; None if it was not logged there."""
    keys = (name, f"{name}_lo", f"{name}_hi")
    if all(key not in point.values for key in keys):
        return None
    return Interval(*(point.values.get(key) for key in keys))


def scale_in(record: dict[str, Any], name: str) -> Interval:
    """The same from a record, such as a measurement, whose value has this name."""
    return Interval(record.get(name), record.get("lower"), record.get("upper"))


def groups_of(run: Run) -> list[str]:
    """Names of groups of samples, in the order of their first lines."""
    found: dict[str, None] = {}
    prefix, lower = "gns/group/", "_lo"
    for point in run.points:
        found |= {
            key[len(prefix) : -len(lower)]: None
            for key in point.values
            if key.startswith(prefix) and key.endswith(lower)
        }
    return list(found)


def factors_in(measured: dict[str, Any]) -> dict[str, Interval]:
    """Critical batch size / noise scale of a measurement, in each metric that it has."""
    size, found = scale_in(measured, "value"), {}
    for metric in METRICS:
        record = measured.get("noise_scale" if metric == "euclidean" else metric)
        if isinstance(record, dict):
            scale = scale_in(record, "value" if "value" in record else "noise_scale")
            if any(x for x in (scale.value, scale.lower)):
                found[metric] = _divided(size, scale)
    return found


def _divided(size: Interval, scale: Interval) -> Interval:
    """The ratio of two intervals. An end is None where one of its two parts is unknown."""
    lower = size.lower / scale.upper if size.lower and scale.upper else None
    upper = size.upper / scale.lower if size.upper and scale.lower else None
    known = size.value and scale.value and scale.value > 0
    return Interval(size.value / scale.value if known else None, lower, upper)  # type: ignore[operator]


def bounds(found: Interval) -> str:
    """A factor in words, without "95 %": one of its two intervals is no confidence interval."""
    low, high = (None if x is None else number(x) for x in (found.lower, found.upper))
    span = f"{low} to {high}" if low and high else f"at least {low}" if low else ""
    span = span or (f"at most {high}" if high else "")
    if found.value is None:
        return span or "unknown"
    return number(found.value) + (f" ({span})" if span else "")


def has_tokens(run: Run) -> bool:
    """Whether all points can be drawn over tokens."""
    tokens = [p.tokens for p in run.points]
    known = [t for t in tokens if t is not None]
    rising = all(a <= b for a, b in zip(known, known[1:]))
    return len(known) == len(tokens) and rising


def axis_position(run: Run, tokens: float, over_tokens: bool) -> float | None:
    """Where a record after ``tokens`` tokens lies on the axis; None if no point lies beyond it."""
    if over_tokens:
        return tokens
    points = [p for p in run.points if p.tokens is not None]
    k = bisect.bisect_left([p.tokens or 0.0 for p in points], tokens)
    if k == len(points):
        return None
    end = points[k]
    t0, s0 = (points[k - 1].tokens or 0.0, points[k - 1].step) if k else (0.0, 0)
    width = (end.tokens or 0.0) - t0
    return s0 + (end.step - s0) * (tokens - t0) / width if width > 0 else float(end.step)


def ratio_at(point: Point) -> float | None:
    """Batch size / estimate of the critical batch size."""
    if (ratio := point.values.get("cbs/ratio")) is not None:
        return ratio
    size, estimate = point.values.get("batch/size"), point.values.get("cbs/estimate")
    return size / estimate if size and estimate and estimate > 0 else None


def over_stretches(run: Run) -> list[Over]:
    """Stretches above ``OVER`` times the estimate, each up to the first point below it."""
    found: list[Over] = []
    start: Point | None = None
    most = 0.0
    known = [p for p in run.points if "cbs/ratio" in p.values or "cbs/estimate" in p.values]
    for point in known:
        ratio = ratio_at(point)
        over = ratio is not None and ratio > OVER
        if over and ratio is not None:
            start, most = start or point, max(most, ratio)
        elif start is not None:
            found.append(Over(start, point, most))
            start, most = None, 0.0
    if start is not None:
        found.append(Over(start, known[-1], most))
    return found


def last(run: Run, name: str) -> float | None:
    """The newest finite value of this name, if there is one."""
    values = (p.values.get(name) for p in reversed(run.points))
    return next((v for v in values if v is not None), None)


def last_scale(run: Run, name: str) -> Interval | None:
    scales = (scale_at(p, name) for p in reversed(run.points))
    return next((s for s in scales if s is not None), None)


def batch_size(run: Run) -> float | None:
    """The batch size of the last decision, or else that of the last line, a mean over updates."""
    if run.decisions:
        return float(run.decisions[-1]["new"])
    return last(run, "batch/size")


def matches(measurement: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """A measurement's branches, the smallest first, and whether each matches every smaller one."""
    least, tolerance = math.inf, measurement.get("tolerance")
    branches = sorted(measurement.get("branches") or [], key=lambda b: b["batch_size"])
    for k, branch in enumerate(branches):
        loss = branch.get("loss")
        if loss is None:
            yield branch, str(branch.get("state") or "no loss")
            continue
        if tolerance is not None:
            matched = loss <= least + tolerance
        else:
            matched = branch["batch_size"] <= (measurement.get("lower") or 0.0)
        yield branch, "-" if not k else "yes" if matched else "no"
        least = min(least, loss)


def summary(run: Run) -> dict[str, Any]:
    """A run as one JSON object."""
    end = run.points[-1] if run.points else None
    losses = [p.values["loss"] for p in run.points if "loss" in p.values]
    scales = {"noise_scale": SCALES["euclidean"], "noise_scale_present": PRESENT}
    scales |= {f"noise_scale_{metric}": SCALES[metric] for metric in OTHERS}
    scales |= {"critical_batch_estimate": "cbs/estimate"}
    found = {name: last_scale(run, key) for name, key in scales.items()}
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "step": end.step if end else None,
        "tokens": last(run, "tokens"),
        "loss": losses[-1] if losses else None,
        "losses": len(losses),
        "losses_not_finite": sum(loss is None for loss in losses),
        **{name: scale.record() if scale else None for name, scale in found.items()},
        "noise_scale_groups": {
            group: scale.record()
            for group in groups_of(run)
            if (scale := last_scale(run, f"gns/group/{group}"))
        },
        "covered": last(run, "gns/covered"),
        "layers": len(run.last_layers),
        "batch_size": batch_size(run),
        "critical_batch_ratio": ratio_at(end) if end else None,
        "over_critical_batch": [
            {
                "steps": [over.start.step, over.end.step],
                "tokens": [over.start.tokens, over.end.tokens],
                "ratio": over.ratio,
            }
            for over in over_stretches(run)
        ],
        "critical_batch_branches": [
            {k: c.get(k) for k in ("tokens", "batch_size", "value", "lower", "upper", "doubts")}
            | {"factors": {metric: f.record() for metric, f in factors_in(c).items()}}
            for c in run.critical
        ],
        "decisions": len(run.decisions),
        "warnings": sum(bool(d.get("warning")) for d in run.decisions),
        "check": run.check,
        "notes": list(run.notes),
    }
