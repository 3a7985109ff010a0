# SPDX-License-Identifier: Apache-2.0
"""``Measuring``: what the callbacks of Trainer and of Lightning that measure have in common.
``Flags`` says in the log of a training whether its batch size fits.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gnsfast.critical_batch import CriticalBatchFactor, RunIdentity
from gnsfast.errors import ObservationError
from gnsfast.estimator import GradientNoiseScale, LargestSample, optimizer_for
from gnsfast.integrations.trackers import largest_samples, metrics
from gnsfast.noise_scale import Factor, Flag, NoiseScale, checked_factor, flag
from gnsfast.parallel import refuse_parts

LOG = logging.getLogger("gnsfast")


class Flags:
    """Flags the batch size at every log, and logs the words where they are news. It is the window's
    mean, or the present one where a callback changes it.

    A verdict is news where it differs from the last one, and ``"too large"`` again where the excess
    has doubled. ``"unresolved"`` is none.

    Args:
        factor: CBS / noise scale; None flags nothing.
        metric: of the estimator.

    Raises:
        ValueError: for a factor that is invalid, or of a metric that is not measured.
    """

    def __init__(self, factor: float | Factor | None, metric: str | Sequence[str] | None) -> None:
        needed = "euclidean" if factor is None else checked_factor(factor, None)[3]
        if needed not in ("euclidean", *([metric] if isinstance(metric, str) else metric or ())):
            raise ValueError(
                f"the factor was measured for metric={needed!r}: measure it by metric={needed!r}"
            )
        self.factor = factor
        self._last: Flag | None = None

    def check_run(self, run: RunIdentity, callbacks: Iterable[Any], *, log: bool) -> None:
        """Raise ValueError where the factor was measured in a run that differs. What cannot be
        compared, because it is unknown of this run, is logged.

        A controller among the ``callbacks`` knows the context.
        """
        if not isinstance(self.factor, CriticalBatchFactor):
            return
        settings = (getattr(getattr(c, "controller", None), "settings", None) for c in callbacks)
        contexts = (getattr(s, "tokens_per_sample", None) for s in settings)
        if (context := next((c for c in contexts if c is not None), None)) is not None:
            run = replace(run, tokens_per_sample=context)
        self.factor.check_run(run)
        own, unknown = self.factor.run, {*run.unknown()} - {*self.factor.run.unknown()}
        if unknown and log:
            known = ", ".join(f"{name}={getattr(own, name)!r}" for name in sorted(unknown))
            LOG.warning(
                "The factor was measured with %s. Nothing compares that, because it is unknown of "
                "this run: make sure that it is the same.",
                known,
            )

    def metrics(
        self, result: NoiseScale, also: Mapping[str, float], *, log: bool
    ) -> dict[str, float]:
        """Numbers for a tracker; ``log`` says whether this process writes the words.

        ``also`` holds those of a callback that changes the batch size. Its present ``batch/size``
        is judged, as the window's mean still has updates from before a change. A controller has
        ``cbs/*`` of its own, from its last check, and the flag then leaves them alone.
        """
        if self.factor is None or not result.updates:
            return {}
        batch_size = also.get("batch/size", result.samples / result.updates)
        found, last = flag(batch_size, result, self.factor), self._last
        same = last is not None and found.verdict == last.verdict
        doubled = last is not None and same and found.excess >= 2 * last.excess < math.inf
        if found.verdict != "unresolved" and (not same or doubled and found.verdict == "too large"):
            self._last = found
            if log:
                level = logging.INFO if found.verdict == "fair" else logging.WARNING
                LOG.log(level, "the batch size is %s", found)
        controlled = "batch/phase" in also
        return {k: v for k, v in found.metrics().items() if k == "batch/flag" or not controlled}


class Measuring:
    """Makes the estimator when training starts, and the numbers of each log.

    Its arguments are those of both callbacks; ``options`` are those of ``GradientNoiseScale``. No
    error of gnsfast ends a run, unless ``on_error="raise"`` asks for it.

    Raises:
        ValueError: for ``ids`` where no samples are kept that they would name.
    """

    STARTS: str
    """The call that starts training."""

    def __init__(
        self,
        per_module: bool,
        tracker: Any,
        metric: Any,
        factor: Any,
        ids: Any,
        options: Mapping[str, Any],
    ) -> None:
        if ids is not None and not options["keep_largest"]:
            raise ValueError(
                f"ids={ids!r} names the samples that {type(self).__name__}(keep_largest=16) keeps, "
                "and this one keeps none: pass both"
            )
        self.ids = ids
        self.per_module, self.tracker, self.metric = per_module, tracker, metric
        self._options, self._flags = options, Flags(factor, metric)
        self.gns: GradientNoiseScale | None = None
        self.also: Callable[[], dict[str, float]] = dict  # logged with the metrics
        self._update: AbstractContextManager[None] | None = None  # under way
        self._unseen = True  # the first batch
        self._listed = 0  # updates whose largest samples the tracker has

    def compute(self) -> NoiseScale:
        """The noise scale over the window; waits for the device."""
        if self.gns is None:
            raise ObservationError(
                f"{type(self).__name__}: nothing was measured yet: call compute() after "
                f"{self.STARTS} began"
            )
        return self.gns.compute()

    def _start(
        self, model: nn.Module, optimizer: Optimizer | None, scaler: Any, take: int | None = None
    ) -> Any:
        measured = {"metric": self.metric, "optimizer": optimizer_for(self.metric, optimizer)}
        measured |= {"grad_scaler": scaler, "take": take}
        self.gns = GradientNoiseScale(model, **self._options, **measured)
        self._update = None
        self._unseen, self._listed = True, 0
        return self.gns

    def _begin_update(self) -> None:
        """Begin an update, unless one is under way."""
        assert self.gns is not None
        if self._update is None:
            self._update = self.gns.update()
            self._update.__enter__()

    def _end_update(self) -> None:
        """End the update under way, before anybody clips its gradients."""
        update, self._update = self._update, None
        assert update is not None
        update.__exit__(None, None, None)

    def _dropping_errors(self) -> AbstractContextManager[None]:
        """Around code that only prepares or shows a measurement."""
        assert self.gns is not None
        return self.gns.dropping_errors()

    def _load(self, state: dict[str, Any]) -> None:
        """Continue the measurements of a checkpoint, which says whose largest samples its run has
        logged.
        """
        assert self.gns is not None
        self.gns.load_state_dict(state)
        self._listed = state["listed"]

    def _state(self) -> dict[str, Any]:
        """All measurements, for a checkpoint. All processes must call this."""
        assert self.gns is not None
        return {**self.gns.state_dict(), "listed": self._listed}

    def _newly_largest(self) -> list[LargestSample]:
        """The largest samples of the updates since the last call. All processes must call this."""
        kept = self._options["keep_largest"]
        found = self.gns.largest() if kept and self.gns is not None else []
        end = max((sample.update + 1 for sample in found), default=0)
        # After a ``gns.reset()`` updates count from 0 again.
        since, self._listed = self._listed if end >= self._listed else 0, end
        return [sample for sample in found if sample.update >= since][:kept]

    def _look(self, batch: Any) -> None:
        """Refuse the first batch where it holds parts of samples."""
        if self._unseen:
            refuse_parts(batch)
            self._unseen = False

    def _found(
        self, step: int, tracked: Mapping[str, float], *, first: bool, tokens: int | None = None
    ) -> dict[str, float]:
        """The numbers of a log. The tracker gets them too, with those that are only ``tracked``.

        Args:
            first: this is the process that writes.
        """
        numbers: dict[str, float] = {}
        with self._dropping_errors():
            result, also = self.compute(), self.also()
            numbers |= metrics(result, tokens=tokens, per_module=self.per_module)
            numbers |= self._flags.metrics(result, also, log=first) | also
            largest = self._newly_largest()
            if self.tracker is not None and first:
                self.tracker.log({**tracked, **numbers}, step)
                if largest and (record := getattr(self.tracker, "record", None)) is not None:
                    record(largest_samples(largest, step))
        return numbers
