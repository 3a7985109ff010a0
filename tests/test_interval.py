# SPDX-License-Identifier: Apache-2.0
"""A value with its interval: what is known of it, how it is said, and what JSON holds."""

import json
import math
from typing import Any

import pytest

from gnsfast.interval import NOT_KNOWN, Interval

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("found", "ends", "said", "only", "drawn", "resolved"),
    [
        (Interval(4.0, 3.0, 5.0), "3 to 5", "4 (3 to 5)", None, True, True),
        (Interval(NAN, 3.0, 5.0), "3 to 5", "3 to 5", None, False, True),
        (Interval(4.0, 3.0, INF), "at least 3", "4 (at least 3)", 3.0, False, False),
        (Interval(INF, 3.0, INF), "at least 3", "inf (at least 3)", 3.0, False, False),
        (Interval(NAN, 3.0, INF), "at least 3", "at least 3", 3.0, False, False),
        (Interval(NAN, 0.0, 5.0), "at most 5", "at most 5", 5.0, False, False),
        (Interval(-0.1, 0.0, 5.0), "at most 5", "-0.1 (at most 5)", 5.0, False, False),
        (Interval(4.0, NAN, 5.0), "at most 5", "4 (at most 5)", 5.0, False, False),
        (Interval(4.0, NAN, INF), "", "4", None, True, False),
        (Interval(-4.0, NAN, INF), "", "-4", None, False, False),
        (Interval(4.0, 0.0, INF), "", "4", None, False, False),
        (NOT_KNOWN, "", "", None, False, False),
    ],
)
def test_forms(
    found: Interval, ends: str, said: str, only: Any, drawn: bool, resolved: bool
) -> None:
    number = "{:g}".format
    assert (found.ends(number), found.said(number)) == (ends, said)
    assert (found.only, found.drawn, found.resolved) == (only, drawn, resolved)
    read = Interval.read(json.loads(json.dumps(found.record(), allow_nan=False)))
    if not math.isinf(found.value):  # JSON has one word for it and for NaN
        assert repr(read) == repr(found)


def test_names_of_a_log() -> None:
    line = {"gns/adam": 4.0, "gns/adam_lo": 3.0, "loss": 1.0}
    assert Interval.read(line, "gns/adam", "gns/adam_lo", "gns/adam_hi") == (4.0, 3.0, INF)
    assert Interval(4.0, 3.0, INF).times(2.0) == (8.0, 6.0, INF)
