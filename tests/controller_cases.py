# SPDX-License-Identifier: Apache-2.0
"""A controller with checks every 1,000 of 100,000 tokens, noise scales made by hand, and what
stands in for a measurement and for a tracker.
"""

import math
from collections.abc import Iterable
from typing import Any

from gnsfast import AdamNoiseScale, NoiseScale
from gnsfast.critical_batch.control import BatchSizeController, Decision
from gnsfast.noise_scale import DualNoiseScale

CHECK, TOTAL = 1000, 100_000


def make(**changes: Any) -> BatchSizeController:
    """Starts at 16 samples with the factor 2, so that noise scales from 16 on allow 32."""
    settings: dict[str, Any] = {
        "batch_size": 16,
        "factor": 2.0,
        "tokens_per_sample": 10,
        "total_tokens": TOTAL,
        "max_batch_size": 64,
        "check_every": CHECK,
        "data_parallel": 2,
        "micro_batch": 4,
    }
    return BatchSizeController(**settings | changes)


def noise(
    lower: float,
    value: float | None = None,
    upper: float | None = None,
    *,
    drift: bool = False,
    **others: NoiseScale,
) -> NoiseScale:
    """Bounded, with a value and an upper end that are 1.5 and 3 times the lower one. ``others`` are
    noise scales by hand whose ends are those in other metrics.
    """
    value = 1.5 * lower if value is None else value
    upper = 3 * lower if upper is None else upper
    more: dict[str, Any] = {}
    for metric, found in others.items():
        ends = found.noise_scale, found.lower, found.upper
        if metric == "adam":
            more[metric] = AdamNoiseScale(*ends, 1.0, 1.0, updates=8)
        else:
            more[metric] = DualNoiseScale(*ends, 1.0, 1.0, 1.0, metric, 8, (), {})
    return NoiseScale(
        *(value, lower, upper, 1.0, 1.0, drift, 20, 0, 320),
        per_module={},
        **more,
    )


def at_least(lower: float) -> NoiseScale:
    return noise(lower, math.inf, math.inf)


class Told:
    """Goes before the class that measures: says that the batch may grow once the controller has
    trained the tokens of ``places``.
    """

    at_first, per_place = 4.0, 1
    """The noise scale at the first place, and the tokens of a unit of ``places``."""

    def __init__(self, controller: BatchSizeController, places: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.controller, self.places = controller, places

    def compute(self) -> NoiseScale:
        super().compute()
        grown = sum(self.controller.tokens >= self.per_place * place for place in self.places)
        return at_least(self.at_first * 2 ** (grown - 1)) if grown else noise(1.0)


class Lines:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Any, step: int) -> None:
        self.seen.append((step, dict(metrics)))

    def close(self) -> None: ...


UNKNOWN = noise(0.0, math.nan, math.inf)


def feed(controller: BatchSizeController, scales: Iterable[NoiseScale]) -> list[Decision]:
    """One check after another; the decisions that came of them."""
    tokens, found = controller.tokens, []
    for scale in scales:
        tokens += CHECK
        if (decision := controller.update(tokens, scale)) is not None:
            found.append(decision)
    return found


def warm(**changes: Any) -> BatchSizeController:
    """A controller whose warm-up has just begun."""
    controller = make(**changes)
    [entered] = feed(controller, [UNKNOWN])
    assert entered.phase == controller.phase == "warm up"
    return controller
