# SPDX-License-Identifier: Apache-2.0
"""Noise scales in dual norms, and their intervals, on Gaussian gradients of known covariance."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from gnsfast.noise_scale import DualNormEstimate, dual_norms, statistics

N, WINDOW, SEEDS = 16, 64, 200
F64 = torch.float64
COVARIANCES = ("isotropic", "loud", "low_rank")


class Problem:
    """Samples g_b = G + noise of a noise scale ``ratio`` times ``n``, their number in an update,
    ``SEEDS`` seeds. Four of them may be the micro-batches of an update.

    The noise of ``loud`` has one coordinate (or row of the matrix) 30 times as large as the others;
    that of ``low_rank`` spans few directions.
    """

    def __init__(self, metric: str, covariance: str, ratio: float, n: int = N) -> None:
        self.sign, self.truth, self.n = metric == "sign", ratio * n, n
        size = 40 if self.sign else 6
        self.root = torch.eye(size, dtype=F64)
        if covariance == "loud":
            self.root[0, 0] = 30.0
        elif covariance == "low_rank":
            self.root = torch.randn(size, 6 if self.sign else 2, dtype=F64)
        columns = 1 if self.sign else 9
        self.grad = torch.randn(size, columns, dtype=F64)
        if self.sign:
            sigma, norm = self.root.square().sum(1).sqrt().sum(), self.grad.abs().sum()
        else:
            sigma = math.sqrt(columns) * torch.linalg.svdvals(self.root).sum()
            norm = torch.linalg.svdvals(self.grad).sum()
        self.sigma = sigma.item()
        self.grad *= sigma / norm / math.sqrt(self.truth) if ratio < math.inf else 0.0

    def window(self) -> list[DualNormEstimate]:
        """The estimate of a first window, for each seed."""
        numbers = torch.vmap(dual_norms.sign_numbers if self.sign else dual_norms.spectral_numbers)
        square = torch.square if self.sign else lambda g: g @ g.mT
        shape, n = (SEEDS, self.n, self.root.shape[1], self.grad.shape[1]), self.n
        before, rows = torch.zeros(()), []
        for update in range(1, WINDOW + 1):
            g_B = self.grad + self.root @ torch.randn(shape, dtype=F64)
            whole, halves = g_B.mean(1), (g_B[:, ::2].mean(1), g_B[:, 1::2].mean(1))
            new = square(g_B - whole[:, None]).sum(1) / (n - 1)
            after = before + (new - before) / update
            if update > 1:
                parts = before, after, new, square(whole) - new / n, whole, *halves
                rows.append(numbers(dual_norms.Parts(*parts)))
            before = after
        return estimates(rows)


def estimates(rows: list[torch.Tensor]) -> list[DualNormEstimate]:
    """Of updates of equal size, as ``summarize_dual`` does it."""
    found, weights = torch.stack(rows), torch.ones(len(rows), dtype=F64)
    found[..., 0] = dual_norms.averaged_before_root(found[..., 0], weights)
    return dual_norms.dual_estimates(found, weights)


def windows() -> Iterator[Any]:
    """Of isotropic noise, for which the interval is narrowest, every case; of the others half."""
    for covariance, n, large in product(COVARIANCES, (N, 4), (False, True)):
        second_half = covariance != "isotropic" and large == (n == N)
        ratios = (1.0, 16.0) if large else (0.125, 4.0)
        marks = pytest.mark.slow if second_half else ()
        yield pytest.param(covariance, n, ratios, marks=marks)


@pytest.mark.second
@pytest.mark.parametrize(("covariance", "n", "ratios"), windows())
@pytest.mark.parametrize("metric", ["sign", "spectral"])
def test_interval_holds_the_truth(
    metric: str, covariance: str, n: int, ratios: tuple[float, float]
) -> None:
    """At 1/8, 1, 4 and 16 times the batch. The interval reaches from one bound to the other, so it
    holds the truth more often than in 95 % of windows.
    """
    for ratio in ratios:
        torch.manual_seed(1)
        problem = Problem(metric, covariance, ratio, n)
        found = problem.window()
        hits = sum(e.lower <= problem.truth <= e.upper for e in found)
        assert hits >= 0.95 * SEEDS, ratio
        assert all(e.lower <= e.noise_scale <= e.upper for e in found)
        median = torch.tensor([e.noise_scale for e in found]).median().item() / problem.truth
        # Noise that is not spread like G leaves the estimate too small, within the interval.
        least = 0.8 if covariance == "isotropic" or ratio < 1 else 0.2
        assert least < median < 1.2, ratio
        if covariance == "isotropic" and ratio < 1:
            assert all(e.resolved and e.upper < 2 * e.lower for e in found)
        sigma = torch.tensor([e.noise for e in found]).mean()
        assert sigma == pytest.approx(problem.sigma, rel=0.02)
        norm = problem.sigma / math.sqrt(problem.truth)
        lower, upper = (
            torch.tensor([getattr(e, f"grad_norm_{end}") for e in found]).mean()
            for end in ("lower", "upper")
        )
        assert lower < 1.01 * norm and upper > 0.99 * norm


@pytest.mark.second
@pytest.mark.parametrize("metric", ["sign", "spectral"])
def test_no_signal_is_not_resolved(metric: str) -> None:
    """Where G is zero, the window says "at least", and at most 1 in 40 windows is wrong (2.5 % is
    the share of one end of a 95 % interval).
    """
    torch.manual_seed(2)
    found = Problem(metric, "isotropic", math.inf).window()
    assert sum(e.resolved for e in found) <= 0.05 * SEEDS
    assert sum(e.lower > N for e in found) > 0.9 * SEEDS


def test_numbers_are_bounds_for_any_matrix() -> None:
    """σ from above, ‖G‖ from both sides, whatever the running mean and the halves are."""
    torch.manual_seed(3)
    for shape in ((4, 7), (7, 4), (5, 5)):
        first, second, grad = torch.randn(3, *shape, dtype=F64).unbind()
        side = min(shape)
        before, after, new = (t @ t.mT for t in torch.randn(3, side, 9, dtype=F64).unbind())
        square = dual_norms.gram(grad)
        parts = dual_norms.Parts(before, after, new, square, grad, first, second)
        found = dual_norms.spectral_numbers(parts).tolist()
        noise, aligned, halves, whole, scale, excess, weighted = found
        norms = [torch.linalg.svdvals(g).sum().item() for g in (grad, first, second)]
        sigma = torch.linalg.eigvalsh(new).sqrt().sum()
        assert whole == pytest.approx(norms[0])
        assert halves == pytest.approx((norms[1] + norms[2]) / 2) and aligned <= halves
        assert whole**2 <= scale * weighted * (1 + 1e-9)
        assert noise >= sigma and scale * excess >= sigma**2
        spread = [t.abs() for t in torch.randn(3, *shape, dtype=F64).unbind()]
        parts = dual_norms.Parts(*spread, grad.square(), grad, first, second)
        found = dual_norms.sign_numbers(parts).tolist()
        noise, aligned, halves, whole, scale, excess, weighted = found
        sigma = spread[2].sqrt().sum()
        assert whole == pytest.approx(grad.abs().sum().item()) and aligned <= halves
        assert whole**2 <= scale * weighted * (1 + 1e-9)
        assert noise >= sigma and scale * excess >= sigma**2


def test_the_size_of_past_gradients_drops_out() -> None:
    """A running mean of gradients that were ten times as large changes no number but ``scale``."""
    torch.manual_seed(4)
    for numbers, shape in ((dual_norms.sign_numbers, (6,)), (dual_norms.spectral_numbers, (6, 6))):
        root = torch.rand(shape, dtype=F64)
        moment, g = root.square() if len(shape) == 1 else root @ root.mT, torch.randn(6, 6).double()
        grads = (g[0],) * 4 if len(shape) == 1 else (moment, g, g, g)
        before, after = (
            numbers(dual_norms.Parts(k * moment, k * moment, moment, *grads)) for k in (1.0, 100.0)
        )
        products = [torch.stack([t[0], t[4] * t[5], t[4] * t[6]]) for t in (before, after)]
        torch.testing.assert_close(*products)


def test_equality_in_the_bounds() -> None:
    """Where V is C, and R is proportional to G, the bounds are the values."""
    torch.manual_seed(4)
    g = torch.rand(3, 4, dtype=F64) + 0.5
    parts = dual_norms.Parts(g.square(), g, g, g.square(), g, g, g)
    noise, aligned, halves, whole, scale, _, weighted = dual_norms.sign_numbers(parts).tolist()
    assert noise == pytest.approx(g.sqrt().sum().item())
    assert aligned == pytest.approx(whole) and halves == pytest.approx(whole)
    past = g + 0.1 * g.mean()
    assert scale == pytest.approx(past.sum().item())
    assert weighted == pytest.approx((g.square() / past).sum().item())


def test_zero_variance_and_zero_gradient() -> None:
    """Coordinates and directions that no sample has moved count nothing."""
    zero, small, rank_one = torch.zeros(3, 4), torch.zeros(3, 3), torch.zeros(3, 3)
    parts = dual_norms.Parts(zero, zero, zero, zero, zero, zero, zero)
    assert dual_norms.sign_numbers(parts).tolist() == [0.0] * 7
    parts = dual_norms.Parts(small, small, small, small, zero, zero, zero)
    assert dual_norms.spectral_numbers(parts).tolist() == [0.0] * 7
    rank_one[1, 1] = 4.0
    parts = dual_norms.Parts(small, rank_one, rank_one, small, zero, zero, zero)
    assert dual_norms.spectral_numbers(parts).tolist() == [2.0, *[0.0] * 6]


def test_root_of_a_mean_of_squares() -> None:
    """Of blocks of eight updates by their weights; a parameter without noise has none."""
    noise = torch.rand(19, 2, dtype=F64) * torch.tensor([1.0, 0.0])
    weights = torch.rand(19, dtype=F64)
    found = dual_norms.averaged_before_root(noise, weights)
    want = 0.0
    for own, share in zip(noise[:, 0].split(8), weights.split(8)):
        want += share.sum() * ((share * own.square()).sum() / share.sum()).sqrt()
    torch.testing.assert_close((weights @ found)[0], want)
    assert not found[:, 1].any()
    # Its spread is that of the root, to first order.
    step = torch.zeros_like(noise)
    step[3, 0] = 1e-6
    moved = dual_norms.averaged_before_root(noise + step, weights)
    share, root = weights[3] / weights[:8].sum(), found[:8, 0] @ weights[:8] / weights[:8].sum()
    slope = (moved[:8, 0] - found[:8, 0]) @ weights[:8] / weights[:8].sum() / 1e-6
    torch.testing.assert_close(slope, share * noise[3, 0] / root, rtol=1e-4, atol=0.0)


def test_noise_below_zero() -> None:
    """An unbiased variance of few micro-batches may be: it counts as it is, and loses no update."""
    one, zero = torch.ones(3, 4), torch.zeros(3, 4)
    new = 4 * one - 8 * (torch.arange(12).view(3, 4) < 8)  # the sum is below zero
    for numbers, square in (
        (dual_norms.sign_numbers, one),
        (dual_norms.spectral_numbers, torch.eye(3)),
    ):
        own = new if numbers is dual_norms.sign_numbers else -2 * torch.eye(3)
        parts = dual_norms.Parts(square, square, own, square, one, one, zero)
        product = square.sum() * own.sum()
        assert numbers(parts)[0].item() == pytest.approx(-math.sqrt(-product.item()))
    noise = torch.tensor([[3.0], [-1.0]], dtype=F64)
    found = dual_norms.averaged_before_root(noise, torch.ones(2, dtype=F64))
    assert found.mean().item() == pytest.approx(2.0)  # the root of (9 - 1) / 2


def test_ends_of_the_interval() -> None:
    """Each end is the 95 % limit of its bounds, and a bound that is not resolved is not used."""
    noise = torch.tensor([9.0, 10.0, 11.0, 10.0] * 8, dtype=F64)
    numbers = torch.ones(32, 1, dual_norms.NUMBERS, dtype=F64) * 5.0
    numbers[:, 0, 0] = noise
    numbers[:, 0, 4:] = torch.tensor([2.0, 60.5, 8.0])  # σ² ≤ 121, and ‖G‖² ≤ 16, below 5²
    numbers[:, 0, 5] += noise - 10
    weights = torch.ones(32, dtype=F64)
    [found] = dual_norms.dual_estimates(numbers, weights)
    error = statistics.student_quantile(0.95, 31) * noise.std().item() / math.sqrt(32)
    assert found.upper == pytest.approx((121 + 2 * error) / 25)
    assert found.lower == pytest.approx((100 - 20 * error) / 16)
    assert found.noise_scale == pytest.approx(100 / 16)
    assert (found.grad_norm_lower, found.grad_norm_upper) == (5.0, 4.0)
    [longer] = dual_norms.dual_estimates(numbers, weights, length=2.0)
    assert longer.noise_scale == pytest.approx(found.noise_scale / 4)
    assert longer.upper == pytest.approx(found.upper / 4)
    for nothing in (-8.0, 1e-12):  # below zero, and rounding alone
        numbers[:, 0, 6] = nothing
        [found] = dual_norms.dual_estimates(numbers, weights)
        assert found.grad_norm_upper == 5.0
        assert found.lower == pytest.approx(((10 - error) / 5) ** 2)
    numbers[:, 0, 1] = -5.0
    [found] = dual_norms.dual_estimates(numbers, weights)
    assert found.noise_scale == found.upper == math.inf


@pytest.mark.parametrize("case", ["rare coordinates", "spike", "rank one", "falling"])
def test_hard_problems(case: str) -> None:
    """Where V knows little of C, or remembers another scale, the interval still holds the truth."""
    torch.manual_seed(5)
    seeds, dim, n, hits = 40, 300, 8, 0
    spectral = case == "rank one"
    numbers = torch.vmap(dual_norms.spectral_numbers if spectral else dual_norms.sign_numbers)
    square = (lambda g: g @ g.mT) if spectral else torch.square
    shape = (24, 24) if spectral else (dim,)
    grad = torch.randn(shape, dtype=F64)
    rare = torch.ones(shape, dtype=F64)
    if case == "rare coordinates":
        rare[: dim // 2] = 0.01
    sigma = 24**0.5 * 24 if spectral else (rare.sqrt()).sum().item()
    norm = torch.linalg.svdvals(grad).sum() if spectral else grad.abs().sum()
    truth = 0.5 * n
    grad *= sigma / norm / math.sqrt(truth)
    before, rows = torch.zeros(()), []
    for update in range(1, 41):
        if spectral:
            left, right = torch.randn(2, seeds, n, 24, 1, dtype=F64).unbind()
            g_B = grad + left @ right.mT
        else:
            seen = torch.rand(seeds, n, *shape) < rare
            g_B = grad + seen * torch.randn(seeds, n, *shape, dtype=F64)
        if case == "spike":
            g_B = g_B * (30.0 if update == 8 else 1.0)
        if case == "falling":
            g_B = g_B * (1 + 30 * math.exp(-update / 5))
        whole, halves = g_B.mean(1), (g_B[:, ::2].mean(1), g_B[:, 1::2].mean(1))
        new = square(g_B - whole[:, None]).sum(1) / (n - 1)
        after = before + (new - before) / update
        if update > (8 if case == "spike" else 1):
            parts = before, after, new, square(whole) - new / n, whole, *halves
            rows.append(numbers(dual_norms.Parts(*parts)))
        before = after
    found = estimates(rows)
    hits = sum(e.lower <= truth <= e.upper for e in found)
    assert hits >= 0.9 * seeds
