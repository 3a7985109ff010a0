# SPDX-License-Identifier: Apache-2.0
"""The budget of a run whose updates take times that are made up."""

import math
from collections.abc import Callable

import pytest
from noise_cases import through_a_file

from gnsfast.estimator.budget import Budget, Pace


class Run:
    """A run: ``plain`` and ``extra`` give the seconds of an update by its number. ``lag``: so many
    seconds of a measured update are seen in the time of the next one.
    """

    def __init__(
        self,
        share: float | None,
        extra: Callable[[int], float],
        plain: Callable[[int], float] = lambda u: 1.0,
        every: int = 1,
        lag: float = 0.0,
    ) -> None:
        self.now, self.spent, self.plain, self.extra, self.lag = 0.0, 0.0, plain, extra, lag
        self.budget = Budget(share, every, lambda: self.now - self.late)
        self.measured: list[int] = []
        self.late = 0.0

    def go(self, start: int, end: int) -> "Run":
        for u in range(start, end):
            is_measured = u == self.budget.next
            self.now += self.plain(u)
            self.late = 0.0
            if is_measured:
                self.now += self.extra(u)
                self.spent += self.extra(u)
                self.late = min(self.lag, self.extra(u))
                self.measured.append(u)
            self.budget.end(is_measured)
            if is_measured:
                self.budget.decide(u, self.budget.here)
        return self


@pytest.mark.parametrize("lag", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("extra", [0.001, 0.02, 0.3, 2.0])
def test_a_steady_run_keeps_to_it(extra: float, share: float, lag: float) -> None:
    run = Run(share, lambda u: extra, lag=lag * extra).go(0, 4000)
    assert (run.spent - extra) / run.now <= share  # the last one is paid off later
    gap = max(1.0, extra * (1 / share - 1))
    assert len(run.measured) >= 0.85 * 4000 / gap - 16, "and measures as often as it may"
    if gap > 1:
        assert run.budget.cost == pytest.approx(extra / (extra + run.budget.gap), rel=1e-6)


def test_without_a_share_it_is_every() -> None:
    assert Run(None, lambda u: 1.0, every=3).go(0, 10).measured == [0, 3, 6, 9]
    assert math.isnan(Run(None, lambda u: 1.0).go(0, 10).budget.cost)


def test_every_is_the_limit() -> None:
    measured = Run(0.5, lambda u: 1e-4, every=4).go(0, 101).measured
    assert {b - a for a, b in zip(measured, measured[1:])} == {4}


def test_learning_compiling_and_evaluating_do_not_count() -> None:
    odd = lambda u: 1.0 + 50.0 * (u in (0, 1)) + 30.0 * (u % 20 == 7)
    run = Run(0.05, lambda u: 0.5, plain=odd).go(0, 1000)
    assert run.budget.gap == math.ceil(0.5 * 19)


def test_it_follows_the_run() -> None:
    """A batch four times as large, of which measuring takes as long as before; and back."""
    plain = lambda u: 4.0 if 500 <= u < 2500 else 1.0
    run = Run(0.05, lambda u: 0.5, plain=plain)
    gaps = [run.go(start, start + 500).budget.gap for start in range(0, 3500, 500)]
    assert gaps[0] == 10 and gaps[4] in (2, 3) and gaps[6] == 10


def test_it_goes_on_from_a_state() -> None:
    one = Run(0.05, lambda u: 0.5).go(0, 300)
    two = Run(0.05, lambda u: 0.5)
    two.budget.load(through_a_file(one.budget.state()))
    assert two.go(300, 600).measured == one.go(300, 600).measured[-len(two.measured) :]


def test_an_update_without_an_end_tells_nothing() -> None:
    run = Run(0.05, lambda u: 0.5).go(0, 100)
    before = run.budget.here
    for u in range(100, 160):
        run.now += 1000.0
        run.budget.interrupt()
        run.go(u, u + 1)
    assert run.budget.here == before


@pytest.mark.parametrize("share", [0, 1, -0.1, 2.0, math.nan])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Budget(share, 1)


def test_noise_that_hides_the_cost() -> None:
    assert Pace(1.0, -0.1).ratio == 0.0 and math.isnan(Pace().ratio)
