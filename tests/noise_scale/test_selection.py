# SPDX-License-Identifier: Apache-2.0
"""Intervals given what is shown: among the windows that are resolved, and among the others."""

import math

import pytest
import torch
from torch import Tensor

from gnsfast.noise_scale import selection, summarize
from gnsfast.noise_scale import statistics as st

F64 = torch.float64
N, D = 32, 100


def sets(ratio: float, windows: int, updates: int, decay: float | None = None) -> Tensor:
    """Intervals [windows, 2] of windows of N Gaussian samples in D dimensions, whose noise scale is
    ``ratio * N``; exact sampling, as in ``test_statistics``.
    """
    shape = updates, windows
    along = math.sqrt(D / (ratio * N)) + torch.randn(shape, dtype=F64) / math.sqrt(N)
    across, rest = (
        2 * torch._standard_gamma(torch.full(shape, freedom / 2, dtype=F64))
        for freedom in (D - 1.0, (N - 1.0) * D)
    )
    mean_sqnorm = along.square() + across / N
    grad_sqnorm = mean_sqnorm - rest / (N * (N - 1.0))
    found = st.moments(rest / (N - 1.0), grad_sqnorm, st.decay_weights(updates, decay) * N)
    return torch.tensor([st.fieller_interval(m) for m in found], dtype=F64)


def shares(found: Tensor, truth: float) -> tuple[float, float, float]:
    """The share of windows that are resolved; the coverage in them, and in the others."""
    lower, upper = found.unbind(1)
    hits, resolved = (lower <= truth) & (truth <= upper), upper.isfinite()
    of = (hits[kept].double().mean().item() for kept in (resolved, ~resolved))
    return resolved.double().mean().item(), *of


@pytest.mark.second
@pytest.mark.parametrize(
    "ratio, windows, resolved",
    [(1.0, 3000, 1.0), (8.0, 3000, 0.99), (32.0, 12000, 0.2), (125.0, 40000, 0.02)],
)
def test_coverage_given_what_is_shown(ratio: float, windows: int, resolved: float) -> None:
    """Plain 95 % limits cover 62 % of the windows that are resolved at 125 times the batch."""
    share, shown, others = shares(sets(ratio, windows, 64), ratio * N)
    assert share >= resolved
    assert 0.93 <= shown <= 0.97
    assert share > 0.99 or others >= 0.93


@pytest.mark.parametrize("updates, decay", [(16, None), (64, 0.9), (64, 0.95)])
def test_coverage_of_fewer_measurements(updates: int, decay: float | None) -> None:
    share, shown, others = shares(sets(20.0, 12000, updates, decay), 20.0 * N)
    assert 0.05 < share < 0.5
    assert 0.93 <= shown <= 0.97 and others >= 0.93


def test_no_signal_is_seldom_resolved() -> None:
    """At a noise scale without end: ``FALSE`` of the windows, and no others are wrong."""
    share, _, others = shares(sets(1e12, 20000, 64), 1e12 * N)
    assert 0.5 * selection.FALSE < share < 1.3 * selection.FALSE
    assert others == 1.0


def test_limits_are_the_usual_ones_far_above_the_threshold() -> None:
    for freedom in (7.0, 15.0, 63.0):
        usual = selection.student_quantile(0.95, freedom)
        assert selection.deviations(1e3, freedom) == (usual, usual)
        below, above = selection.deviations(20.0, freedom)
        assert below == pytest.approx(usual, rel=2e-3) and above == usual


@pytest.mark.parametrize("freedom", [4.0, 7.3, 15.0, 63.0])
def test_limits_are_the_set_that_the_test_keeps(freedom: float) -> None:
    """Each finite limit is where the two probabilities are equal, or where such a window would be
    too seldom; and |G|² stays positive.
    """

    def share(t: float) -> float:
        return selection.student_share(t, freedom)

    threshold = selection.student_quantile(0.98, freedom)
    for k in range(-60, 200):
        z = k / 10 + 0.05
        below, above = selection.deviations(z, freedom)
        assert above > -z and (below < z) == (z > threshold)
        if z > threshold:
            resolved = share(z - below - threshold)
            level = min(0.05 * resolved, 0.975 - 0.95 * resolved)
            if abs(share(-below) - level) > 1e-4:
                assert resolved == pytest.approx(selection.SELDOM, rel=0.01)
                assert share(-below) > level
        elif above > -1.42 * z:
            other = share(threshold - z - above)
            if abs(share(-above) - 0.05 * other) > 1e-4:
                assert other == pytest.approx(selection.SELDOM, rel=0.01)
                assert share(-above) > 0.05 * other


@pytest.mark.parametrize(
    "t, freedom, share",
    [(2.776445, 4, 0.975), (3.746947, 4, 0.99), (2.262157, 9, 0.975), (5.207626, 6, 0.999)],
)
def test_student_share(t: float, freedom: float, share: float) -> None:
    """Printed tables of Student's t."""
    assert selection.student_share(t, freedom) == pytest.approx(share, abs=2e-6)
    assert selection.student_share(-t, freedom) == pytest.approx(1 - share, abs=2e-6)


def test_no_more_than_rounding_is_not_resolved() -> None:
    """Samples without a common coordinate: q is p but for float32's rounding, at each update."""
    updates, n = 64, 32
    p = (1 + torch.rand(updates, 1, dtype=F64)) / n
    scalars = torch.zeros(updates, 8, dtype=F64)
    # Sums over micro-batches: n, N, 1, N² / n, Σ u, a² n, Σ u², the factor of Var L.
    scalars[:] = torch.tensor([n, n, 1, n, 1, 1 / n, 1 / n, 0], dtype=F64)
    for rounding in (0.0, 1e-7, -1e-7):
        q = p * (1 + rounding * torch.rand(updates, 1, dtype=F64))
        found = summarize(p, q, scalars, False, ["layer"], None)
        assert (found.lower, found.upper) == (0.0, math.inf)
        assert str(found).startswith("noise scale not resolved: it may have any size")
        assert found.per_module["layer"].lower == 0.0
    q = p * (1 + 1e-3 * torch.rand(updates, 1, dtype=F64))
    found = summarize(p, q, scalars, False, ["layer"], None)
    assert found.resolved and found.lower < found.noise_scale < found.upper
