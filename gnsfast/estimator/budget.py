# SPDX-License-Identifier: Apache-2.0
"""How often updates are measured, so that statistics take no more than a share of the time."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

APART = 3
"""While the pace is not known, and from time to time, measured updates are so many apart: two plain
ones follow each, because the host may run ahead of the device by an update.
"""

AGAIN = 16
"""After so many measured updates the next one is at least ``APART``."""

LEAST, MOST = 4, 16
"""The medians are of so many of the newest times. They do not see evaluations."""


class Pace(NamedTuple):
    """What a ``plain`` update takes, in seconds, and what measuring adds to it. NaN where it is not
    known.
    """

    plain: float = math.nan
    extra: float = math.nan

    @property
    def ratio(self) -> float:
        """What measuring adds, in plain updates; 0 where noise hides it."""
        return self.extra / self.plain if not self.extra < 0 else 0.0


class Budget:
    """Says which update is measured ``next``: they are at least ``every`` apart, and statistics
    take at most the ``share`` of the time, if it is given.

    Times are taken from the end of an update to the end of the next one, that of a measured update
    together with the plain one after it. What a measured update costs is a debt that each update
    pays off. When nothing is owed the next one is measured, so the share holds for the whole run.
    ``pace`` is that of all processes, and ``gap`` how far apart measured updates are.
    """

    def __init__(
        self, share: float | None, every: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        if share is not None and not 0 < share < 1:
            raise ValueError(f"budget must be a share of the time between 0 and 1, not {share!r}")
        self.share, self.every, self._clock = share, every, clock
        self.next, self.gap, self.pace = 0, every, Pace()
        self._debt, self._unpaid = 0.0, 0  # in plain updates, and in measured ones
        self._apart = AGAIN  # so many measured updates until two are ``APART``
        self._updates, self._measured = 0, [False, False]  # how many ended, and whether the newest
        self._times, self._at = [math.nan, math.nan], math.nan  # of the newest, and its end
        self._plain, self._pairs = deque[float](maxlen=MOST), deque[float](maxlen=MOST)

    @property
    def cost(self) -> float:
        """The share of the time that statistics take; NaN where it is not known."""
        share = self.pace.ratio / (self.pace.ratio + self.gap)
        return share if share == share else math.nan  # one object, which equals itself

    @property
    def here(self) -> Pace:
        """What updates take on this process."""
        if min(len(self._plain), len(self._pairs)) < LEAST:
            return self.pace
        plain = median(self._plain)
        return Pace(plain, median(self._pairs) - 2 * plain)

    def end(self, is_measured: bool) -> None:
        """Note that an update has ended."""
        if self.share is None:
            return
        now = self._clock()
        self._times, self._at = [self._times[-1], now - self._at], now
        self._measured = [self._measured[-1], is_measured]
        self._updates += 1
        if is_measured or self._updates <= APART:  # the first ones learn and compile
            return
        is_pair = self._measured[0]
        time = sum(self._times) if is_pair else self._times[-1]
        if math.isfinite(time):
            (self._pairs if is_pair else self._plain).append(time)

    def interrupt(self) -> None:
        """Note that an update did not end, so that its time tells nothing."""
        self._at = math.nan

    def decide(self, update: int, pace: Pace) -> None:
        """Choose the next update after this one, which was measured, at the ``pace`` of all
        processes.
        """
        self.gap, passed = self.every, update - self.next + self.gap
        if self.share is not None:
            self.pace, self._unpaid = pace, self._unpaid + 1
            self._debt = max(0.0, self._debt - passed)
            is_known = not math.isnan(pace.ratio)
            if is_known:
                self._debt += self._unpaid * pace.ratio * (1 / self.share - 1)
                self._unpaid = 0
            self._apart = AGAIN if not is_known else self._apart - 1
            self.gap = max(self.gap, math.ceil(self._debt))
            if not is_known or not self._apart:
                self.gap, self._apart = max(self.gap, APART), AGAIN
        self.next = update + self.gap

    def wait(self, errors: int) -> None:
        """Measure later, after so many errors in a row: they cost time too."""
        self.next += 2 ** min(errors, 10) - 2

    def state(self) -> dict[str, Any]:
        """What goes on in another run."""
        known = [] if math.isnan(self.pace.ratio) else [*self.pace]
        return {"next": self.next, "gap": self.gap, "pace": known, "debt": self._debt}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        self.next, self.gap, self._debt = state["next"], state["gap"], state["debt"]
        self.pace = Pace(*state["pace"])
