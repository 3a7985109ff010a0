# SPDX-License-Identifier: Apache-2.0
"""``Measuring``: what the callbacks of Trainer and of Lightning that measure have in common."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gnsfast.errors import ObservationError
from gnsfast.estimator import GradientNoiseScale, optimizer_for
from gnsfast.integrations.flags import Flags
from gnsfast.integrations.trackers import metrics
from gnsfast.noise_scale import NoiseScale
from gnsfast.parallel import refuse_parts


class Measuring:
    """Makes the estimator when training starts, and the numbers of each log.

    Its arguments are those of both callbacks; ``options`` are those of ``GradientNoiseScale``.
    """

    STARTS: str
    """The call that starts training."""

    def __init__(
        self, per_module: bool, tracker: Any, metric: Any, factor: Any, options: Mapping[str, Any]
    ) -> None:
        self.per_module, self.tracker, self.metric = per_module, tracker, metric
        self._options, self._flags = options, Flags(factor, metric)
        self.gns: GradientNoiseScale | None = None
        self.also: Callable[[], dict[str, float]] = dict  # logged with the metrics
        self._unseen = True  # the first batch

    def compute(self) -> NoiseScale:
        """The noise scale over the window; waits for the device."""
        if self.gns is None:
            raise ObservationError(
                f"{type(self).__name__}: nothing was measured yet: call compute() after "
                f"{self.STARTS} began"
            )
        return self.gns.compute()

    def _start(self, model: nn.Module, optimizer: Optimizer | None, scaler: Any) -> Any:
        measured = {"metric": self.metric, "optimizer": optimizer_for(self.metric, optimizer)}
        self.gns = GradientNoiseScale(model, grad_scaler=scaler, **self._options, **measured)
        self._unseen = True
        return self.gns

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
        result, also = self.compute(), self.also()
        found = metrics(result, tokens=tokens, per_module=self.per_module)
        found |= self._flags.metrics(result, also, log=first) | also
        if self.tracker is not None and first:
            self.tracker.log({**tracked, **found}, step)
        return found
