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

CHECKS = 400
"""The default number of checks in a run: three in a row are 0.75 % of its tokens."""

OF_THE_MACHINE = ("data_parallel", "micro_batch")
"""May differ when a run is resumed."""

FIXED = ("batch_size", "tokens_per_sample", "lr", "betas", "weight_decay")
"""May not differ: learning rates already changed, and counted tokens, depend on them."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``BatchSizeController`` with all defaults filled in."""

    batch_size: int
    factor: CriticalBatchFactor
    tokens_per_sample: int
    total_tokens: int
    max_batch_size: int
    calibrate: float
    warm_up_until: float
    growth: int
    lr: str
    betas: str
    weight_decay: str
    patience: int
    check_every: int
    over: float
    data_parallel: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("tokens_per_sample", "total_tokens", "patience", "check_every"):
            whole_number(name, getattr(self, name))
        whole_number("growth", self.growth, 2)
        real_number("calibrate", self.calibrate, 0.0, 1.0)
        real_number("warm_up_until", self.warm_up_until, self.calibrate, 1.0)
        real_number("over", self.over, 1.0)
        self.rules  # noqa: B018 - raises for a name that no rule has
        self.check_batch(self.batch_size)
        if whole_number("max_batch_size", self.max_batch_size) < self.batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is less than the batch size of "
                f"{self.batch_size}, and a batch size never shrinks"
            )

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
                f"a batch size of {batch_size} does not divide into micro-batches of "
                f"{self.micro_batch} samples on each of {self.data_parallel} processes: it must be "
                f"a multiple of {self.samples_at_once}"
            )

    def state(self) -> dict[str, Any]:
        """All settings for JSON; the factor without its source."""
        factor = {k: finite_or_text(v) for k, v in asdict(self.factor).items() if k != "source"}
        return asdict(self) | {"factor": factor}

    def check_saved(self, saved: dict[str, Any], change: Collection[str]) -> None:
        """Raise ValueError where a saved setting differs that ``change`` does not name."""
        ours = self.state()
        if unknown := sorted(set(change) - set(ours)):
            raise ValueError(f"change names no setting: {', '.join(unknown)}")
        if fixed := sorted(set(change) & set(FIXED)):
            raise ValueError(f"a resumed run cannot change {', '.join(fixed)}")
        for name, value in ours.items():
            if saved.get(name) == value or name in change or name in OF_THE_MACHINE:
                continue
            remedy = "" if name in FIXED else f" (to change it, pass change=[{name!r}])"
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
    """``Settings`` with the defaults that depend on other arguments filled in."""
    batch_size = whole_number("batch_size", batch_size)
    data_parallel = whole_number("data_parallel", data_parallel)
    if micro_batch is None:
        if batch_size % data_parallel:
            raise ValueError(
                f"batch_size={batch_size} does not divide into data_parallel={data_parallel} parts"
            )
        micro_batch = batch_size // data_parallel
    total_tokens = whole_number("total_tokens", total_tokens)
    return Settings(
        batch_size=batch_size,
        factor=_factor(factor, metric),
        total_tokens=total_tokens,
        check_every=max(1, total_tokens // CHECKS) if check_every is None else check_every,
        data_parallel=data_parallel,
        micro_batch=whole_number("micro_batch", micro_batch),
        **others,
    )


def _factor(factor: float | CriticalBatchFactor, metric: str) -> CriticalBatchFactor:
    check_choice("metric", metric, METRICS)
    if isinstance(factor, (str, os.PathLike)):
        raise ValueError(
            f"factor={str(factor)!r} is a path: factor=CriticalBatchFactor.load({str(factor)!r})"
        )
    if not isinstance(factor, CriticalBatchFactor):
        if not (value := real_number("factor", factor, 0.0)):
            raise ValueError("factor=0 would never grow the batch size: it is CBS / noise scale")
        return CriticalBatchFactor(value, value, value, metric, "set by hand")
    if factor.metric != metric:
        raise ValueError(
            f"the factor was measured for metric={factor.metric!r} ({factor.source}), the "
            f"controller has metric={metric!r}: a factor holds for its own metric only"
        )
    if factor.lower == 0:
        raise ValueError(
            f"the factor's interval begins at 0 ({factor.source}), so that no noise scale could "
            "ever grow the batch size: measure it again, or pass factor=measured.value"
        )
    return factor
