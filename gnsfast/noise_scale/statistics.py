# SPDX-License-Identifier: Apache-2.0
"""The mathematics of the noise scale: from squared norms to an estimate with an interval.

Backward gives sample b the gradient u_b · g_b: g_b is the sample's own gradient (the mean over its
tokens) and u_b its weight in the loss, 1/n in a mean over n samples. With the true gradient G and
v_b = tr Cov(g_b), one update measures

    p = Σ u_b² ‖g_b‖²,      E p = U₂ |G|² + Σ u_b² v_b,      U₂ = Σ u_b²
    q = ‖Σ u_b g_b‖²,       E q = V  |G|² + Σ u_b² v_b,      V  = (Σ u_b)²

so that |G|² = (q - p) / (V - U₂) and Σ u_b² v_b = p - U₂ |G|² are unbiased (with unequal weights,
where E g_b does not depend on u_b). For equal weights they are those of McCandlish et al. 2018
(arXiv 1812.06162), appendix A, with B_small = 1. A ``local`` measurement takes q and V of each
micro-batch separately and sums them over the micro-batches.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnsfast.noise_scale.selection import deviations, student_quantile

MINIMUM_MEASUREMENTS = 5
"""Fewer measurements give no interval, because their variance is too uncertain."""

MINIMUM_FOR_DRIFT = 16
"""A window with fewer measurements is not tested for drift."""

NEIGHBOURS = 4
"""A test for drift compares updates that are up to this far apart."""

RESOLUTION = 1e-5
"""The smallest share of p that q - p can tell from the rounding of float32 sums. So it is also the
smallest noise scale, in samples, that is not taken for that of samples which are all alike."""


def grad_sqnorm_estimate(p: Tensor, q: Tensor, v: Tensor, u2: Tensor) -> Tensor:
    """Unbiased |G|² = (q - p) / (V - U₂); NaN for one sample, where V = U₂."""
    known = v - u2 > 1e-9 * v
    return torch.where(known, (q - p) / (v - u2), torch.nan)


def trace_estimate(p: Tensor, grad_sqnorm: Tensor, u2: Tensor, weight: Tensor) -> Tensor:
    """Unbiased tr Σ = (p - U₂ |G|²) / weight, of one update.

    tr Σ is n times the trace of the noise in the gradient that n samples give, so ``weight`` is V /
    n. In a mean over the tokens of samples with unequal lengths L_b, u_b = a L_b and ``weight`` is
    a² n L̄², with the mean length of the window instead of the update's. Then tr Σ is E[L² v] / L̄²
    where E[g | L] does not depend on L. Where it does, the noise scale lacks
    2 (E[L²] |G|² - E[L² g] · G) / (L̄² |G|²), which is a number of samples near one.
    """
    return (p - u2 * grad_sqnorm) / weight


def of_window(
    p: Tensor, grad_sqnorm: Tensor, u2: Tensor, weight: Tensor, weights: Tensor
) -> Tensor:
    """tr Σ of K updates [K, M], as ``trace_estimate``, but with the |G|² of the window, whose mean
    with ``weights`` [K] is known best. Deviations are those of the mean, to first order.
    """
    each = u2 / weight
    w = weights / weights.sum()
    mean = w @ grad_sqnorm
    return p / weight - each * mean - (w @ each) * (grad_sqnorm - mean)


def over_pairs(grad_sqnorm: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """|G|² of K updates [K, M], whose mean with ``weights`` [K] is the ratio of sums over updates.

    Where E g_b depends on L_b, the sum over pairs of samples of L_b L_c g_b · g_c has the mean
    n (n - 1) L̄² |G|² for the true gradient of a mean over all tokens. Divided by Σ_{b≠c} L_b L_c of
    the same few samples, as in one update, it has another mean. So the sums are added up over the
    window before they are divided. ``pairs`` [K] is Σ_{b≠c} L_b L_c / (n (n - 1) L̄²), which is 1
    for equal lengths. The deviation of an update from the mean is that of such a ratio.
    """
    shares = (pairs * (weights.sum() / (weights @ pairs)))[:, None]
    mean = weights @ (shares * grad_sqnorm) / weights.sum()
    return mean + shares * (grad_sqnorm - mean)


def length_variance(samples: Tensor, tokens: Tensor, microbatches: Tensor, ratio: Tensor) -> Tensor:
    """The variance of a sample's token count, Var L, from the totals of micro-batches alone.

    The total N_m of n_m samples has the mean n_m L̄ and the variance n_m Var L, so Var L is the
    mean over m of (N_m - n_m L̄)² / n_m. The arguments are sums over micro-batches: Σ n, Σ N, their
    number, and Σ N² / n.
    """
    mean = tokens / samples
    squares = ratio - 2 * mean * tokens + mean.square() * samples
    return squares.clamp(min=0.0) / (microbatches - 1).clamp(
        min=1.0
    )  # only rounding makes it negative


@dataclass(frozen=True)
class Moments:
    """Weighted means of tr Σ and |G|² over a window, and the covariance of these means.

    ``freedom`` is the degrees of freedom of the covariance, ``rounding`` what float32 sums may have
    added to the mean |G|².
    """

    trace: float
    grad_sqnorm: float
    var_trace: float
    cov: float
    var_grad_sqnorm: float
    freedom: float
    rounding: float = 0.0

    @property
    def ratio(self) -> float:
        """tr Σ / |G|² of the means; infinite where the mean |G|² is not positive."""
        return self.trace / self.grad_sqnorm if self.grad_sqnorm > 0 else math.inf


def moments(
    trace: Tensor, grad_sqnorm: Tensor, weights: Tensor, rounding: Tensor | None = None
) -> list[Moments]:
    """Means and their covariance from K measurements of M modules, float64 tensors [K, M].

    ``rounding`` [K, M] is what float32 sums may have added to |G|².

    For weights w that sum to one and deviations d from the mean, the variance of a mean is
    Σ w² d² / (1 - Σ w²), for any variance of each measurement. It has (Σ w²)² / Σ w⁴ - 1 degrees of
    freedom (Satterthwaite 1946).
    """
    w = weights / weights.sum()
    squares = w.square()
    taken = squares.sum().item()
    freedom = taken**2 / squares.square().sum().item() - 1.0
    mean_s, mean_g = w @ trace, w @ grad_sqnorm
    ds, dg = trace - mean_s, grad_sqnorm - mean_g
    factor = 1.0 / (1.0 - taken) if taken < 1.0 - 1e-9 else math.nan
    covariances = [squares @ d * factor for d in (ds * ds, ds * dg, dg * dg)]
    most = torch.zeros_like(mean_g) if rounding is None else w @ rounding
    columns = torch.stack([mean_s, mean_g, *covariances, most])
    return [
        Moments(s, g, var_s, cov, var_g, freedom, most)
        for s, g, var_s, cov, var_g, most in columns.T.tolist()
    ]


def fieller_interval(m: Moments) -> tuple[float, float]:
    """The 95 % interval of the noise scale tr Σ / |G|² given what is shown, as (lower, upper).

    Each end is one of Fieller's set (1954): an r with (S - r G)² = t² Var(S - r G), for the means S
    of tr Σ and G of |G|². Where G is far from zero, t is Student's. Elsewhere ``selection`` says
    how many standard errors t is, so that 95 % of the windows with a finite ``upper`` hold the
    truth, and 95 % of those that say "at least ``lower``". With samples whose norms have heavy
    tails (t with 3 degrees of freedom, lognormal), in many dimensions, it is 82 to 92 %: most
    windows lack the largest samples, and their tr Σ is too small.

    Where float32 cannot tell |G|² from zero, any noise scale is possible. Where it cannot tell tr Σ
    from zero, any up to ``RESOLUTION`` is.
    """
    too_small = m.grad_sqnorm**2 + m.var_grad_sqnorm <= m.rounding**2
    if m.freedom < MINIMUM_MEASUREMENTS - 1 - 1e-9 or too_small:
        return 0.0, math.inf
    z = m.grad_sqnorm / (math.sqrt(m.var_grad_sqnorm) or abs(m.grad_sqnorm) / 1e3)
    below, above = deviations(z, m.freedom)
    upper = fieller_end(m, below, 1) if below < z else math.inf
    return (0.0, RESOLUTION) if upper < RESOLUTION else (fieller_end(m, above, -1), upper)


def fieller_end(m: Moments, t: float, side: int) -> float:
    """The lower (``side`` -1) or the upper end (1) of Fieller's set of t standard errors."""
    # a r² - 2 b r + c ≤ 0
    a = m.grad_sqnorm**2 - t**2 * m.var_grad_sqnorm
    b = m.trace * m.grad_sqnorm - t**2 * m.cov
    c = m.trace**2 - t**2 * m.var_trace
    root = math.sqrt(max(0.0, b * b - a * c))  # r = S / G is in the set: only rounding is negative
    if side > 0:
        return max(0.0, (b + root) / a)
    if c <= 0:
        return 0.0
    return c / (b + root) if b > 0 else max(0.0, (b - root) / a)


