# SPDX-License-Identifier: Apache-2.0
"""Which windows are resolved, and confidence limits that allow for this choice.

A window is *resolved* if the mean G of its |G|² is clearly above zero. Measured in standard errors,
only a share ``FALSE`` of the windows without any signal come as far.

Who looks at resolved windows alone selects those in which chance has made G large. Where the true
noise scale is far above the batch size, limits that ignore this selection are wrong nearly every
time that they are shown. So the limits here are conditional: they are of G, *given* whether the
window is resolved. Let μ be the true |G|², and A the probability that a window with this μ is
resolved. The interval holds each μ that its test does not reject:

    resolved      the test of P(G or more), at a level of 5 % of A, less what the other limit, at
                  2.5 %, leaves out of the resolved windows
    unresolved    the test of P(G or less), at a level of 5 % of 1 - A

A μ for which fewer than ``SELDOM`` of the windows are shown like this one is left out as well.
Whatever the truth is, the interval then misses it in at most 5 % of the resolved windows, and of
the unresolved ones, unless these are fewer than ``SELDOM`` of all. Far above the threshold A is 1,
and the limits are the usual ones. Close to it they are wide. A true |G|² is not negative: where G
is far below zero, the limit above it is at least (√2 - 1) |G|.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

FALSE = 0.01
"""The share of windows without any signal, |G|² = 0, that count as resolved."""

SELDOM = 0.0125
"""The interval leaves out what would show a window like this more seldom than this. Above
``FALSE``, so that the interval of a resolved window is bounded: a noise scale whose |G|² is a
tenth of a standard error is the largest that it holds."""

HALVINGS = 16
"""Of a range of some 6 standard errors: the limits are exact to 1e-4 of one."""


def student_quantile(confidence: float, freedom: float) -> float:
    """The two-sided quantile of Student's t by its Cornish-Fisher expansion.

    At 95 % it is within 0.1 % from 5 degrees of freedom on, and within 0.6 % at 4.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**k for k, term in enumerate(terms))


def student_share(t: float, freedom: float) -> float:
    """The share of Student's t below ``t``, by the expansion of Hill 1970 (CACM algorithm 395).

    It is within 2e-6 from 4 degrees of freedom on.
    """
    a = freedom - 0.5
    b = 48 * a * a
    z = math.sqrt(a * math.log1p(t * t / freedom))
    last = (4 * z**7 + 33 * z**5 + 240 * z**3 + 855 * z) / (10 * b * (b + 0.8 * z**4 + 100))
    normal = math.copysign(z + (z**3 + 3 * z) / b - last, t)
    return 0.5 * math.erfc(-normal / math.sqrt(2))


def deviations(z: float, freedom: float) -> tuple[float, float]:
    """How far below and above its mean |G|² may lie, in standard errors; ``z`` is the mean in them.

    The distance below is infinite where the window is not resolved.
    """

    def share(t: float) -> float:
        return student_share(t, freedom)

    usual = student_quantile(0.95, freedom)
    threshold = student_quantile(1 - 2 * FALSE, freedom)
    seldom = student_quantile(1 - 2 * SELDOM, freedom)
    if z > threshold:

        def resolved(t: float) -> float:
            return share(z - t - threshold)

        if resolved(usual) > 1 - 1e-6:
            return usual, usual

        def may_be(t: float) -> bool:
            return share(-t) > min(0.05 * resolved(t), 0.975 - 0.95 * resolved(t))

        return _last(may_be, z - threshold + seldom), usual

    above = _last(lambda t: share(-t) > 0.05 * share(threshold - z - t), threshold - z + seldom)
    return math.inf, max(above, -math.sqrt(2) * z)


def _last(kept: Callable[[float], bool], end: float) -> float:
    """The last number from 0 to ``end`` that is kept, where 0 is."""
    if kept(end):
        return end
    start = 0.0
    for _ in range(HALVINGS):
        middle = (start + end) / 2
        start, end = (middle, end) if kept(middle) else (start, middle)
    return start
