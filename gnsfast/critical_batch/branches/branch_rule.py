# SPDX-License-Identifier: Apache-2.0
"""Merrill et al.'s rule: the critical batch size from the losses of branches (arXiv 2505.23971).

Branch k trains Δ tokens from a checkpoint with the batch size k · B and the learning rate f(k) · η.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gnsfast.arguments import real_number
from gnsfast.errors import BranchError

LAST_STEPS = 64
"""The noise of a branch's loss is estimated from this many of its newest steps."""


class Matching(NamedTuple):
    """The rule's result, as multiples of the base batch size.

    Args:
        largest: k*, the largest k that matches every smaller one.
        lower: k*, or 0 where it is the smallest k tested, which has no smaller one to match.
        upper: the next larger k tested; infinite where there is none.
        uneven: each k below ``largest`` that does not match every smaller one.
    """

    largest: float
    lower: float
    upper: float
    uneven: tuple[float, ...] = ()


def check_grid(grid: Iterable[float], batch_size: int, multiple: int = 1) -> tuple[float, ...]:
    """The grid in ascending order, where each k · ``batch_size`` is a multiple of ``multiple``.

    Raises:
        ValueError: for a grid without 1 or with a single k, a k that is not positive or occurs
            twice, and a batch that is no whole number or no such multiple.

    >>> from gnsfast.critical_batch.branches import check_grid
    >>> check_grid((1, 4, 0.5, 2), batch_size=32, multiple=8)
    (0.5, 1.0, 2.0, 4.0)
    """
    ks = sorted(float(k) for k in grid)
    listed = ", ".join(f"{k:g}" for k in ks)
    if not all(math.isfinite(k) and k > 0 for k in ks):
        raise ValueError(f"every k must be positive and finite: {listed}")
    if len(set(ks)) < len(ks):
        raise ValueError(f"no k may occur twice: {listed}")
    if 1.0 not in ks or len(ks) < 2:
        raise ValueError(f"k must include 1, the run's own batch, and at least one other: {listed}")
    for k in ks:
        size = round(k * batch_size)
        if not math.isclose(size, k * batch_size, rel_tol=1e-9) or size % multiple:
            raise ValueError(
                f"k = {k:g} times the batch size of {batch_size} gives {k * batch_size:g} samples, "
                f"which must be a {'whole number' if multiple == 1 else f'multiple of {multiple}'}"
                ": leave out this k, or choose another"
            )
    return tuple(ks)


def smoothed(losses: Sequence[float], alpha: float = 0.5) -> float:
    """L_k: the exponential moving average of a branch's losses after its last step.

    Equals ``L = losses[0]; for x in losses[1:]: L = alpha * x + (1 - alpha) * L``: ``alpha`` is the
    weight of the newest step, and the first loss is the initial value.

    Raises:
        ValueError: without a loss, or for an alpha outside of (0, 1].

    >>> from gnsfast.critical_batch.branches import smoothed
    >>> smoothed([4.0, 2.0, 1.0])
    2.0
    """
    return math.fsum(w * x for w, x in zip(_weights(len(losses), alpha), losses))


def smoothed_std(losses: Sequence[float], alpha: float = 0.5) -> float:
    """The standard deviation of ``smoothed(losses)`` that comes from the noise of single steps.

    The variance σ² of a single step's loss is the mean of (x[t-1] - 2 x[t] + x[t+1])² / 6 over the
    ``LAST_STEPS`` newest steps: a steadily falling loss does not count as noise in these second
    differences (Gasser et al. 1986). For independent steps the moving average with weights w has
    the variance σ² Σ w²: after many steps σ² α / (2 - α), a third of σ² at α = 0.5. This is the
    noise of the batches, not that of the weights reached. NaN with fewer than three steps.

    >>> from gnsfast.critical_batch.branches import smoothed_std
    >>> smoothed_std([5.0, 4.0, 3.0, 2.0])
    0.0
    """
    last = losses[-LAST_STEPS:]
    if len(last) < 3:
        return math.nan
    second = [a - 2 * b + c for a, b, c in zip(last, last[1:], last[2:])]
    variance = math.fsum(d * d for d in second) / (6 * len(second))
    return math.sqrt(variance * math.fsum(w * w for w in _weights(len(losses), alpha)))


def matching(losses: Mapping[float, float], tolerance: float = 0.01) -> Matching:
    """The largest k whose L_k is at most ``tolerance`` above the L of *every* smaller k.

    The critical batch size lies between ``lower`` and ``upper`` times the base batch size.

    Args:
        losses: L_k by k, NaN or infinite where a loss was not finite. Such a branch with k > 1
            matches nothing.
        tolerance: ε, in the units of the loss.

    Raises:
        ValueError: for a tolerance that is negative or not finite.
        BranchError: without a loss for k = 1; where a branch with k <= 1 diverged.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.

    >>> from gnsfast.critical_batch.branches import matching
    >>> matching({0.5: 2.000, 1: 2.004, 2: 2.009, 4: 2.011})
    Matching(largest=2, lower=2, upper=4, uneven=())
    """
    real_number("tolerance", tolerance, 0.0)
    ks = sorted(losses)
    if 1 not in losses:
        raise BranchError("the branch with k = 1 is missing, and all others are compared with it")
    for k in ks:
        if k <= 1 and not math.isfinite(losses[k]):
            raise BranchError(
                f"the branch with k = {k:g} diverged, although its batch size and learning rate do "
                "not exceed the run's own: the run itself is not stable at this checkpoint"
            )
    least, matched = math.inf, []
    for k in ks:
        loss = losses[k] if math.isfinite(losses[k]) else math.inf
        if loss <= least + tolerance:
            matched.append(k)
        least = min(least, loss)
    largest = matched[-1]
    return Matching(
        largest,
        lower=0.0 if largest == ks[0] else largest,
        upper=next((k for k in ks if k > largest), math.inf),
        uneven=tuple(k for k in ks if k < largest and k not in matched),
    )


def _weights(steps: int, alpha: float) -> list[float]:
    """The weight of each step in the moving average, oldest first; the sum is 1."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be above 0 and at most 1, not {alpha!r}")
    if not steps:
        raise ValueError("the losses of a branch are empty: it has taken no step")
    newer = [alpha * (1 - alpha) ** age for age in range(steps - 1)]
    return [(1 - alpha) ** (steps - 1), *reversed(newer)]
