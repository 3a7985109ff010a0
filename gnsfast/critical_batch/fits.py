# SPDX-License-Identifier: Apache-2.0
"""Power laws that are fitted to measurements, with the intervals of their coefficients."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gnsfast.arguments import check_positive
from gnsfast.interval import Interval


def student_t(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t for a whole number of degrees of freedom, in float64.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4: the finite series of the distribution in
    θ = arctan(t / √ν), solved by bisection.

    >>> from gnsfast.critical_batch.laws import student_t
    >>> f"{student_t(0.95, 1):.3f} {student_t(0.95, 10):.3f}"
    '12.706 2.228'
    """
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(theta: float, freedom: int) -> float:
    """P(|T| < t) with θ = arctan(t / √ν)."""
    odd = freedom % 2
    sine, cosine = math.sin(theta), math.cos(theta)
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * cosine * cosine
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


@dataclass(frozen=True)
class PowerLaw:
    """y = ``prefactor`` · x ** ``exponent``, fitted to ``points`` measurements.

    ``residual`` is the standard deviation of ln y about the line; ``least`` and ``largest`` are the
    smallest and largest measured x.
    """

    exponent: Interval
    prefactor: Interval
    points: int
    confidence: float
    residual: float
    least: float
    largest: float
    _mean: float
    _square: float

    def predict(self, x: float) -> Interval:
        """y at ``x``, with an interval for a new measurement there.

        The interval includes the scatter of one measurement and the errors of both coefficients,
        but not that the law may not hold outside ``least`` to ``largest``.
        """
        check_positive(x=x)
        value = math.log(self.prefactor.value) + self.exponent.value * math.log(x)
        distance = (math.log(x) - self._mean) ** 2 / self._square
        spread = self.residual * math.sqrt(1 + 1 / self.points + distance)
        return _exp(value, student_t(self.confidence, self.points - 2) * spread)

    def mean_until(self, x: float) -> Interval:
        """The mean of y over all values from 0 to ``x``, with an interval as that of ``predict``.

        With the exponent b the mean is ``prefactor`` · x ** b / (1 + b). To first order in the
        errors of both coefficients, that is a multiple of y at x · exp(-1 / (1 + b)).

        Raises:
            ValueError: for an exponent of -1 or less, which has no mean from 0.
        """
        b = self.exponent.value
        if b <= -1:
            raise ValueError(
                f"the fitted power law has the exponent {b:.3g}, and its mean over a run is finite "
                "only for an exponent above -1"
            )
        there = self.predict(x * math.exp(-1 / (1 + b)))
        share = math.exp(b / (1 + b)) / (1 + b)
        return there.times(share)

    def extrapolated(self, x: float) -> float:
        """The factor by which ``x`` is beyond the measured range; 1 within it."""
        return max(1.0, x / self.largest, self.least / x)

    def __str__(self) -> str:
        e, p = self.exponent, self.prefactor
        return (
            f"{p.value:.4g} · x^{e.value:.3f} ({self.confidence:.0%}: exponent {e.lower:.3f} to "
            f"{e.upper:.3f}, prefactor {p.lower:.3g} to {p.upper:.3g}), {self.points} points"
        ).replace("%", " %")


def fit_power_law(x: Sequence[float], y: Sequence[float], *, confidence: float = 0.95) -> PowerLaw:
    """Fit y = a · x ** b by least squares of ln y on ln x.

    The intervals use Student's t with n - 2 degrees of freedom, for errors of y that are
    independent, relative and of one size. Three points leave one degree of freedom, so that the
    intervals are wide.

    Raises:
        ValueError: for fewer than three points, different lengths, a value that is not positive and
            finite (the message names it), and x that are all equal.

    Source: Draper & Smith, Applied Regression Analysis, 3rd edition (1998), chapters 1 and 3.

    >>> from gnsfast.critical_batch import fit_power_law
    >>> law = fit_power_law([1e9, 4e9, 16e9, 64e9], [105, 195, 410, 790])
    >>> print(law)
    0.003978 · x^0.490 (95 %: exponent 0.441 to 0.540, prefactor 0.00127 to 0.0124), 4 points
    >>> f"{law.predict(128e9).value:.0f}"
    '1111'
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must be of one length, not {len(x)} and {len(y)}")
    if len(x) < 3:
        raise ValueError(f"a power law needs at least 3 measurements, not {len(x)}")
    for name, values in (("x", x), ("y", y)):
        wrong = [v for v in values if not 0 < v < math.inf]
        if wrong:
            raise ValueError(f"{name} holds {wrong[0]}: a power law needs positive, finite values")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    if max(x) == min(x):
        raise ValueError(f"every x is {x[0]}: the exponent needs measurements at different x")
    log_x, log_y = ([math.log(v) for v in values] for values in (x, y))
    points, mean = len(x), statistics.fmean(log_x)
    square = math.fsum((u - mean) ** 2 for u in log_x)
    b, origin = statistics.linear_regression(log_x, log_y)
    rest = math.fsum((v - origin - b * u) ** 2 for u, v in zip(log_x, log_y))
    residual = math.sqrt(rest / (points - 2))
    error = student_t(confidence, points - 2) * residual
    of_exponent = error / math.sqrt(square)
    return PowerLaw(
        Interval(b, b - of_exponent, b + of_exponent),
        _exp(origin, error * math.sqrt(1 / points + mean**2 / square)),
        points,
        confidence,
        residual,
        least=min(x),
        largest=max(x),
        _mean=mean,
        _square=square,
    )


def _exp(value: float, half: float) -> Interval:
    """exp(value ± half), infinite where float64 overflows."""
    values = (value, value - half, value + half)
    return Interval(*(math.exp(v) if v < 709 else math.inf for v in values))
