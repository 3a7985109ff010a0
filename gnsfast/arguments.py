# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with errors that name the argument, and floats for strict JSON."""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value``, of any integer type, as an int of at least ``least``. Floats are refused."""
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integral or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Like ``integer``, but floats without a fraction are accepted too, such as 658e9 tokens.

    >>> from gnsfast.arguments import whole_number
    >>> whole_number("total_tokens", 658e9)
    658000000000
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
    exact = real and math.isfinite(value) and value == int(value)
    return integer(name, int(value) if exact else value, least)


def real_number(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """``value`` as a finite float in [least, most]."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not least <= value <= most:
        top = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number of at least {least:g}{top}, not {value!r}")
    return float(value)


def check_positive(**values: float) -> None:
    """Raise ValueError for a value that is not positive and finite. The error names it."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, not {value!r}")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError for a value that is not in ``allowed``."""
    if value not in (words := list(allowed)):
        *others, last = map(repr, words)
        choice = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} must be {choice}, not {value!r}")


def check_format(what: Any, record: Any, kind: str, format: int, remedy: str = "") -> None:
    """Raise ValueError for a JSON object of another kind or format."""
    found = record if isinstance(record, Mapping) else {}
    if (found.get("kind"), found.get("format")) != (kind, format):
        raise ValueError(
            f"{what} is a {found.get('kind')!r} of format {found.get('format')!r}, but this "
            f"version of gnsfast reads a {kind!r} of format {format}{remedy}"
        )


def finite_or_none(value: Any) -> Any:
    """``value``, or None for a NaN or an infinity, which JSON can only write as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_or_text(value: Any) -> Any:
    """``value``, or a NaN or an infinity as text, which ``float()`` reads back from JSON."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
