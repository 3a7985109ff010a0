# SPDX-License-Identifier: Apache-2.0
"""A controller's decisions, and the estimate that they follow from."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gnsfast.arguments import finite_or_none, finite_or_text
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor
from gnsfast.interval import NOT_KNOWN, Interval
from gnsfast.noise_scale import NoiseScale


@dataclass(frozen=True)
class Decision:
    """One change of batch size or phase, or a warning.

    Args:
        tokens: trained so far, at the end of an optimizer step.
        phase: from now on: ``"calibrate"``, ``"warm up"`` or ``"monitor"``; ``"schedule"`` where
            thresholds decide.
        old, new: batch sizes in samples, equal for a change of phase and for a warning.
        lr_factor: multiplies the learning rate.
        estimate: the critical batch size in samples (noise scale times factor), with the interval
            ``lower`` to ``upper``. NaN before the first measurement, infinite where the noise scale
            is infinite.
        warning: the batch exceeds the estimate by more than ``over`` allows, or is too small under
            a controller that does not make it larger than the first.
    """

    tokens: int
    phase: str
    old: int
    new: int
    lr_factor: float
    estimate: float
    lower: float
    upper: float
    reason: str
    warning: bool = False

    def record(self) -> dict[str, Any]:
        """A line for a JSON log, with null for numbers that are not finite."""
        return {"kind": "decision"} | {k: finite_or_none(v) for k, v in asdict(self).items()}

    def state(self) -> dict[str, Any]:
        """All fields for JSON without loss, with infinity and NaN as text."""
        return {k: finite_or_text(v) for k, v in asdict(self).items()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Decision":
        """The decision whose ``state()`` this is."""
        numbers = ("lr_factor", "estimate", "lower", "upper")
        return Decision(**state | {k: float(state[k]) for k in numbers})


@dataclass(frozen=True)
class Evidence:
    """The critical batch size by one measurement: noise scale times factor, in samples.

    ``may_grow``: its lower end may justify a larger batch. ``may_warn``: its upper end may justify
    a smaller batch or a warning.
    """

    critical: Interval = NOT_KNOWN
    may_grow: bool = False
    may_warn: bool = False


def evidence(found: NoiseScale, factor: CriticalBatchFactor, previous: float) -> Evidence:
    """The critical batch size that a window's noise scale gives.

    - Not measured: it justifies nothing.
    - One-sided ("at least ``lower``"): it may justify growth, but no warning.
    - Drifting: the window's mean lags behind the present value. It may justify growth unless it is
      below the ``previous`` estimate, and a warning unless it is above.

    Each end of the interval is that of the noise scale times that of the factor.

    Raises:
        TypeError: where ``found`` is not a ``NoiseScale``.
        ValueError: where the noise scale in the factor's metric is not measured.
    """
    if not isinstance(found, NoiseScale):
        raise TypeError(f"noise_scale must be gns.compute() or gns.compute itself, not {found!r}")
    scale = found.under(factor.metric)
    value = factor.value * scale.noise_scale
    if math.isnan(value):
        return Evidence()
    return Evidence(
        Interval(value, factor.lower * scale.lower, factor.upper * scale.upper),
        may_grow=not found.drift or value >= previous,
        may_warn=math.isfinite(scale.upper) and (not found.drift or value <= previous),
    )
