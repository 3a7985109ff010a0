# SPDX-License-Identifier: Apache-2.0
"""The mathematics of clusters: samples that belong together, as the rollouts of a prompt do.

The samples of different clusters are independent. Two samples of one cluster need not be: let S =
tr Cov(g_b) be the noise of a sample, and R = tr Cov(g_b, g_c) what two samples of a cluster have in
common. With u_b the weight of a sample in the loss, U_k = Σ u_b over cluster k, and W = Σ U_k²,

    p = Σ u_b² ‖g_b‖²,           E p = U₂ |G|² + U₂ S
    k = Σ_k ‖Σ_b∈k u_b g_b‖²,    E k = W |G|² + W R + U₂ (S - R)
    q = ‖Σ u_b g_b‖²,            E q = V |G|² + W R + U₂ (S - R)

because Σ over pairs of one cluster of u_b u_c is W, and U₂ = Σ u_b² is the part of b = c. So

    |G|² = (q - k) / (V - W),    U₂ S = p - U₂ |G|²,    W R + U₂ (S - R) = k - W |G|²

are unbiased, for clusters and weights of any sizes (where E g_b does not depend on u_b). They are
the equations of ``statistics`` with clusters as units: k and W take the place of p and U₂. For C
clusters of m samples of equal weights they are those of the analysis of variance (Searle, Casella
and McCulloch 1992, chapter 3): R is the variance between clusters, S - R that within them.

Of the samples alone, |G|² would be (q - p) / (V - U₂), whose mean is |G|² + R (W - U₂) / (V - U₂):
too large where R is positive, so that the noise scale is too small.

The noise of the update, k - W |G|², over that of as many independent samples, p - U₂ |G|², is the
design effect D = 1 + (m - 1) ρ (Kish 1965), with the correlation ρ = R / S and m = W / U₂, which is
the size of equal clusters. Nothing here assumes that R is positive: rollouts whose advantages sum
to zero over a prompt may have ρ < 0, down to -1 / (m - 1), where D is zero.

In clusters of f m samples that noise is (W R + U₂ (S - R) / f) / V. At f = 1 it falls with f by
(1 - ρ) / D of itself, and with the number of clusters by all of itself. So a sample more in a
cluster is *worth* (1 - ρ) / D of a sample in a new cluster. If a new cluster costs as much as c
samples, beside its own, the least noise for the money has √(c (1 - ρ) / ρ) samples in a cluster
(Cochran 1977, chapter 10).
"""

import math

import torch
from torch import Tensor

from gnsfast.interval import NOT_KNOWN, Interval
from gnsfast.noise_scale import statistics
from gnsfast.noise_scale.result import NO_CLUSTERS, ClusterNoiseScale, ModuleNoiseScale
from gnsfast.noise_scale.summaries import from_moments, usable_updates

CLUSTER_NUMBERS = 3
"""The numbers of an update: k, W and how many clusters."""


def summarize_clusters(
    p: Tensor, q: Tensor, numbers: Tensor, scalars: Tensor, local: bool, decay: float | None
) -> ClusterNoiseScale:
    """The result of a window of U updates, each weighted by its number of samples. An update with a
    single cluster does not count.

    Args:
        p, q: [U], of all units together.
        numbers: [U, CLUSTER_NUMBERS].
        scalars: [U, SCALARS], which determine the weights of the samples.
    """
    norms = torch.cat([p[:, None], q[:, None], numbers], 1)
    usable, of, weights = usable_updates(norms, scalars, local, decay)
    p, q, k, w, clusters = norms[usable].unbind(1)
    grad_sqnorm = statistics.grad_sqnorm_estimate(k, q, of.v, w)
    some = grad_sqnorm.isfinite()
    if not some.any():
        return NO_CLUSTERS
    weights = weights[some]
    p, k, w, v, u2, weight, pairs = (
        t[some, None] for t in (p, k, w, of.v, of.u2, of.weight, of.pairs)
    )
    grad_sqnorm = statistics.over_pairs(grad_sqnorm[some, None], pairs[:, 0], weights)
    of_clusters = statistics.of_window(k, grad_sqnorm, w, weight, weights)
    of_samples = statistics.of_window(p, grad_sqnorm, u2, weight, weights)
    size = weights @ (w / u2)[:, 0] / weights.sum()

    def ratio(above: Tensor, below: Tensor, rounding: Tensor) -> ModuleNoiseScale:
        rounding = statistics.RESOLUTION * rounding
        return from_moments(*statistics.moments(above, below, weights, rounding))

    rounding = torch.maximum(p, k) / (v - w)
    effect = ratio(of_clusters, of_samples, p / weight).interval
    return ClusterNoiseScale(
        **vars(ratio(of_clusters, grad_sqnorm, rounding)),
        independent=ratio(of_samples, grad_sqnorm, rounding),
        correlation=correlation(effect, size.item()),
        worth=worth(effect, size.item()),
        updates=int(some.sum()),
        clusters=int(clusters[some].sum()),
        samples=int(of.samples[some].sum()),
    )


def correlation(effect: Interval, size: float) -> Interval:
    """ρ, from the design effect of clusters of ``size`` samples. Its interval ends where ρ does."""
    if not size - 1 > 1e-9:  # each sample is a cluster
        return Interval(math.nan, -1.0, 1.0)
    value, lower, upper = ((end - 1) / (size - 1) for end in effect)
    return Interval(value, lower, min(upper, 1.0))


def worth(effect: Interval, size: float) -> Interval:
    """(1 - ρ) / D, which falls with the design effect D."""
    if not size - 1 > 1e-9:
        return NOT_KNOWN
    value, most, least = ((size / end - 1) / (size - 1) if end > 0 else math.inf for end in effect)
    return Interval(value, max(least, 0.0), most)
