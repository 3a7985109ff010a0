# SPDX-License-Identifier: Apache-2.0
"""``ScheduledBatchSize``: a batch size that changes at thresholds in tokens."""

from collections.abc import Callable
from typing import ClassVar

from gnsfast.counts import exact_count
from gnsfast.critical_batch.control.changing import ChangingBatchSize
from gnsfast.critical_batch.control.decision import Decision
from gnsfast.critical_batch.control.settings import ScheduleSettings, micro_batch_of
from gnsfast.critical_batch.laws import BatchSizeSchedule
from gnsfast.critical_batch.run_identity import RunIdentity
from gnsfast.interval import NOT_KNOWN
from gnsfast.noise_scale import NoiseScale


class ScheduledBatchSize(ChangingBatchSize):
    """Train a ``BatchSizeSchedule``: the batch size, and what moves with it, change at thresholds.

    It goes wherever a ``BatchSizeController`` goes, in your own loop and in both
    ``BatchSizeCallback``s, and needs no noise scale. In your own loop the steps are those that the
    schedule counts. A callback changes the batch size at the next step that the old and the new
    size both divide.

    Args:
        schedule: the batch sizes and their tokens. They may also fall.
        lr, betas, weight_decay: as for ``BatchSizeController``.
        data_parallel, micro_batch: as there. Every batch size is a multiple of their product.

    Raises:
        ValueError: for an invalid setting; the message names it.

    Source: the thresholds of the example are those of Merrill et al. 2025 (arXiv 2505.23971), who
    double the batch at 168B and 503B tokens and multiply the learning rate by √2 each time.

    >>> from gnsfast.critical_batch import BatchSizeSchedule, ScheduledBatchSize
    >>> olmo = [(0, 1024), (168e9, 2048), (503e9, 4096)]
    >>> schedule = BatchSizeSchedule(olmo, total_tokens=658e9, tokens_per_sample=4096)
    >>> batch = ScheduledBatchSize(schedule, data_parallel=64, micro_batch=4)
    >>> batch.accumulation
    4
    >>> batch.update(168_000_000_000).reason
    'the schedule has 2,048 samples from 168B tokens on'
    >>> batch.accumulation, round(batch.lr_factor, 4)
    (8, 1.4142)
    """

    KIND: ClassVar[str] = "scheduled batch size"
    FORMAT: ClassVar[int] = 1
    settings: ScheduleSettings

    def __init__(
        self,
        schedule: BatchSizeSchedule,
        *,
        lr: str = "sqrt",
        betas: str = "keep",
        weight_decay: str = "keep",
        data_parallel: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        thresholds = tuple((int(tokens), size) for tokens, size in schedule.thresholds)
        super().__init__(
            ScheduleSettings(
                batch_size=thresholds[0][1],
                tokens_per_sample=schedule.tokens_per_sample,
                total_tokens=int(schedule.total_tokens),
                lr=lr,
                betas=betas,
                weight_decay=weight_decay,
                data_parallel=data_parallel,
                micro_batch=micro_batch_of(thresholds[0][1], data_parallel, micro_batch),
                thresholds=thresholds,
            )
        )

    def update(
        self, tokens: int, noise_scale: NoiseScale | Callable[[], NoiseScale] | None = None
    ) -> Decision | None:
        """Call it between optimizer steps with the tokens trained so far.

        Returns:
            A decision that holds from the next step on where a threshold is reached, or None.

        Raises:
            ValueError: for tokens that decrease.
        """
        self.tokens = self._checked(tokens)
        threshold, size = self._due(tokens)
        if size == self.batch_size:
            return None
        reason = f"the schedule has {size:,} samples from {exact_count(threshold)} tokens on"
        return self._decide("schedule", size, NOT_KNOWN, reason)

    def check_run(self, run: RunIdentity) -> None:
        """Thresholds go with any run: they were not measured in one."""

    def next_size(self, tokens: int) -> int:
        return self._due(tokens)[1]

    def _due(self, tokens: int) -> tuple[int, int]:
        return [entry for entry in self.settings.thresholds if entry[0] <= tokens][-1]