def drifted(trace: Tensor, grad_sqnorm: Tensor, weights: Tensor) -> bool:
    """Whether the noise scale moves within a window, at the 1 % level.

    Two tests look at S - r G, float64 [K], with r of the whole window, whose sum is zero. Does it
    follow a line? Are updates up to ``NEIGHBOURS`` apart alike, although they measure different
    samples? A falling loss may multiply tr Σ and |G|² by a common factor. That does not change
    their ratio and is no drift. Neither is the rounding of samples that are all alike.
    """
    [whole] = moments(trace[:, None], grad_sqnorm[:, None], weights)
    few = len(trace) < MINIMUM_FOR_DRIFT or whole.freedom < MINIMUM_MEASUREMENTS - 1
    if few or not RESOLUTION < whole.ratio < math.inf:
        return False
    w = weights / weights.sum()
    d = w * (trace - whole.ratio * grad_sqnorm)
    ages = torch.arange(len(d), dtype=torch.float64)
    line = (ages - w @ ages) * d
    pairs = torch.cat([d[k:] * d[:-k] for k in range(1, NEIGHBOURS + 1)])
    quantile = student_quantile(0.995, whole.freedom), student_quantile(0.99, whole.freedom)
    return bool(
        line.sum().abs() > quantile[0] * line.norm() or pairs.sum() > quantile[1] * pairs.norm()
    )


def decay_weights(count: int, decay: float | None) -> Tensor:
    """float64 [count] weights of measurements, oldest first; the newest has weight 1."""
    ages = torch.arange(count - 1, -1, -1, dtype=torch.float64)
    return torch.ones_like(ages) if decay is None else decay**ages
