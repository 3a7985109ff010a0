# SPDX-License-Identifier: Apache-2.0
"""How pages and terminals say numbers and records. Templates have every function of this file as a
filter.
"""

import math
from collections.abc import Iterator
from functools import partial
from json import dumps as dumps
from typing import Any

from gnsfast.cli.measurements import unused as unused
from gnsfast.counts import exact_count as exact_count
from gnsfast.counts import percent as percent
from gnsfast.counts import rounded_percent as rounded_percent
from gnsfast.counts import short_count, three_digits
from gnsfast.critical_batch.laws import Saved
from gnsfast.critical_batch.laws import headline as headline_of
from gnsfast.interval import Interval
from gnsfast.noise_scale import METRICS
from gnsfast.templates import template

SCALE = ("noise_scale", "lower", "upper")
"""The fields of a noise scale in a record."""

commas, interval = "{:,}".format, Interval.read
count = partial(short_count, whole=1e4, units="kMBT")
"""Steps and tokens: 26.2M."""


def page(name: str) -> Any:
    """A template with these filters."""
    filters = {own: each for own, each in globals().items() if callable(each)}
    return template("gnsfast.cli", name, **filters)


def number(value: float) -> str:
    """Three digits, so that a row fits a terminal of 80 columns."""
    if value < 999.5:
        return f"{value:.3g}"
    return "∞" if value == math.inf else short_count(value, 1000)


def span(found: Interval) -> str:
    """A value, with its interval if it has one."""
    value, lower, upper = map(number, found)
    return value if found.lower == found.upper else f"{value} ({lower} to {upper})"


def ends(found: Any) -> str:
    """The interval alone, if there is one; a unit that both ends share is written once."""
    if not isinstance(found, Interval) or found.lower == found.upper:
        return ""
    low, high = number(found.lower), number(found.upper)
    return f"{low.removesuffix(high[-1]) if high[-1].isalpha() else low}-{high}"


def amount(value: Any) -> str:
    """An interval without its ends, or a whole number."""
    return number(value.value) if isinstance(value, Interval) else f"{value:,.0f}"


def headline(saved: dict[str, float]) -> str:
    """What a schedule saves."""
    return headline_of(Saved(saved["scheduled"], saved["fixed"], int(saved["against"])))


def name_of(sample: dict[str, Any]) -> str:
    """A sample's id in words. Without a name it is (update, process, micro-batch, place)."""
    own = sample["id"]
    return f"({', '.join(map(str, own))})" if isinstance(own, list) else str(own)


def share(sample: dict[str, Any]) -> str:
    """A sample's share of its update."""
    return "no number" if sample["share"] is None else f"{sample['share']:.1%}"


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


def scale_in(record: dict[str, Any]) -> Interval:
    """A noise scale of a measurement, by either of its two names."""
    return Interval.read(record, *(Interval._fields if "value" in record else SCALE))


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
