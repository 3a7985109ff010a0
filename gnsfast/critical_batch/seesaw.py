# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that follow a schedule of the learning rate: Seesaw, and its opposite, to switch
late.
"""

import math
from collections.abc import Callable, Sequence

from gnsfast.arguments import real_number, whole_number
from gnsfast.counts import exact_count, in_samples
from gnsfast.critical_batch.schedule import BatchSizeSchedule
from gnsfast.interval import Interval

POINTS = 1000
"""Points of a run at which a shape is looked at, to find its peak and that it only falls after."""

LATE = 0.75
"""By public notes on arXiv 2602.14208, the share of its largest run before the larger batches."""


def seesaw(
    shape: Callable[[float], float],
    batch_size: int,
    *,
    total_tokens: float,
    tokens_per_sample: int,
    critical: float | Interval,
    growth: int = 2,
    max_batch_size: int | None = None,
    late: float = 0.0,
) -> BatchSizeSchedule:
    """The batch grows by ``growth`` wherever ``shape`` has made the learning rate that much less.

    Train it with ``shape`` and the rule ``lr="sqrt"``: at each cut by α the learning rate is then
    divided by √α and the batch multiplied by α. Between two cuts the learning rate follows
    ``shape``, and where the batch no longer grows it does so alone. With ``lr="linear"`` (SGD) the
    learning rate is the old one at each cut.

    Args:
        shape: tokens trained -> factor of the optimizer's learning rate, at most 1, which only
            falls after its warm-up, such as ``cosine``, ``linear`` or ``wsd``.
        batch_size: samples of the first steps.
        critical: the critical batch size in samples that you measured, with its interval or
            without one. Its lower end is never exceeded.
        growth: α, a whole number.
        max_batch_size: the batch does not grow beyond it.
        late: the share of the tokens before which the batch does not grow.

    Raises:
        ValueError: where the batch would exceed the critical one; where the shape never falls to 1
            / ``growth``, or rises again; for an invalid number.

    Source: Meterez et al. 2025, Seesaw (arXiv 2510.14717), Algorithm 1. Two schedules (η α^-k, B
    β^k) reach the same loss with the same tokens where α β is the same for SGD (Theorem 1), and α
    √β for normalized SGD, their model of Adam, while noise dominates its gradients (the corollary
    of that theorem). Of those with one α √β, this is the one with the largest batch that does not
    diverge, √α and α. The paper holds the learning rate between two cuts.

    >>> from gnsfast.critical_batch import seesaw
    >>> from gnsfast.critical_batch.control import cosine
    >>> shape = cosine(20_000_000_000, final=0.1)
    >>> schedule = seesaw(
    ...     shape, 256, total_tokens=20e9, tokens_per_sample=2048, critical=3000,
    ...     max_batch_size=1024,
    ... )
    >>> [(s.batch_size, round(shape(s.tokens) * schedule.lr_factor_at(s.tokens), 2))
    ...  for s in schedule.stages]
    [(256, 1.0), (512, 0.71), (1024, 0.5)]
    """
    whole_number("growth", growth, 2)
    total = whole_number("total_tokens", total_tokens)
    size, begins = batch_size, real_number("late", late, 0.0, 1.0) * total
    sizes = {0: whole_number("batch_size", batch_size)}
    for tokens in falls(shape, total, growth):
        size *= growth
        if max_batch_size is not None and size > whole_number("max_batch_size", max_batch_size):
            break
        sizes[max(tokens, math.ceil(begins))] = size
    return _reached([*sizes.items()], total, tokens_per_sample, critical)


def late_switch(
    batch_size: int,
    large: int,
    *,
    total_tokens: float,
    tokens_per_sample: int,
    critical: float | Interval,
    late: float = LATE,
) -> BatchSizeSchedule:
    """``batch_size`` samples until the share ``late`` of the tokens, then ``large`` ones.

    Raises:
        ValueError: where ``large`` exceeds the lower end of the critical batch size; for an invalid
            number.

    Source: Wang et al. 2026 (arXiv 2602.14208): for hard tasks the best schedule keeps small
    batches for most of the run, and of two stages the second one's share of the data falls with
    more data. Their theory has a constant learning rate (``lr="keep"``). Public notes on the paper
    give 1,024 and, from 75 % on, 2,560 samples for its largest run, a mixture of experts with 1.1B
    parameters and 1T tokens.

    >>> from gnsfast.critical_batch import late_switch
    >>> late_switch(
    ...     1024, 2560, total_tokens=1e12, tokens_per_sample=4096, critical=4096
    ... ).thresholds
    ((0, 1024), (750000001024, 2560))
    """
    total = whole_number("total_tokens", total_tokens)
    at = math.ceil(real_number("late", late, 0.0, 1.0) * total)
    return _reached([(0, batch_size), (at, large)], total, tokens_per_sample, critical)


def falls(shape: Callable[[float], float], total_tokens: int, growth: float = 2.0) -> list[int]:
    """The tokens at which ``shape`` has fallen to 1 / growth, 1 / growth², ... before the end.

    Raises:
        ValueError: where it never does, rises again after it has fallen, or has no peak of 1.

    >>> from gnsfast.critical_batch.control import wsd
    >>> from gnsfast.critical_batch.seesaw import falls
    >>> falls(wsd(1000, decay=400, final=0.1), 1000)
    [823, 934, 989]
    """
    grid = [total_tokens * k // POINTS for k in range(POINTS + 1)]
    values = [shape(tokens) for tokens in grid]
    peak = values.index(max(values))
    if not 1 / growth < values[peak] <= 1 + 1e-9:
        raise ValueError(
            f"a shape is the factor of the optimizer's learning rate and has a peak of 1, not of "
            f"{values[peak]:.3g}: divide it by its peak"
        )
    for tokens, before, after in zip(grid[peak:], values[peak:], values[peak + 1 :]):
        if after > before + 1e-9:
            raise ValueError(
                f"the learning rate rises again after {tokens:,} tokens, and a batch that grows "
                "where it falls needs one that only falls: leave out its restarts"
            )
    if values[-1] > 1 / growth:
        half = "half" if growth == 2 else f"1/{growth:g}"
        raise ValueError(
            f"the learning rate never falls to {half} of its peak, where the batch would grow: it "
            f"ends at {values[-1]:.3g}. Let it end lower, such as final={0.8 / growth:g}"
        )
    cuts, low = list[int](), grid[peak]
    while (level := growth ** -(len(cuts) + 1.0)) >= values[-1]:
        high = total_tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if shape(middle) <= level else (middle, high)
        if high == total_tokens:
            break
        cuts.append(high)
    return cuts


def _reached(
    thresholds: Sequence[tuple[int, int]],
    total_tokens: int,
    tokens_per_sample: int,
    critical: float | Interval,
) -> BatchSizeSchedule:
    """The schedule of the thresholds that a step reaches, none above the critical batch size.

    They are whole samples, as Megatron-LM reads them: steps begin after whole samples.
    """
    length = whole_number("tokens_per_sample", tokens_per_sample)
    sizes = {-(-tokens // length) * length: size for tokens, size in thresholds}
    schedule = BatchSizeSchedule([*sizes.items()], total_tokens, length)
    stages = [stage for stage in schedule.stages if stage.steps]
    least = critical.lower if isinstance(critical, Interval) else critical
    real_number("critical", least, 1.0)
    for before, stage in zip([None, *stages], stages):
        if stage.batch_size > least:
            remedy = "pass a smaller first batch size, or measure the critical one again"
            if before is not None:
                remedy = (
                    f"pass max_batch_size={before.batch_size} (--max-batch {before.batch_size}): "
                    "from there on the learning rate falls alone"
                )
            raise ValueError(
                f"{stage.batch_size:,} samples from {exact_count(stage.threshold)} tokens on are "
                f"more than the critical batch size of at least {in_samples(least)} samples: "
                f"{remedy}"
            )
    reached = [(stage.threshold, stage.batch_size) for stage in stages]
    return BatchSizeSchedule(reached, total_tokens, length)
