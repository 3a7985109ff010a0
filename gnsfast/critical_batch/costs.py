# SPDX-License-Identifier: Apache-2.0
"""What a batch size costs: its steps and tokens to a loss, and the time and money that these take.

To one loss, S steps of B samples see E = S B samples. With the critical batch size B_crit = b/a of
S(B) = a + b/B they obey (S / S_min - 1)(E / E_min - 1) = 1, that is S = S_min (1 + B_crit / B) and
E = E_min (1 + B / B_crit): McCandlish et al. 2018 (arXiv 1812.06162), section 2. B_crit drifts
while a model trains, and warmup-stable-decay schedules bend the curve (arXiv 2601.05034), so these
costs are a guide between measured points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gnsfast.arguments import check_positive, whole_number
from gnsfast.interval import Interval


def steps_share(batch_size: float, critical: float) -> float:
    """S / S_min = 1 + B_crit / B.

    >>> from gnsfast.critical_batch.laws import steps_share, tokens_share
    >>> steps_share(256, 1024), tokens_share(256, 1024)
    (5.0, 1.25)
    """
    check_positive(batch_size=batch_size, critical=critical)
    return 1 + critical / batch_size


def tokens_share(batch_size: float, critical: float) -> float:
    """E / E_min = 1 + B / B_crit."""
    check_positive(batch_size=batch_size, critical=critical)
    return 1 + batch_size / critical


def twenty_percent(critical: float, optimal: float) -> float:
    """Zhang et al.'s critical batch size from b/a: B* = 0.2 B_crit + 1.2 B_opt.

    If steps fell as 1/B from B_opt on, there would be (a + b/B_opt) B_opt / B of them. At B* there
    are 20 % more: a + b/B* = 1.2 (a + b/B_opt) B_opt / B*.

    Source: Zhang et al. 2025 (arXiv 2410.21676): B* = b/(5a) + 1.2 B_opt, with B_opt = 256 samples
    of 512 tokens.

    >>> from gnsfast.critical_batch.laws import from_twenty_percent, twenty_percent
    >>> twenty_percent(4096, 256), from_twenty_percent(1126.4, 256)
    (1126.4, 4096.0)
    """
    check_positive(critical=critical, optimal=optimal)
    return 0.2 * critical + 1.2 * optimal


def from_twenty_percent(twenty: float, optimal: float) -> float:
    """b/a from Zhang et al.'s critical batch size: B_crit = 5 (B* - 1.2 B_opt).

    Raises:
        ValueError: for a B* of at most 1.2 B_opt, which no b/a gives.
    """
    check_positive(twenty=twenty, optimal=optimal)
    if twenty <= 1.2 * optimal:
        raise ValueError(
            f"the critical batch size by the 20 % rule is {twenty:g}, but must be above 1.2 B_opt "
            f"= {1.2 * optimal:g}"
        )
    return 5 * (twenty - 1.2 * optimal)


@dataclass(frozen=True)
class Cost:
    """The cost of training with ``batch_size`` samples to the planned loss.

    The interval of B_crit gives each value its own. ``days``, ``gpus`` and ``gpu_hours`` are None
    without a throughput, and ``money`` without a price.
    """

    batch_size: int
    steps: Interval
    tokens: Interval
    gpus: float | None = None
    days: Interval | None = None
    gpu_hours: Interval | None = None
    money: Interval | None = None


def trade_off(
    critical: Interval,
    batch_sizes: Sequence[int],
    *,
    tokens: float,
    tokens_per_sample: int,
    batch_size: int | None = None,
    gpus: int | None = None,
    tokens_per_second: float | None = None,
    gpu_hour_price: float | None = None,
) -> list[Cost]:
    """The cost of reaching the planned loss with each of ``batch_sizes``.

    The samples per GPU stay constant: a batch twice as large runs on twice the GPUs, each as fast
    as before.

    Args:
        critical: B_crit (b/a) in samples, with its interval; ``upper`` may be infinite.
        tokens: the tokens that the plan trains with ``batch_size`` samples. Without ``batch_size``,
            they are E_min, the tokens that a very small batch needs to reach the loss.
        gpus: the number of GPUs that train a batch of ``batch_size``.
        tokens_per_second: the measured throughput of one GPU.
        gpu_hour_price: the price of one GPU for an hour, in any currency.

    Raises:
        ValueError: for a number that is not positive, a throughput without ``gpus`` and
            ``batch_size``, or a price without a throughput.

    >>> from gnsfast.critical_batch.laws import Interval
    >>> from gnsfast.critical_batch import trade_off
    >>> [cost] = trade_off(
    ...     Interval(4096, 2048, 8192), [4096], tokens=20e9, tokens_per_sample=2048, batch_size=1024
    ... )
    >>> f"{cost.tokens.value:.3g} tokens, {cost.tokens.lower:.3g} to {cost.tokens.upper:.3g}"
    '3.2e+10 tokens, 2.67e+10 to 4e+10'
    """
    whole_number("tokens_per_sample", tokens_per_sample)
    check_positive(tokens=tokens, lower=critical.lower, critical=critical.value)
    if not critical.lower <= critical.value <= critical.upper:
        raise ValueError(
            f"the critical batch size {critical.value:g} is outside of its interval, "
            f"{critical.lower:g} to {critical.upper:g}"
        )
    timed = {"gpus": gpus, "tokens_per_second": tokens_per_second, "batch_size": batch_size}
    if gpus is not None or tokens_per_second is not None:
        missing = [name for name, value in timed.items() if value is None]
        if missing:
            raise ValueError(f"days and GPU-hours also need {' and '.join(missing)}")
    elif gpu_hour_price is not None:
        raise ValueError("gpu_hour_price also needs gpus and tokens_per_second")
    given = {**timed, "gpu_hour_price": gpu_hour_price}
    check_positive(**{name: value for name, value in given.items() if value is not None})
    costs = []
    for b in batch_sizes:
        whole_number("a batch size", b)
        values = [tokens * _ratio(b, batch_size, c) for c in critical]
        seen = Interval(values[0], min(values), max(values))
        steps = seen.times(1 / (b * tokens_per_sample))
        if gpus is None or tokens_per_second is None or batch_size is None:
            costs.append(Cost(b, steps, seen))
            continue
        used = gpus * b / batch_size
        hours = seen.times(1 / tokens_per_second / 3600)
        money = None if gpu_hour_price is None else hours.times(gpu_hour_price)
        costs.append(Cost(b, steps, seen, used, hours.times(1 / used / 24), hours, money))
    return costs


def _ratio(b: float, planned: float | None, critical: float) -> float:
    """Tokens at ``b`` divided by those at the planned batch size, or by E_min without one."""
    if math.isinf(critical):
        return 1.0
    return tokens_share(b, critical) / (tokens_share(planned, critical) if planned else 1.0)
