# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read and write them: 20B tokens, 125M parameters, 12.5 %."""

import math
import re
from decimal import Decimal, InvalidOperation

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""A comma before three digits. "1,5" is refused, because it may mean 1.5."""

UNITS = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}


def parse_number(text: str, name: str = "a number") -> Decimal:
    """The number that "20B", "12.5K" or "0.7" means, at least 0; K to T are powers of 1000.

    >>> from gnsfast.counts import parse_number
    >>> float(parse_number("12.5K"))
    12500.0
    """
    digits = THOUSANDS.sub("", text.strip()).replace("_", "")
    unit = UNITS.get(digits[-1:].upper(), 1)
    try:
        value = Decimal(digits[:-1] if unit > 1 else digits) * unit
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or value < 0:
        raise ValueError(f"{name} is {text!r}, but must be a number such as 2.5, 125M or 1.5e9")
    return value


def parse_count(text: str, name: str = "a count") -> int:
    """The whole number that "20B", "1.5e9", "125M" or "4096" means.

    >>> from gnsfast.counts import parse_count
    >>> parse_count("1.5B")
    1500000000
    """
    value = parse_number(text, name)
    if value != value.to_integral_value():
        raise ValueError(f"{name} is {text!r}, but must be a whole number such as 4096 or 1.5e9")
    return int(value)


def exact_count(value: int) -> str:
    """``value`` with the largest suffix that is exact: 168B, 1536.

    >>> from gnsfast.counts import exact_count
    >>> exact_count(168_000_000_000), exact_count(1_500_000), exact_count(4096)
    ('168B', '1500K', '4096')
    """
    for suffix, unit in UNITS.items():
        if value and value % unit == 0:
            return f"{value // unit}{suffix}"
    return str(value)


def short_count(value: float, whole: float = 1e5, units: str = "KMBT") -> str:
    """``value`` with three digits, for tables: 1.23M. Below ``whole`` it has all digits.

    >>> from gnsfast.counts import short_count
    >>> short_count(1_229_800), short_count(658e9), short_count(2402.4)
    ('1.23M', '658B', '2,402')
    """
    if not whole <= abs(value) < math.inf:
        return f"{value:,.0f}"
    unit = max(k for k in range(len(units) + 1) if abs(value) >= 0.9995 * 1000**k)
    scaled = value / 1000**unit
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:,.0f}"
    return digits + units[unit - 1 : unit]


def three_digits(value: float, whole: float = 1e6) -> str:
    """Three digits, and no exponent below ``whole``: 0.0123, 45.6, 123,456."""
    return f"{value:,.0f}" if 100 <= abs(value) < whole else f"{value:,.3g}"


def in_samples(number: float) -> str:
    """A batch size in words: four digits, or all of its digits from 1,000 on."""
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


def counted(number: int, what: str) -> str:
    """A number and what it counts, in the singular for one: "1 update", "64 updates"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share of the elements in words, rounded down, so that only the whole is 100 %.

    >>> from gnsfast.counts import percent
    >>> percent(0.01123), percent(0.99999), percent(1.0)
    ('1.1 %', '99.9 %', '100 %')
    """
    return f"{math.floor(share * 1000) / 10:g} %"


def rounded_percent(share: float) -> str:
    """A share with one decimal: 43.1 %."""
    return f"{share:.1%}".replace("%", " %")
