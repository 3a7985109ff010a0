# SPDX-License-Identifier: Apache-2.0
"""Numbers in and out: checks that name what is wrong, and floats as strict JSON holds them."""

import math
import numbers
from typing import Any


def whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int of at least ``least``: any integer type, or a float such as 658e9.

    >>> from gnsfast.arguments import whole
    >>> whole("total_tokens", 658e9)
    658000000000
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def between(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """``value`` as a finite float in [least, most]."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not least <= value <= most:
        top = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number of at least {least:g}{top}, not {value!r}")
    return float(value)


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: null."""
    return value if math.isfinite(value) else None


def plain(value: float) -> float | str:
    """A float as strict JSON can hold it; ``float()`` reads it back."""
    return value if math.isfinite(value) else str(value)


def count(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``, whatever integer type it has."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if (whole := int(value)) >= least:
            return whole
    kind = "positive count" if least else "count of samples"
    raise ValueError(f"{name} must be a {kind}, not {value!r}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """One clear error for a word that is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
