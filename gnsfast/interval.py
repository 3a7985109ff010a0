# SPDX-License-Identifier: Apache-2.0
"""A value with its interval, and how it is said."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gnsfast.arguments import finite_or_none


class Interval(NamedTuple):
    """A value with its lower and upper bound.

    ``upper`` is infinite where only "at least ``lower``" is known, and ``lower`` 0 where only "at
    most ``upper``" is. NaN is unknown: a ``lower`` that is NaN belongs to a value without an
    interval.
    """

    value: float
    lower: float
    upper: float

    @staticmethod
    def read(record: Mapping[str, Any], *names: str) -> "Interval":
        """What ``record()`` has written, or a log under ``names`` of its own."""
        value, lower, upper = (record.get(name) for name in names or Interval._fields)
        return Interval(
            math.nan if value is None else value,
            math.nan if lower is None else lower,
            math.inf if upper is None else upper,
        )

    def record(self) -> dict[str, float | None]:
        """For JSON, which has neither NaN nor infinity."""
        return {name: finite_or_none(end) for name, end in self._asdict().items()}

    def times(self, factor: float) -> "Interval":
        """The value and both ends, times a positive number."""
        return Interval(*(end * factor for end in self))

    def over(self, other: "Interval") -> "Interval":
        """The ratio of two positive values; an end that one of them lacks is 0 or infinite.

        >>> Interval(8.0, 6.0, 10.0).over(Interval(2.0, 1.0, math.inf))
        Interval(value=4.0, lower=0.0, upper=10.0)
        """
        value = self.value / other.value if 0 < other.value < math.inf else math.nan
        upper = self.upper / other.lower if other.lower > 0 else math.inf
        return Interval(value, self.lower / other.upper, upper)

    @property
    def resolved(self) -> bool:
        """Whether both ends are known."""
        return self.lower > 0 and math.isfinite(self.upper)

    @property
    def drawn(self) -> bool:
        """Whether a logarithmic axis can show the value: positive, with both ends or none."""
        none = math.isnan(self.lower) and math.isinf(self.upper)
        return self.value > 0 and (self.resolved or none)

    @property
    def only(self) -> float | None:
        """The one end that is known, where the other is not."""
        if self.lower > 0:
            return self.lower if math.isinf(self.upper) else None
        return self.upper if 0 < self.upper < math.inf else None

    def ends(self, number: Callable[[float], str]) -> str:
        """The interval in words: "3 to 5", "at least 3", "at most 5"; empty where it says nothing.

        >>> Interval(4.0, 3.0, math.inf).ends("{:g}".format)
        'at least 3'
        """
        if self.resolved:
            return f"{number(self.lower)} to {number(self.upper)}"
        if self.lower > 0:
            return f"at least {number(self.lower)}"
        return f"at most {number(self.upper)}" if math.isfinite(self.upper) else ""

    def said(self, number: Callable[[float], str]) -> str:
        """The value with its interval: "4 (3 to 5)", or the end that is known."""
        ends = self.ends(number)
        if math.isnan(self.value):
            return ends
        return number(self.value) + (f" ({ends})" if ends else "")


NOT_KNOWN = Interval(math.nan, 0.0, math.inf)
