# SPDX-License-Identifier: Apache-2.0
"""The estimate and its interval on problems whose noise scale is known."""

import math

import pytest
import torch
from torch import Tensor

from gnsfast.noise_scale import loss_factors
from gnsfast.noise_scale import statistics as st

N, D, WINDOW = 32, 1000, 64


def window(ratio: float, seeds: int, *, mean: float | None = None) -> tuple[Tensor, Tensor, float]:
    """tr Σ and |G|² of ``WINDOW`` measurements of N Gaussian samples, [WINDOW, seeds], and the true
    noise scale ``ratio * N``.

    Exact sampling of p and q: the mean of N samples and the χ² rest around it are independent.
    """
    signal = math.sqrt(D / (ratio * N)) if mean is None else mean
    shape = WINDOW, seeds
    along = signal + torch.randn(shape, dtype=torch.float64) / math.sqrt(N)
    across, rest = (
        2 * torch._standard_gamma(torch.full(shape, freedom / 2, dtype=torch.float64))
        for freedom in (D - 1.0, (N - 1.0) * D)
    )
    mean_sqnorm = along.square() + across / N
    return *estimates(N * mean_sqnorm + rest, N * N * mean_sqnorm), ratio * N


def estimates(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.ones((), dtype=torch.float64)
    # Sums over samples: u = 1, so V = N² and U₂ = N.
    grad_sqnorm = st.grad_sqnorm_estimate(p, q, one * N**2, one * N)
    return st.trace_estimate(p, grad_sqnorm, one * N, one * N), grad_sqnorm


def intervals(
    trace: Tensor, grad_sqnorm: Tensor
) -> tuple[list[st.Moments], list[tuple[float, float]]]:
    found = st.moments(trace, grad_sqnorm, torch.ones(len(trace), dtype=torch.float64))
    return found, [st.fieller_interval(m) for m in found]


def test_unbiased() -> None:
    """Means over 200 seeds within 3 standard errors of tr Σ and |G|²."""
    trace, grad_sqnorm, _ = window(10.0, 200)
    for measured, truth in ((trace.mean(0), D), (grad_sqnorm.mean(0), D / 320)):
        assert abs(measured.mean() - truth) < 3 * measured.std() / math.sqrt(200)


@pytest.mark.parametrize("ratio", [1.0, 10.0, 50.0, 125.0])
def test_coverage_over_all_seeds(ratio: float) -> None:
    """2000 seeds: one standard error of the coverage is 0.5 %."""
    trace, grad_sqnorm, truth = window(ratio, 2000)
    found, sets = intervals(trace, grad_sqnorm)
    assert 0.93 <= sum(low <= truth <= high for low, high in sets) / 2000 <= 0.97
    published = torch.tensor([m.ratio for m in found])
    assert published.median() == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("ratio", [1.0, 10.0, 50.0, 125.0])
def test_coverage_with_heavy_tails(ratio: float) -> None:
    """Samples whose noise is Student's t with 5 degrees of freedom, one scale a sample."""
    seeds, dim, hits = 300, 200, 0
    direction = torch.zeros(dim, dtype=torch.float64)
    direction[0] = math.sqrt(dim / (ratio * N))
    for _ in range(seeds):
        chi2 = 2 * torch._standard_gamma(torch.full((WINDOW, N, 1), 2.5, dtype=torch.float64))
        noise = torch.randn(WINDOW, N, dim) * (3 / chi2).sqrt()
        g = direction + noise
        p, q = g.square().sum((1, 2)), g.sum(1).square().sum(1)
        _, [(low, high)] = intervals(*(each[:, None] for each in estimates(p, q)))
        hits += low <= ratio * N <= high
    assert hits >= 0.9 * seeds


def test_no_signal_at_all() -> None:
    """With |G|² = 0 the window says "at least" in 95 % of all cases, with a finite bound."""
    _, sets = intervals(*window(1.0, 2000, mean=0.0)[:2])
    assert sum(high == math.inf for _, high in sets) >= 0.95 * 2000
    assert all(0 <= low < math.inf for low, _ in sets)
    assert sum(low > 0 for low, _ in sets) > 1900


def test_interval_is_the_set_that_the_test_keeps() -> None:
    """Each end is where (S - r G)² = t² Var(S - r G)."""
    m = st.Moments(100.0, 2.0, 25.0, 0.3, 0.04, 63.0)
    t = st.student_quantile(0.95, 63)
    for r in st.fieller_interval(m):
        variance = m.var_trace - 2 * r * m.cov + r * r * m.var_grad_sqnorm
        assert (m.trace - r * m.grad_sqnorm) ** 2 == pytest.approx(t * t * variance)


@pytest.mark.parametrize(
    "freedom, quantile", [(4, 2.776445), (5, 2.570582), (9, 2.262157), (63, 1.998341)]
)
def test_student_quantile(freedom: int, quantile: float) -> None:
    """Printed tables of Student's t at 95 %."""
    assert st.student_quantile(0.95, freedom) == pytest.approx(quantile, rel=6e-3)
    assert st.student_quantile(0.95, max(freedom, 9)) == pytest.approx(
        {9: 2.262157, 63: 1.998341}[max(freedom, 9)], rel=1e-4
    )


def test_too_few_measurements_say_nothing() -> None:
    trace, grad_sqnorm, _ = window(1.0, 1)
    _, [(low, high)] = intervals(trace[:4], grad_sqnorm[:4])
    assert (low, high) == (0.0, math.inf)


def test_decayed_weights_count_as_fewer_measurements() -> None:
    """Σw² = 1/(1-d²), Σw⁴ = 1/(1-d⁴): (1+d²)/(1-d²) of them."""
    trace, grad_sqnorm, _ = window(1.0, 1)
    [m] = st.moments(trace, grad_sqnorm, st.decay_weights(WINDOW, 0.8))
    assert m.freedom == pytest.approx(1.64 / 0.36 - 1, rel=1e-5)
    assert m.trace == pytest.approx(
        sum(0.8**k * t for k, t in enumerate(trace.flip(0).flatten().tolist()))
        / sum(0.8**k for k in range(WINDOW))
    )


def test_decayed_coverage() -> None:
    trace, grad_sqnorm, truth = window(10.0, 2000)
    found = st.moments(trace, grad_sqnorm, st.decay_weights(WINDOW, 0.95))
    hits = sum(low <= truth <= high for low, high in map(st.fieller_interval, found))
    assert 0.93 <= hits / 2000 <= 0.97


def test_drift() -> None:
    """1 % false alarms; a ratio that triples in mid-window is seen; a common factor is none."""
    trace, grad_sqnorm, _ = window(1.0, 1000)
    ones = torch.ones(WINDOW, dtype=torch.float64)
    alarms = sum(st.drifted(trace[:, s], grad_sqnorm[:, s], ones) for s in range(1000))
    assert 2 <= alarms <= 25
    falling = torch.linspace(4, 1, WINDOW, dtype=torch.float64)[:, None]
    alarms = [
        st.drifted(trace[:, s] * falling[:, 0], grad_sqnorm[:, s] * falling[:, 0], ones)
        for s in range(200)
    ]
    assert sum(alarms) <= 12
    later, weaker, _ = window(3.0, 200)
    half = WINDOW // 2
    seen = [
        st.drifted(
            torch.cat([trace[:half, s], later[half:, s]]),
            torch.cat([grad_sqnorm[:half, s], weaker[half:, s]]),
            ones,
        )
        for s in range(200)
    ]
    assert sum(seen) >= 190


def test_length_variance() -> None:
    """From totals of micro-batches of unequal size; truth 81 within 3 standard errors."""
    found = []
    for _ in range(400):
        n = torch.randint(2, 9, (64,)).double()
        totals = torch.stack([(50 + 9 * torch.randn(int(k), dtype=torch.float64)).sum() for k in n])
        count = torch.tensor(64.0, dtype=torch.float64)
        found.append(st.length_variance(n.sum(), totals.sum(), count, (totals**2 / n).sum()))
    mean = torch.stack(found)
    assert abs(mean.mean() - 81) < 3 * mean.std() / math.sqrt(400)


def test_squared_lengths_from_a_total() -> None:
    """Σ L² = N² / n + (n - 1) Var L, where Var L is the unbiased variance."""
    lengths = torch.tensor([3.0, 5.0, 10.0, 2.0], dtype=torch.float64)
    scalars = loss_factors.microbatch_scalars(4, 20, 1.0, "sum", False, lengths.device)
    known, unknown = scalars[-2:]
    torch.testing.assert_close(known + unknown * lengths.var(), lengths.square().sum())
