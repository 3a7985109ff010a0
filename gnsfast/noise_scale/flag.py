# SPDX-License-Identifier: Apache-2.0
"""``flag``: whether a batch size fits the critical batch size that a noise scale gives."""

import math
import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gnsfast.arguments import real_number
from gnsfast.counts import in_samples
from gnsfast.interval import Interval
from gnsfast.noise_scale.result import NO_ESTIMATE, NoiseScale

OVER = 1.2
"""A batch larger than this many times the estimated critical batch size is warned of."""

VERDICTS = {"too small": -1.0, "fair": 0.0, "too large": 1.0}
"""The numbers that trackers get; ``"unresolved"`` has none."""


class Factor(Protocol):
    """A critical batch size / noise scale with its interval, such as a ``CriticalBatchFactor``."""

    @property
    def value(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...
    @property
    def metric(self) -> str: ...


@dataclass(frozen=True)
class Flag:
    """What a noise scale says of a batch size.

    Args:
        verdict: ``"too small"``, ``"fair"``, ``"too large"`` or ``"unresolved"``.
        estimate: the critical batch size in samples, with the interval ``lower`` to ``upper``.
        reason: why, in words.
    """

    verdict: str
    batch_size: float
    estimate: float
    lower: float
    upper: float
    reason: str

    @property
    def excess(self) -> float:
        """How many times the estimate the batch size is."""
        return excess(self.batch_size, self.estimate)

    def metrics(self) -> dict[str, float]:
        """Numbers for a tracker: ``batch/flag``, -1 too small, 0 fair, 1 too large, and ``cbs/*``
        as of a ``BatchSizeController``.
        """
        critical = Interval(self.estimate, self.lower, self.upper)
        found = critical_batch_metrics(self.batch_size, critical)
        if self.verdict in VERDICTS:
            found["batch/flag"] = VERDICTS[self.verdict]
        return found

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


def flag(
    batch_size: float, result: NoiseScale, factor: float | Factor, *, metric: str | None = None
) -> Flag:
    """Whether a batch size fits the critical batch size (CBS), noise scale times ``factor``.

    With the interval of the CBS, which is that of the noise scale times that of the factor:

    - ``"too large"``: all of it is below the batch size;
    - ``"too small"``: all of it is at least twice the batch size;
    - ``"unresolved"``: it reaches from below the batch size to twice that or more, or nothing is
      measured;
    - ``"fair"``: anything else. Nothing speaks against this batch size.

    Where the noise scale drifts within the window, ``result.present`` takes its place, as the
    window's mean lags behind. The other metrics and clusters have none, and are unresolved there.

    Args:
        batch_size: samples of an optimizer step, over all processes.
        result: ``gns.compute()``.
        factor: CBS / noise scale, as a number or measured by branches (``CriticalBatchFactor``).
            The noise scale alone, ``factor=1.0``, is not the CBS (Merrill et al. 2025).
        metric: of the noise scale; by default that of the factor, ``"euclidean"`` for a number.

    Raises:
        ValueError: for a batch size or a factor that is not positive, and where ``result`` lacks
            the noise scale in ``metric``.

    >>> model = torch.nn.Linear(5, 2)
    >>> gns = gnsfast.GradientNoiseScale(model)
    >>> print(gnsfast.flag(32, gns.compute(), factor=8.0))
    unresolved: the noise scale is not measured yet
    """
    if not real_number("batch_size", batch_size, 0.0):
        raise ValueError("batch_size must be positive, not 0")
    value, lower, upper, metric = checked_factor(factor, metric)
    scale, now = result.under(metric), ""
    if result.drift:
        alone = metric == "euclidean" and result.clusters is None
        scale, now = result.present if alone else NO_ESTIMATE, "present "
    found = Interval(value * scale.noise_scale, lower * scale.lower, upper * scale.upper)
    if math.isnan(found.value):
        lags = "the noise scale drifts within the window, whose mean lags behind: a shorter window "
        reason = f"{lags}shows more" if result.drift else "the noise scale is not measured yet"
        return Flag("unresolved", batch_size, math.nan, 0.0, math.inf, reason)
    verdict = verdict_on(batch_size, found)
    reason = f"the {now}critical batch size is {_why(verdict, batch_size, found)}"
    return Flag(verdict, batch_size, *found, reason)


def checked_factor(factor: float | Factor, metric: str | None) -> tuple[float, float, float, str]:
    """The value, interval and metric of a factor.

    Raises:
        ValueError: for what is no positive number, and for a measured factor of another metric.
    """
    if all(hasattr(factor, name) for name in ("value", "lower", "upper", "metric")):
        measured = cast(Factor, factor)
        if metric not in (None, measured.metric):
            raise ValueError(
                f"the factor was measured for metric={measured.metric!r}, and not for {metric!r}: "
                "leave metric out"
            )
        return measured.value, measured.lower, measured.upper, measured.metric
    value = _as_number(factor)
    return value, value, value, metric or "euclidean"


def _as_number(factor: Any) -> float:
    """A positive real number of Python, NumPy or a tensor of one element."""
    if isinstance(factor, (str, os.PathLike)):
        raise ValueError(
            f"factor={os.fspath(factor)!r} is a path: pass "
            f"factor=CriticalBatchFactor.load({os.fspath(factor)!r})"
        )
    own = factor
    if getattr(factor, "ndim", None) is not None and math.prod(factor.shape) == 1:
        own = factor.item()
    if not (value := real_number("factor", own, 0.0)):
        raise ValueError("factor must be positive, not 0: it is CBS / noise scale")
    return value


def verdict_on(batch_size: float, critical: Interval, growth: float = 2) -> str:
    """What the interval of the critical batch size says: see ``flag``, where ``growth`` is 2."""
    if critical.lower >= growth * batch_size:
        return "too small"
    if critical.upper < batch_size:
        return "too large"
    if critical.lower < batch_size and critical.upper >= growth * batch_size:
        return "unresolved"
    return "fair"


def _why(verdict: str, batch_size: float, critical: Interval) -> str:
    batch, least = f"the batch size of {in_samples(batch_size)}", critical.lower
    if verdict == "too small":
        return f"at least {in_samples(least)}, {least / batch_size:.3g} times {batch}"
    if verdict == "too large":
        over = excess(batch_size, critical.value)
        times = "" if math.isinf(over) else f", which is {over:.3g} times the estimate"
        return f"at most {in_samples(critical.upper)}, less than {batch}{times}"
    ends = critical.ends(in_samples) or f"at least {in_samples(least)}"
    span = critical.said(in_samples) if critical.resolved else ends
    fits = "which does not tell whether " if verdict == "unresolved" else "which "
    return f"{span}, {fits}{batch} fits"


def excess(batch_size: float, estimate: float) -> float:
    """How many times an estimate a batch size is; infinite where that is not positive."""
    return batch_size / estimate if estimate > 0 else math.inf


def critical_batch_metrics(batch_size: float, critical: Interval) -> dict[str, float]:
    """``cbs/estimate`` with its ends and ``cbs/ratio``, as far as they are known."""
    if math.isnan(critical.value):
        return {}
    found = {"cbs/estimate_lo": critical.lower}
    if math.isfinite(critical.upper):
        found["cbs/estimate_hi"] = critical.upper
    if critical.resolved:
        found |= {"cbs/estimate": critical.value, "cbs/ratio": batch_size / critical.value}
    return found
