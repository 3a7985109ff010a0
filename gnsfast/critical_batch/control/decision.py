# SPDX-License-Identifier: Apache-2.0
"""What a controller decided, and the estimate it was decided by."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gnsfast.arguments import finite, plain
from gnsfast.critical_batch.factor import CriticalBatchFactor
from gnsfast.noise_scale import NoiseScale


@dataclass(frozen=True)
class Decision:
    """One change of batch size or phase, or a warning.

    ``tokens`` were trained so far, at an optimizer-step boundary, and ``phase`` is in force from
    here: ``"calibrate"``, ``"warm up"`` or ``"monitor"``. ``old`` and ``new`` are batch sizes in
    samples, equal for a change of phase and for a warning. The learning rate is multiplied with
    ``lr_factor`` and Adam's beta2 becomes ``beta2 ** beta2_power``. ``estimate`` is that of the
    critical batch size in samples (noise scale times factor) with the interval ``lower`` to
    ``upper``, NaN before a first measurement, infinite where a noise scale is. ``warning``: the
    batch exceeds the estimate by more than was allowed.
    """

    tokens: int
    phase: str
    old: int
    new: int
    lr_factor: float
    beta2_power: float
    estimate: float
    lower: float
    upper: float
    reason: str
    warning: bool = False

    def record(self) -> dict[str, Any]:
        """A line for a JSON log: what is not finite is null."""
        return {"kind": "decision"} | {
            k: finite(v) if isinstance(v, float) else v for k, v in asdict(self).items()
        }

    def plain(self) -> dict[str, Any]:
        """The fields as JSON holds them without loss, infinity and NaN as words."""
        return {k: plain(v) if isinstance(v, float) else v for k, v in asdict(self).items()}

    @staticmethod
    def of(fields: dict[str, Any]) -> "Decision":
        """What ``plain()`` gave, as a decision."""
        numbers = ("lr_factor", "beta2_power", "estimate", "lower", "upper")
        return Decision(**fields | {k: float(fields[k]) for k in numbers})


@dataclass(frozen=True)
class Estimate:
    """The critical batch size by one measurement: noise scale times factor, in samples.

    ``grows``: the interval may speak for a larger batch; ``warns``: the value may speak against the
    present one.
    """

    value: float = math.nan
    lower: float = 0.0
    upper: float = math.inf
    grows: bool = False
    warns: bool = False


def estimate(found: NoiseScale, factor: CriticalBatchFactor, before: float) -> Estimate:
    """What a window's noise scale says of the critical batch size.

    - Not measured: nothing.
    - One-sided ("at least ``lower``"): evidence for growth. Its value is none for a warning.
    - Drifting: the window's mean lags behind what moves. It speaks for growth while it does not
      fall, and for a warning while it does not rise, against the estimate ``before`` it.

    The interval holds the factor's: its lower end is that of the noise scale times that of the
    factor.

    Raises:
        TypeError: for what is no noise scale.
        ValueError: without a noise scale under Adam's metric where the factor belongs to it.
    """
    if not isinstance(found, NoiseScale):
        raise TypeError(
            f"noise_scale must be what gns.compute() gives, or gns.compute itself, not {found!r}"
        )
    scale = found.adam if factor.metric == "adam" else found
    if scale is None:
        raise ValueError(
            "metric='adam' needs the noise scale under Adam's metric: "
            "GradientNoiseScale(model, metric='adam', optimizer=optimizer)"
        )
    value = factor.value * scale.noise_scale
    if math.isnan(value):
        return Estimate()
    return Estimate(
        value,
        factor.lower * scale.lower,
        factor.upper * scale.upper,
        grows=not found.drift or value >= before,
        warns=scale.resolved and (not found.drift or value <= before),
    )
