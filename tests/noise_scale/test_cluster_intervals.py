# SPDX-License-Identifier: Apache-2.0
"""The statistics of clusters against gradients that are drawn: means without bias, and intervals
that hold the truth.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gnsfast.interval import Interval
from gnsfast.noise_scale import clusters, loss_factors, statistics, summarize_clusters

DIMENSIONS, WINDOWS, UPDATES = 40, 400, 16


class Drawn(NamedTuple):
    """Gradients G + a_k + e_b - centre · mean_k(e), whose parts have variances in all dimensions
    together. ``size`` is that of clusters.
    """

    square: float
    between: float
    within: float
    centre: float
    size: int

    @property
    def noise(self) -> float:
        """S"""
        return self.between + self.within + self.shift

    @property
    def common(self) -> float:
        """R"""
        return self.between + self.shift

    @property
    def shift(self) -> float:
        return self.within * (self.centre**2 - 2 * self.centre) / self.size

    @property
    def of_clusters(self) -> float:
        return self.noise + (self.size - 1) * self.common

    def norms(self, count: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """p, k and q of updates that are means."""
        shape, n = (count, number, self.size, DIMENSIONS), number * self.size
        each = lambda variance: math.sqrt(variance / DIMENSIONS)
        e = torch.randn(shape, dtype=torch.float64) * each(self.within)
        a = torch.randn(shape, dtype=torch.float64)[:, :, :1] * each(self.between)
        g = each(self.square) + a + e - self.centre * e.mean(2, keepdim=True)
        g /= n
        sums = g.sum(2)
        p, k = g.square().flatten(1).sum(1), sums.square().flatten(1).sum(1)
        return p, k, sums.sum(1).square().sum(1)


CASES = {
    "alike": Drawn(0.5, 1.0, 3.0, 0.0, 4),
    "independent": Drawn(0.5, 0.0, 4.0, 0.0, 4),
    "centred": Drawn(0.5, 0.1, 4.0, 0.8, 4),
    "pairs": Drawn(0.2, 2.0, 2.0, 0.0, 2),
    "far above the batch": Drawn(0.01, 1.0, 3.0, 0.0, 4),
}
CLUSTERS = 12


def summaries(drawn: Drawn) -> list[Any]:
    torch.manual_seed(0)
    n = CLUSTERS * drawn.size
    [scalars] = [loss_factors.microbatch_scalars(n, None, 1.0, "mean", False, torch.device("cpu"))]
    shares = torch.tensor([CLUSTERS * (drawn.size / n) ** 2, CLUSTERS], dtype=torch.float64)
    found = []
    for _ in range(WINDOWS):
        p, k, q = drawn.norms(UPDATES, CLUSTERS)
        numbers = torch.cat([k[:, None], shares.expand(UPDATES, 2)], 1)
        all_scalars = scalars.expand(UPDATES, -1)
        found.append(summarize_clusters(p, q, numbers, all_scalars, False, None))
    return found


@pytest.mark.parametrize("name", CASES)
def test_means_and_intervals(name: str) -> None:
    drawn = CASES[name]
    found = summaries(drawn)

    def unbiased(values: list[float], truth: float) -> None:
        t = torch.tensor(values, dtype=torch.float64)
        error = t.std() / math.sqrt(WINDOWS)
        assert abs(t.mean() - truth) < 4 * error, (t.mean(), truth, error)

    unbiased([f.grad_sqnorm for f in found], drawn.square)
    unbiased([f.trace for f in found], drawn.of_clusters)
    unbiased([f.independent.trace for f in found], drawn.noise)

    def covered(intervals: list[Interval], truth: float) -> None:
        inside = [i.lower <= truth <= i.upper for i in intervals]
        assert sum(inside) / WINDOWS > 0.92, (sum(inside) / WINDOWS, truth)

    rho, m = drawn.common / drawn.noise, drawn.size
    covered([f.interval for f in found], drawn.of_clusters / drawn.square)
    covered([f.independent.interval for f in found], drawn.noise / drawn.square)
    covered([f.correlation for f in found], rho)
    covered([f.worth for f in found], (1 - rho) / (1 + (m - 1) * rho))
    assert found[0].correlation.upper - found[0].correlation.lower < 0.3
    resolved = [f for f in found if f.resolved]
    assert len(resolved) > 0.9 * WINDOWS or name == "far above the batch"


def test_samples_taken_to_be_independent_are_biased() -> None:
    """By R (W - U₂) / (V - U₂), as the docstring says."""
    drawn = CASES["alike"]
    n, m = CLUSTERS * drawn.size, drawn.size
    torch.manual_seed(0)
    p, _, q = drawn.norms(4000, CLUSTERS)
    v, u2 = torch.ones_like(p), torch.full_like(p, 1 / n)
    naive = statistics.grad_sqnorm_estimate(p, q, v, u2)
    bias = drawn.common * (m / n - 1 / n) / (1 - 1 / n)
    error = float(naive.std()) / math.sqrt(len(naive))
    assert abs(float(naive.mean()) - drawn.square - bias) < 4 * error < bias / 4


def test_adding_samples_to_clusters_is_worth_what_it_says() -> None:
    """The derivative of the noise by the size of clusters, over that by their number."""
    between, within, size, step = 1.0, 3.0, 4.0, 1e-4
    noise = lambda clusters, m: (between + within / m) / clusters
    by_size = noise(12.0, size) - noise(12.0, size * (1 + step))
    by_number = noise(12.0, size) - noise(12.0 * (1 + step), size)
    effect = 1 + (size - 1) * between / (between + within)
    found = clusters.worth(Interval(effect, 1.0, size), size)
    assert found.value == pytest.approx(by_size / by_number, rel=1e-3)
    assert (found.lower, found.upper) == (0.0, 1.0)  # copies, independent samples


def test_no_number_is_clamped() -> None:
    """An interval ends where no correlation can be; the estimate may be beyond."""
    assert clusters.correlation(Interval(-0.5, 0.0, 7.0), 3.0) == (-0.75, -0.5, 1.0)
    assert clusters.worth(Interval(-0.5, 0.0, 7.0), 3.0) == (math.inf, 0.0, math.inf)
    assert math.isnan(clusters.correlation(Interval(1.0, 0.9, 1.1), 1.0).value)
    assert math.isnan(clusters.worth(Interval(1.0, 0.9, 1.1), 1.0).value)
