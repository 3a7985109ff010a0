# SPDX-License-Identifier: Apache-2.0
"""The noise scale at the weights of the newest update, and whether it moves within the window."""

import math

import pytest
import torch
from torch import Tensor

from gnsfast.noise_scale import statistics as st
from gnsfast.noise_scale import summarize
from gnsfast.noise_scale.present import present

F64 = torch.float64
N, D, K = 32, 100, 64
ONES, AGES = torch.ones(K, dtype=F64), torch.arange(K - 1, -1, -1, dtype=F64)


def measured(ratio_K: Tensor, common_K: Tensor) -> tuple[Tensor, Tensor]:
    """tr Σ and |G|² of updates of N Gaussian samples, at noise scales ``ratio_K * N``, where both
    are ``common_K`` times as large.
    """
    along = (D / (ratio_K * N)).sqrt() + torch.randn(K, dtype=F64) / math.sqrt(N)
    across, rest = (
        2 * torch._standard_gamma(torch.full((K,), freedom / 2, dtype=F64))
        for freedom in (D - 1.0, (N - 1.0) * D)
    )
    grad_sqnorm = along.square() + across / N - rest / (N * (N - 1.0))
    return common_K * rest / (N - 1.0), common_K * grad_sqnorm


def waves(correlation: float, deviation: float = 0.4) -> Tensor:
    """exp of a process whose neighbours have this correlation."""
    steps = deviation * torch.randn(K, dtype=F64)
    for k in range(1, K):
        steps[k] = correlation * steps[k - 1] + math.sqrt(1 - correlation**2) * steps[k]
    return steps.exp()


def rates(kind: str, windows: int = 200) -> tuple[float, float, float, float]:
    """How often the present and the mean hold the noise scale at the end, how often drift is seen,
    and the median of upper / lower of the present.
    """
    hits, of_mean, drifts, widths = 0, 0, 0, []
    for _ in range(windows):
        ratio, common = ONES, ONES
        if kind == "moving":  # doubles while tr Σ and |G|² halve together
            ratio, common = 2 ** (-AGES / K), 2 ** (AGES / K)
        elif kind != "still":
            ratio = waves(float(kind))
        trace, grad_sqnorm = measured(ratio, common)
        truth = N * ratio[-1].item()
        _, low, high = present(trace, grad_sqnorm, ONES, AGES)
        hits += low <= truth <= high
        widths.append(high / low)
        [mean] = st.moments(trace[:, None], grad_sqnorm[:, None], ONES)
        low, high = st.fieller_interval(mean)
        of_mean += low <= truth <= high
        drifts += st.drifted(trace, grad_sqnorm, ONES)
    width = sorted(widths)[windows // 2]
    return hits / windows, of_mean / windows, drifts / windows, width


def test_still() -> None:
    """A noise scale that stays: both hold it, and the present is twice as wide."""
    hits, of_mean, drifts, width = rates("still")
    assert hits >= 0.95 and of_mean >= 0.92 and drifts <= 0.03
    assert width < 2.5


def test_moving() -> None:
    """The mean lags behind, and drift is seen."""
    hits, of_mean, drifts, width = rates("moving")
    assert hits >= 0.95 and of_mean < 0.2 and drifts > 0.95
    assert width < 4


@pytest.mark.parametrize("correlation, seen", [("0.5", 0.2), ("0.9", 0.8)])
def test_waves(correlation: str, seen: float) -> None:
    """Around a noise scale that stays, by 40 % up and down, from update to update or slowly."""
    hits, of_mean, drifts, _ = rates(correlation)
    assert hits >= 0.95 and of_mean < 0.4 and drifts > seen


def test_lines_are_continued() -> None:
    """Without noise the value is exact, also where the last updates were skipped."""
    for newest in (0.0, 3.0):
        ages = AGES + newest
        value, low, high = present(5 + ages, 0.5 + 0.02 * ages, ONES, ages)
        assert value == pytest.approx(10) and low == pytest.approx(10) == high


def test_end_of_the_lines_is_that_of_weighted_least_squares() -> None:
    weights = torch.rand(K, dtype=F64) + 0.5
    trace, grad_sqnorm = measured(ONES, ONES)
    root = (weights * (1 - AGES / K)).sqrt()[:, None]
    columns = torch.stack([torch.ones(K, dtype=F64), AGES], 1)
    both = torch.stack([trace, grad_sqnorm], 1)
    (s, g), _ = torch.linalg.lstsq(root * columns, root * both).solution.tolist()
    assert present(trace, grad_sqnorm, weights, AGES)[0] == pytest.approx(s / g)


def test_a_common_factor_drops_out() -> None:
    """A loss that falls to a quarter changes the estimate by less than its interval's half."""
    trace, grad_sqnorm = measured(ONES, ONES)
    falling = 4 ** (AGES / K)
    value, low, high = present(trace, grad_sqnorm, ONES, AGES)
    other, *_ = present(falling * trace, falling * grad_sqnorm, ONES, AGES)
    assert low < other < high and abs(math.log(other / value)) < math.log(high / low) / 2


def test_too_few_updates_and_no_signal() -> None:
    trace, grad_sqnorm = measured(ONES, ONES)
    value, low, high = present(trace[:15], grad_sqnorm[:15], ONES[:15], AGES[-15:])
    assert math.isnan(value) and (low, high) == (0.0, math.inf)
    _, low, high = present(trace, grad_sqnorm - grad_sqnorm.mean(), ONES, AGES)
    assert high == math.inf and low > 0
    _, low, high = present(trace, grad_sqnorm, 0.3**AGES, AGES)
    assert (low, high) == (0.0, math.inf)


def test_print_says_which_is_which() -> None:
    trace, grad_sqnorm = measured(ONES, ONES)
    # Sums over samples: n, N, 1, N² / n, Σ u, a² n, Σ u², the factor of Var L.
    scalars = torch.tensor([N, N, 1, N, N, N, N, 0], dtype=F64).expand(K, 8)
    p, q = N * (trace + grad_sqnorm)[:, None], (N * trace + N * N * grad_sqnorm)[:, None]
    found = summarize(p, q, scalars, False, ["layer"], None)
    assert found.present.lower < found.present.noise_scale < found.present.upper
    first, second = str(found).splitlines()
    assert "over the last 64 updates (2,048 samples)" in first
    assert second == f"at the newest update: {found.present}"
    few = summarize(p[:9], q[:9], scalars[:9], False, ["layer"], None)
    assert math.isnan(few.present.noise_scale) and len(str(few).splitlines()) == 1
    p[-3:] = math.nan
    later = summarize(p, q, scalars, False, ["layer"], None).present
    expected = present(trace[:-3], grad_sqnorm[:-3], ONES[:-3], AGES[:-3])
    assert (later.noise_scale, later.lower, later.upper) == pytest.approx(expected)


def test_a_line_below_noise_is_drift() -> None:
    """Neighbours that differ hide a line from each other, but not from a fit."""
    zigzag = 0.3 * (-1.0) ** AGES
    assert st.drifted(1 - 0.007 * AGES + zigzag, ONES, ONES)
    assert not st.drifted(1 + zigzag, ONES, ONES)
