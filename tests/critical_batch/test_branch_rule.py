# SPDX-License-Identifier: Apache-2.0
"""Merrill's rule: its cases, its edges and the noise of its losses."""

import math
import statistics

import pytest
import torch

from gnsfast.critical_batch.branches import check_grid, matching, smoothed, smoothed_std
from gnsfast.errors import BranchError


def literal(losses: dict[float, float], tolerance: float) -> float:
    """The paper's sentence, word by word."""
    return max(
        k for k in losses if all(losses[k] <= losses[s] + tolerance for s in losses if s < k)
    )


def test_equals_the_sentence_on_random_losses() -> None:
    grid = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    seen = set()
    for row in (2 + 0.02 * torch.rand(300, 6, dtype=torch.float64)).tolist():
        losses = dict(zip(grid, row))
        found = matching(losses, 0.01)
        assert found.largest == literal(losses, 0.01)
        seen.add(found.largest)
    assert seen == set(grid)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.5: 2.0, 1: 2.0, 2: 2.0, 4: 2.1, 8: 2.2}, (2, 2, 4)),
        ({1: 2.0, 2: 2.5, 4: 2.005, 8: 2.3}, (4, 4, 8)),  # 2 itself matches nothing
        ({0.5: 2.0, 1: 2.008, 2: 2.016}, (1, 1, 2)),  # 2 matches 1, but not every smaller one
        ({1: 2.0, 2: 2.0, 4: 1.9}, (4, 4, math.inf)),  # at least
        ({1: 2.0, 2: 2.1}, (1, 0, 2)),  # at most: nothing smaller was there to match
        ({0.5: 2.0, 1: 2.1, 2: 2.1}, (0.5, 0, 1)),
        ({1: 2.0, 2: math.nan, 4: math.inf}, (1, 0, 2)),
        ({0.5: 2.0, 1: 2.0, 2: math.nan, 4: 2.0, 8: 3.0}, (4, 4, 8)),
        ({1: 2.0}, (1, 0, math.inf)),
    ],
)
def test_cases(losses: dict[float, float], expected: tuple[float, ...]) -> None:
    found = matching(losses, 0.01)
    assert found[:3] == expected and matching(dict(reversed(losses.items())), 0.01) == found
    own = [k for k in losses if k < found.largest and matching_alone(losses, k) is False]
    assert list(found.uneven) == own


def matching_alone(losses: dict[float, float], k: float) -> bool:
    return all(losses[k] <= losses[j] + 0.01 for j in losses if j < k)


def test_on_the_tolerance_is_a_match() -> None:
    assert matching({1: 2.0, 2: 2.25, 4: 2.5}, 0.25).largest == 2


@pytest.mark.parametrize("k", [0.5, 1.0])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_divergence_at_or_below_the_base_is_an_error(k: float, loss: float) -> None:
    with pytest.raises(BranchError, match=f"k = {k:g} diverged"):
        matching({0.5: 2.0, 1.0: 2.0, 2.0: 2.0, k: loss})


def test_needs_the_base_and_a_tolerance() -> None:
    with pytest.raises(BranchError, match="k = 1"):
        matching({0.5: 2.0, 2: 2.0})
    for tolerance in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="tolerance"):
            matching({1: 2.0, 2: 2.0}, tolerance)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ((0.5, 2), "must include 1"),
        ((1,), "at least one other"),
        ((1, 2, 2.0), "no k may occur twice: 1, 2, 2"),
        ((0, 1), "positive"),
        ((-1, 1), "positive"),
        ((1, math.nan), "positive"),
        ((1, math.inf), "positive"),
        ((1, 0.3), "9.6 samples"),
        ((0.25, 1), "8 samples"),
    ],
)
def test_grids_that_cannot_be(grid: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_grid(grid, batch_size=32, multiple=16)


def test_grid_of_thirds() -> None:
    assert check_grid((2, 1 / 3, 1), batch_size=96) == (1 / 3, 1.0, 2.0)


def test_moving_average_is_the_recurrence() -> None:
    for alpha in (0.5, 0.2, 1.0):
        losses = torch.rand(50, dtype=torch.float64).tolist()
        expected = losses[0]
        for loss in losses[1:]:
            expected = alpha * loss + (1 - alpha) * expected
        assert smoothed(losses, alpha) == pytest.approx(expected, rel=1e-14)
    for alpha in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            smoothed([1.0], alpha)
    with pytest.raises(ValueError, match="it has taken no step"):
        smoothed([])


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("steps", [5, 100])
def test_noise_of_the_average(alpha: float, steps: int) -> None:
    """Runs of a falling loss with independent noise of 0.1: what the averages scatter by."""
    trend = 3 - 0.3 * torch.arange(steps, dtype=torch.float64)
    runs = (trend + 0.1 * torch.randn(2000, steps, dtype=torch.float64)).tolist()
    scatter = statistics.stdev(smoothed(run, alpha) for run in runs)
    told = math.sqrt(statistics.fmean(smoothed_std(run, alpha) ** 2 for run in runs))
    assert told == pytest.approx(scatter, rel=0.06)


def test_noise_needs_three_steps_and_reads_the_last_ones() -> None:
    assert math.isnan(smoothed_std([1.0, 2.0]))
    wild = [float(x) for x in torch.randn(100)]
    assert smoothed_std(wild + [2.0] * 64) == 0.0
