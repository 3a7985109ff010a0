# SPDX-License-Identifier: Apache-2.0
"""A controller with checks every 1,000 of 100,000 tokens, and noise scales made by hand."""

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
            more[metric] = AdamNoiseScale(*ends, 1.0, 1.0, updates=8, left_out=())
        else:
            more[metric] = DualNoiseScale(*ends, 1.0, 1.0, 1.0, metric, 8, (), {})
    return NoiseScale(
        *(value, lower, upper, 1.0, 1.0, drift, 20, 0, 320),
        per_module={},
        **more,
    )


def at_least(lower: float) -> NoiseScale:
    return noise(lower, math.inf, math.inf)


UNKNOWN = noise(0.0, math.nan, math.inf)


def feed(
    controller: BatchSizeController, scales: Iterable[NoiseScale], start: int | None = None
) -> list[Decision]:
    """One check after another; the decisions that came of them."""
    tokens = controller.tokens if start is None else start
    found = []
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
