# SPDX-License-Identifier: Apache-2.0
"""The noise scale at the weights of the newest update.

The mean over a window lags behind a noise scale that moves. So one straight line is fitted to tr Σ
over the window, and another to |G|². The weight of an update falls linearly with its age. The
estimate is the ratio of the two lines at the newest update. Its interval is Fieller's, from the
deviations of the updates from their lines.

That interval is for the trend alone. The noise scale itself leaves its trend for a few updates at a
time, because |G|² changes along directions in which the weights oscillate: by 40 % in a small GPT.
No window shows how far off it is at the newest update. So the interval is widened by the usual size
of such an excursion, which neighbouring updates show. Their measurement errors are independent,
since their samples are. What their deviations have in common is therefore the noise scale's own.
The variance of the excursions is taken as twice the upper 95 % limit of the neighbours' covariance.
That is right for excursions that last for about two updates, and too much for longer ones. An
excursion of a single update is not seen.
"""

import math

from torch import Tensor

from gnsfast.noise_scale.selection import student_quantile
from gnsfast.noise_scale.statistics import MINIMUM_MEASUREMENTS, Moments, fieller_interval

MINIMUM_UPDATES = 16
"""Fewer give no estimate, because two lines and a correlation need more."""


def present(
    trace: Tensor, grad_sqnorm: Tensor, weights: Tensor, ages: Tensor
) -> tuple[float, float, float]:
    """The noise scale where ``ages`` are zero, and its 95 % interval, from float64 [K]; NaN where
    there are too few updates.
    """
    if len(trace) < MINIMUM_UPDATES:
        return math.nan, 0.0, math.inf
    w = weights * (1 - ages / (ages.max() + 1))
    w = w / w.sum()
    middle = w @ ages
    x = ages - middle
    spread = w @ x.square()
    take = w * (1 - x * middle / spread)  # the line's value at age 0 is the sum of these shares
    leverage = w * (1 + x.square() / spread)

    def deviations(y: Tensor) -> Tensor:
        line = w @ y + (w * x) @ y / spread * x
        return (y - line) / (1 - leverage).sqrt()

    ds, dg, squares = deviations(trace), deviations(grad_sqnorm), take.square()
    var_s, cov, var_g = ((squares @ d).item() for d in (ds * ds, ds * dg, dg * dg))
    freedom = (squares.sum().square() / squares.square().sum()).item() - 2
    trace_end, grad_sqnorm_end = (take @ trace).item(), (take @ grad_sqnorm).item()
    if freedom < MINIMUM_MEASUREMENTS - 1 or trace_end <= 0:  # few of them weigh much, or noise
        return math.nan, 0.0, math.inf
    m = Moments(trace_end, grad_sqnorm_end, var_s, cov, var_g, freedom)
    lower, upper = fieller_interval(m)
    if lower <= 0:
        return m.ratio, 0.0, upper
    at = m.ratio if math.isfinite(upper) else lower
    own = student_quantile(0.95, freedom) * _excursions((ds - at * dg) / m.trace, w)
    if math.isinf(upper):
        return m.ratio, lower * math.exp(-own), upper
    below, above = (
        math.exp(math.hypot(math.log(ratio), own)) for ratio in (m.ratio / lower, upper / m.ratio)
    )
    return m.ratio, m.ratio / below, m.ratio * above


def _excursions(relative: Tensor, w: Tensor) -> float:
    """The standard deviation of the noise scale's own logarithm, from relative deviations of single
    updates.
    """
    variance = (w @ relative.square()).item()
    pairs = (w[1:] * w[:-1]).sqrt()
    common = (pairs @ (relative[1:] * relative[:-1]) / pairs.sum()).item()
    most = common + 1.645 * variance * math.sqrt((w @ w).item())
    return math.sqrt(math.log1p(min(max(2 * most, 0.0), variance)))
