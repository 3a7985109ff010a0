# SPDX-License-Identifier: Apache-2.0
"""A run's results, in numbers and in words."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from gnsfast.cli.records import Point, Run
from gnsfast.counts import short_count, three_digits
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.interval import Interval
from gnsfast.noise_scale import METRICS, OTHERS, OVER

SCALE = ("noise_scale", "lower", "upper")
"""The fields of a noise scale in a record."""

count = partial(short_count, whole=1e4, units="kMBT")
"""Steps and tokens: 26.2M."""


@dataclass(frozen=True)
class Over:
    """A stretch on which the batch was larger than ``OVER`` times the estimate."""

    start: Point
    end: Point
    ratio: float


def said(found: Interval) -> str:
    """A value with its 95 % interval, where there is one."""
    if found.only is not None:
        return f"{found.ends(three_digits)} (95 %)"
    if not found.drawn:
        return "not resolved"
    ends = found.ends(three_digits)
    return three_digits(found.value) + (f" (95 %: {ends})" if ends else "")


def tried(found: Interval) -> str:
    """A measurement's interval in words: its ends are batch sizes that were tried."""
    ends = found.ends(three_digits)
    return f"{ends} samples" if ends else "not resolved"


def scale_at(point: Point, name: str) -> Interval | None:
    """A noise scale or an estimate at a point; None if it was not logged there."""
    keys = (name, f"{name}_lo", f"{name}_hi")
    if not any(key in point.values for key in keys):
        return None
    return Interval.read(point.values, *keys)


def scale_in(record: dict[str, Any]) -> Interval:
    """A noise scale of a measurement, by either of its two names."""
    return Interval.read(record, *(Interval._fields if "value" in record else SCALE))


def groups_of(run: Run) -> list[str]:
    """Names of groups of samples, in the order of their first lines."""
    prefix, lower = "gns/group/", "_lo"
    keys = dict.fromkeys(key for point in run.points for key in point.values)
    found = (key for key in keys if key.startswith(prefix) and key.endswith(lower))
    return [key[len(prefix) : -len(lower)] for key in found]


def factors_in(measured: dict[str, Any]) -> dict[str, Interval]:
    """Critical batch size / noise scale of a measurement, in each metric that it has."""
    size, found = Interval.read(measured), {}
    for metric in METRICS:
        record = measured.get("noise_scale" if metric == "euclidean" else metric)
        if isinstance(record, dict):
            scale = scale_in(record)
            if scale.value > 0 or scale.lower > 0:
                found[metric] = size.over(scale)
    return found


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
    known = [p for p in run.points if "cbs/ratio" in p.values or "cbs/estimate" in p.values]
    ratios = [ratio_at(p) or 0.0 for p in known]
    found = []
    for over, group in groupby(range(len(known)), lambda k: ratios[k] > OVER):
        if over:
            stretch = list(group)
            end = known[min(stretch[-1] + 1, len(known) - 1)]
            found.append(Over(known[stretch[0]], end, max(ratios[k] for k in stretch)))
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
    return float(run.decisions[-1]["new"]) if run.decisions else last(run, "batch/size")


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


def _known(factor: Interval) -> dict[str, float | None]:
    """A factor for JSON, without an end that is not known."""
    return factor._replace(lower=factor.lower or math.nan).record()


def summary(run: Run) -> dict[str, Any]:
    """A run as one JSON object."""
    end = run.points[-1] if run.points else None
    losses = [p.values["loss"] for p in run.points if "loss" in p.values]
    scales = {"noise_scale": SCALES["euclidean"], "noise_scale_present": PRESENT}
    scales |= {f"noise_scale_{metric}": SCALES[metric] for metric in OTHERS}
    scales |= {"critical_batch_estimate": "cbs/estimate"}
    found = {name: last_scale(run, key) for name, key in scales.items()}
    groups = {group: last_scale(run, f"gns/group/{group}") for group in groups_of(run)}
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
        "noise_scale_groups": {name: scale.record() for name, scale in groups.items() if scale},
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
            | {"factors": {m: _known(f) for m, f in factors_in(c).items()}}
            for c in run.critical
        ],
        "decisions": len(run.decisions),
        "warnings": sum(bool(d.get("warning")) for d in run.decisions),
        "check": run.check,
        "notes": list(run.notes),
    }
