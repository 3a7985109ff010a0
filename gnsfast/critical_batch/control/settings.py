# SPDX-License-Identifier: Apache-2.0
"""A controller's settings: checked once, saved with its state, compared when a run is resumed."""

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from gnsfast.arguments import between, plain, whole
from gnsfast.critical_batch.branches import LR_FACTORS
from gnsfast.critical_batch.factor import METRICS, CriticalBatchFactor

CHECKS = 400
"""Checks of a run, where nobody says how many: three in a row are 0.75 % of its tokens."""

OF_THE_MACHINE = ("data_parallel", "micro_batch")
FIXED = ("batch_size", "tokens_per_sample", "lr", "beta2")
"""What a learning rate that was changed already, or a count of tokens, rests on."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``BatchSizeController``, all of them in force."""

    batch_size: int
    factor: CriticalBatchFactor
    tokens_per_sample: int
    total_tokens: int
    max_batch_size: int
    calibrate: float
    warm_up_until: float
    growth: int
    lr: str
    beta2: str
    patience: int
    check_every: int
    over: float
    data_parallel: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("tokens_per_sample", "total_tokens", "patience", "check_every"):
            whole(name, getattr(self, name))
        whole("growth", self.growth, 2)
        between("calibrate", self.calibrate, 0.0, 1.0)
        between("warm_up_until", self.warm_up_until, self.calibrate, 1.0)
        between("over", self.over, 1.0)
        if self.lr not in LR_FACTORS:
            raise ValueError(f"lr must be 'sqrt', 'linear' or 'none', not {self.lr!r}")
        if self.beta2 not in ("keep", "tokens"):
            raise ValueError(f"beta2 must be 'keep' or 'tokens', not {self.beta2!r}")
        self.check_batch(self.batch_size)
        if whole("max_batch_size", self.max_batch_size) < self.batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is less than the batch size of "
                f"{self.batch_size}, and a batch size never shrinks"
            )

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro-batch on all processes."""
        return self.data_parallel * self.micro_batch

    def check_batch(self, batch_size: int) -> None:
        if batch_size % self.samples_at_once:
            raise ValueError(
                f"a batch size of {batch_size} does not divide into micro-batches of "
                f"{self.micro_batch} samples on each of {self.data_parallel} processes: it must be "
                f"a multiple of {self.samples_at_once}"
            )

    def plain(self) -> dict[str, Any]:
        """As JSON holds them; of the factor only the numbers and the metric."""
        fields = asdict(self)
        numbers = {k: plain(getattr(self.factor, k)) for k in ("value", "lower", "upper")}
        return fields | {"factor": {"metric": self.factor.metric, **numbers}}

    def refuse_other(self, saved: dict[str, Any], change: Collection[str]) -> None:
        """Raise ValueError where a state's settings differ in more than ``change`` names."""
        ours = self.plain()
        if unknown := sorted(set(change) - set(ours)):
            raise ValueError(f"change names no setting: {', '.join(unknown)}")
        if fixed := sorted(set(change) & set(FIXED)):
            raise ValueError(f"a run that goes on cannot change {', '.join(fixed)}")
        for name, value in ours.items():
            if saved.get(name) == value or name in change or name in OF_THE_MACHINE:
                continue
            remedy = "" if name in FIXED else f" (if that is meant: change=[{name!r}])"
            raise ValueError(
                f"the state has {name}={saved.get(name)!r}, this controller {value!r}{remedy}"
            )


def make_settings(
    *,
    batch_size: int,
    factor: float | CriticalBatchFactor,
    metric: str,
    total_tokens: int,
    check_every: int | None,
    data_parallel: int,
    micro_batch: int | None,
    **others: Any,
) -> Settings:
    """``Settings`` with what was left open filled in."""
    batch_size = whole("batch_size", batch_size)
    data_parallel = whole("data_parallel", data_parallel)
    if micro_batch is None:
        if batch_size % data_parallel:
            raise ValueError(
                f"batch_size={batch_size} does not divide into data_parallel={data_parallel} parts"
            )
        micro_batch = batch_size // data_parallel
    total_tokens = whole("total_tokens", total_tokens)
    return Settings(
        batch_size=batch_size,
        factor=_factor(factor, metric),
        total_tokens=total_tokens,
        check_every=max(1, total_tokens // CHECKS) if check_every is None else check_every,
        data_parallel=data_parallel,
        micro_batch=whole("micro_batch", micro_batch),
        **others,
    )


def _factor(factor: float | CriticalBatchFactor, metric: str) -> CriticalBatchFactor:
    if metric not in METRICS:
        raise ValueError(f"metric must be 'euclidean' or 'adam', not {metric!r}")
    if isinstance(factor, (str, os.PathLike)):
        raise ValueError(
            f"factor={str(factor)!r} is a path: factor=CriticalBatchFactor.load({str(factor)!r})"
        )
    if not isinstance(factor, CriticalBatchFactor):
        if not (value := between("factor", factor, 0.0)):
            raise ValueError("factor=0 would never grow the batch: it is CBS / noise scale")
        return CriticalBatchFactor(value, value, value, metric, "set by hand")
    if factor.metric != metric:
        raise ValueError(
            f"the factor was measured for metric={factor.metric!r} ({factor.source}), the "
            f"controller has metric={metric!r}: one cannot stand for the other"
        )
    if factor.lower == 0:
        raise ValueError(
            f"the factor's interval begins at 0 ({factor.source}), so that no noise scale could "
            "ever grow the batch: measure it again, or say factor=measured.value"
        )
    return factor
