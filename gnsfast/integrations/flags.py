# SPDX-License-Identifier: Apache-2.0
"""``Flags``: says in the log of a training whether its batch size fits."""

import logging
from collections.abc import Sequence

from gnsfast.noise_scale import Factor, Flag, NoiseScale, checked_factor, flag

LOG = logging.getLogger("gnsfast")


class Flags:
    """Flags the window's mean batch size at every log, and logs the words where they are news.

    A verdict is news where it differs from the last one, and ``"too large"`` again where the excess
    has doubled. ``"unresolved"`` is none.

    Args:
        metric: of the estimator.

    Raises:
        ValueError: for a factor that is invalid, or of a metric that is not measured.
    """

    def __init__(self, factor: float | Factor, metric: str | Sequence[str] | None) -> None:
        needed = checked_factor(factor, None)[3]
        if needed not in ("euclidean", *([metric] if isinstance(metric, str) else metric or ())):
            raise ValueError(
                f"the factor was measured for metric={needed!r}: measure it by metric={needed!r}"
            )
        self.factor = factor
        self._last: Flag | None = None

    def metrics(self, result: NoiseScale, *, log: bool) -> dict[str, float]:
        """Numbers for a tracker; ``log`` says whether this process writes the words."""
        if not result.updates:
            return {}
        found, last = flag(result.samples / result.updates, result, self.factor), self._last
        same = last is not None and found.verdict == last.verdict
        doubled = last is not None and same and found.excess >= 2 * last.excess
        if found.verdict != "unresolved" and (not same or doubled and found.verdict == "too large"):
            self._last = found
            if log:
                level = logging.INFO if found.verdict == "fair" else logging.WARNING
                LOG.log(level, "the batch size is %s", found)
        return found.metrics()
