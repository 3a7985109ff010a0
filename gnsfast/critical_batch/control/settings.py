# SPDX-License-Identifier: Apache-2.0
"""A controller's settings: checked at the start, saved, and compared when a run is resumed."""

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from gnsfast.arguments import check_choice, finite_or_text, real_number, whole_number
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor
from gnsfast.critical_batch.rules import Rules
from gnsfast.noise_scale import METRICS

OF_THE_MACHINE = ("data_parallel", "micro_batch")
"""Settings that may differ when a run is resumed."""

FIXED = ("batch_size", "tokens_per_sample", "lr", "betas", "weight_decay")
"""Settings that may not differ: past changes of learning rates and token counts depend on them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every batch size that changes, with all defaults filled in."""

    batch_size: int
    tokens_per_sample: int
    total_tokens: int
    lr: str
    betas: str
    weight_decay: str
    data_parallel: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("tokens_per_sample", "total_tokens"):
            whole_number(name, getattr(self, name))
        self.rules  # noqa: B018 - raises for a name that no rule has
        for size in (self.batch_size, *self.sizes):
            self.check_batch(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that the run may take."""
        return (self.batch_size,)

    @property
    def rules(self) -> Rules:
        """By which hyperparameters follow the batch size."""
        return Rules(self.lr, self.betas, self.weight_decay)

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro-batch over all processes."""
        return self.data_parallel * self.micro_batch

    def check_batch(self, batch_size: int) -> None:
        if batch_size % self.samples_at_once:
            raise ValueError(
                f"a batch size of {batch_size} cannot be split into micro-batches of "
                f"{self.micro_batch} samples on {self.data_parallel} processes: it must be a "
                f"multiple of {self.samples_at_once}"
            )

    def check_size(self, batch_size: int) -> None:
        """Raise ValueError where a resumed run could not have this batch size."""
        self.check_batch(batch_size)

    def state(self) -> dict[str, Any]:
        """All settings for JSON."""
        return asdict(self)

    def check_saved(self, saved: dict[str, Any], change: Collection[str]) -> None:
        """Raise ValueError where a saved setting differs that ``change`` does not name."""
        ours = self.state()
        if unknown := sorted(set(change) - set(ours)):
            raise ValueError(f"change names unknown settings: {', '.join(unknown)}")
        if fixed := sorted(set(change) & set(FIXED)):
            raise ValueError(f"a resumed run cannot change {', '.join(fixed)}")
        for name, value in ours.items():
            if saved.get(name) == value or name in change or name in OF_THE_MACHINE:
                continue
            remedy = "" if name in FIXED else f" (to change it, pass change=[{name!r}])"
            raise ValueError(
                f"the state was saved with {name}={saved.get(name)!r}, but this controller has "
                f"{name}={value!r}{remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    """The settings of ``ScheduledBatchSize``."""

    thresholds: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({size for _, size in self.thresholds}))

    def state(self) -> dict[str, Any]:
        return asdict(self) | {"thresholds": [list(entry) for entry in self.thresholds]}


@dataclass(frozen=True, kw_only=True)
class ControllerSettings(Settings):
    """The arguments of ``BatchSizeController`` with all defaults filled in."""

    factor: CriticalBatchFactor
    max_batch_size: int
    min_batch_size: int | None
    calibrate: float
    warm_up_until: float
    growth: int
    patience: int
    check_every: int
    over: float

    def __post_init__(self) -> None:
        for name in ("patience", "check_every"):
            whole_number(name, getattr(self, name))
        whole_number("growth", self.growth, 2)
        real_number("calibrate", self.calibrate, 0.0, 1.0)
        real_number("warm_up_until", self.warm_up_until, self.calibrate, 1.0)
        real_number("over", self.over, 1.0)
        if whole_number("max_batch_size", self.max_batch_size) < self.batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} must be at least the batch size of "
                f"{self.batch_size}"
            )
        if (least := self.min_batch_size) is not None:
            whole_number("min_batch_size", least)
            if self.sizes[0] != least:
                raise ValueError(
                    f"min_batch_size={least} is not what the batch size of {self.batch_size} comes "
                    f"to by dividing by growth={self.growth} again and again"
                )
        super().__post_init__()

    @property
    def sizes(self) -> tuple[int, ...]:
        down, up = [self.batch_size], [self.batch_size]
        least = self.batch_size if self.min_batch_size is None else self.min_batch_size
        while down[-1] % self.growth == 0 and down[-1] // self.growth >= least:
            down.append(down[-1] // self.growth)
        while up[-1] * self.growth <= self.max_batch_size:
            up.append(up[-1] * self.growth)
        return (*down[:0:-1], *up)

    def smaller(self, batch_size: int) -> int | None:
        """The batch size that one of ``batch_size`` may shrink to, if any."""
        if self.min_batch_size is None or batch_size % (self.growth * self.samples_at_once):
            return None
        size = batch_size // self.growth
        return size if size >= self.min_batch_size else None

    def check_size(self, batch_size: int) -> None:
        super().check_size(batch_size)
        if batch_size > self.max_batch_size:
            raise ValueError(
                f"the saved batch size of {batch_size} is above "
                f"max_batch_size={self.max_batch_size}: pass a larger max_batch_size"
            )

    def state(self) -> dict[str, Any]:
        """All settings for JSON; the factor without its source and its run."""
        numbers = ("value", "lower", "upper", "metric")
        factor = {k: finite_or_text(getattr(self.factor, k)) for k in numbers}
        return asdict(self) | {"factor": factor}


def micro_batch_of(batch_size: int, data_parallel: int, micro_batch: int | None) -> int:
    """The samples of a micro-batch on each process, by default the first batch in one piece."""
    data_parallel = whole_number("data_parallel", data_parallel)
    if micro_batch is not None:
        return whole_number("micro_batch", micro_batch)
    if batch_size % data_parallel:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of data_parallel={data_parallel}"
        )
    return batch_size // data_parallel


def checked_factor(factor: float | CriticalBatchFactor, metric: str) -> CriticalBatchFactor:
    """A number as a factor of ``metric``, or a measured factor that is one of it."""
    check_choice("metric", metric, METRICS)
    if isinstance(factor, (str, os.PathLike)):
        raise ValueError(
            f"factor={str(factor)!r} is a path: pass "
            f"factor=CriticalBatchFactor.load({str(factor)!r})"
        )
    if not isinstance(factor, CriticalBatchFactor):
        if not (value := real_number("factor", factor, 0.0)):
            raise ValueError(
                "factor=0 would never grow the batch size: pass the critical batch size divided by "
                "the noise scale"
            )
        return CriticalBatchFactor(value, value, value, metric, "set by hand")
    if factor.metric != metric:
        raise ValueError(
            f"the factor was measured with metric={factor.metric!r} ({factor.source}) and holds "
            f"for this metric only, but the controller has metric={metric!r}: make them the same"
        )
    if factor.lower == 0:
        raise ValueError(
            f"the factor's interval begins at 0 ({factor.source}), so no noise scale could ever "
            "grow the batch size: measure the factor again, or pass factor=measured.value"
        )
    return factor
