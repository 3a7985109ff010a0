# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeController``: a batch size that grows with the critical batch size."""

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from gnsfast.arguments import check_choice, finite_or_text, real_number, whole_number
from gnsfast.counts import in_samples
from gnsfast.critical_batch.control.changing import (
    ChangingBatchSize,
    Decision,
    Settings,
    micro_batch_of,
)
from gnsfast.critical_batch.control.token_schedules import Shape
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor, RunIdentity
from gnsfast.critical_batch.seesaw import falls
from gnsfast.interval import NOT_KNOWN, Interval
from gnsfast.noise_scale import (
    METRICS,
    OVER,
    NoiseScale,
    checked_factor,
    critical_batch_metrics,
    excess,
    verdict_on,
)

PHASES = ("calibrate", "warm up", "monitor")

CHECKS = 400
"""The default number of checks in a run: three in a row are 0.75 % of its tokens."""


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
    falls: list[int] | None

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

    @property
    def shrinks(self) -> bool:
        return self.min_batch_size is not None

    def smaller(self, batch_size: int) -> int | None:
        """The batch size that one of ``batch_size`` may shrink to, if any."""
        if self.min_batch_size is None or batch_size % (self.growth * self.samples_at_once):
            return None
        size = batch_size // self.growth
        return size if size >= self.min_batch_size else None

    def due(self, batch_size: int, tokens: int) -> bool:
        """Whether the learning rate has fallen far enough for a growth to ``batch_size``."""
        if self.falls is None:
            return True
        growths = round(math.log(batch_size / self.batch_size, self.growth))
        return growths <= sum(fall <= tokens for fall in self.falls)

    def check_batch(self, batch_size: int) -> None:
        super().check_batch(batch_size)
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


def measured_factor(factor: float | CriticalBatchFactor, metric: str) -> CriticalBatchFactor:
    """A number as a factor of ``metric``, or a measured factor that is one of it."""
    check_choice("metric", metric, METRICS)
    if not isinstance(factor, CriticalBatchFactor):
        return CriticalBatchFactor(*checked_factor(factor, metric), "set by hand")
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


@dataclass(frozen=True)
class Evidence:
    """The critical batch size by one measurement: noise scale times factor, in samples.

    ``may_grow``: its lower end may justify a larger batch. ``may_warn``: its upper end may justify
    a smaller batch or a warning.
    """

    critical: Interval = NOT_KNOWN
    may_grow: bool = False
    may_warn: bool = False


def evidence(found: NoiseScale, factor: CriticalBatchFactor, previous: float) -> Evidence:
    """The critical batch size that a window's noise scale gives.

    - Not measured: it justifies nothing.
    - One-sided ("at least ``lower``"): it may justify growth, but no warning.
    - Drifting: the window's mean lags behind the present value. It may justify growth unless it is
      below the ``previous`` estimate, and a warning unless it is above.

    Each end of the interval is that of the noise scale times that of the factor.

    Raises:
        TypeError: where ``found`` is not a ``NoiseScale``.
        ValueError: where the noise scale in the factor's metric is not measured.
    """
    if not isinstance(found, NoiseScale):
        raise TypeError(f"noise_scale must be gns.compute() or gns.compute itself, not {found!r}")
    scale = found.under(factor.metric)
    value = factor.value * scale.noise_scale
    if math.isnan(value):
        return Evidence()
    return Evidence(
        Interval(value, factor.lower * scale.lower, factor.upper * scale.upper),
        may_grow=not found.drift or value >= previous,
        may_warn=math.isfinite(scale.upper) and (not found.drift or value <= previous),
    )


class BatchSizeController(ChangingBatchSize):
    """Grow the batch size when the noise scale times a factor shows that training can use it.

    There are three phases:

    - "calibrate" only observes, because the noise scale of the first steps is small and moves.
    - "warm up" grows the batch size from B to ``growth`` * B, and with it the learning rate, once
      the lower end of the estimate has been at least ``growth`` * B at ``patience`` checks in a
      row.
    - "monitor" only warns, and shrinks the batch size where it may.

    Without ``max_batch_size`` and ``min_batch_size`` the batch size stays as it is, and "monitor"
    follows calibration: the controller warns where the batch size is too large, and once where it
    is too small.

    The estimate is that of the critical batch size (CBS): the noise scale times ``factor``. The
    noise scale alone is not the CBS (Merrill et al. 2025 find it off by orders of magnitude), so
    the factor has no default; ``factor=1.0`` treats the two as equal.

    Args:
        batch_size: samples of the first optimizer steps, over all processes, counted as
            ``gns.update`` counts them.
        factor: CBS / noise scale, as a number or measured by branches. A measured factor's own
            lower end is used to decide on growth.
        tokens_per_sample: of each sample.
        total_tokens: of the whole run.
        max_batch_size: never exceeded; by default the first batch size. The first growth beyond it
            is refused and ends the warm-up.
        min_batch_size: lets the batch size shrink, down to this one: the first batch size divided
            by ``growth`` some times, or not at all. By default it never shrinks.
        metric: ``"adam"``, ``"sign"`` or ``"spectral"`` uses ``noise_scale.under(metric)``, and a
            factor measured with it.
        calibrate, warm_up_until: shares of ``total_tokens`` at which these phases end. A growth in
            the last tenth would save at most a twentieth of the steps.
        growth: a whole number, at least 2.
        lr, betas, weight_decay: the rules (``Rules``) by which they follow the batch size, up and
            down: ``"sqrt"`` multiplies the learning rate by √growth (Adam), ``"linear"`` by growth
            (SGD);
            ``betas="half_life"`` keeps the half-life of Adam's second moments in tokens;
            ``weight_decay="timescale"`` keeps that of the weights, which AdamW's decay sets.
        patience: checks in a row before a change of batch size or a warning. Checks closer together
            than the noise scale's window see some updates twice.
        check_every: tokens between two checks; by default 1/400 of ``total_tokens``.
        over: warn where the batch size exceeds the estimate times this, again each time that the
            excess has doubled, and anew once it has recovered. The whole interval must be below the
            batch size, as for the verdict "too large" of ``gnsfast.flag``.
        shape: the schedule of the learning rate (``lr_lambda(shape)``). With it the batch size
            grows only where the learning rate has fallen by another ``growth`` (``seesaw``), once
            the noise scale allows it. Most schedules fall late: say ``warm_up_until=1.0``.
        data_parallel, micro_batch: processes, and samples of a micro-batch on each, by default the
            first batch in one piece. Every batch size is a multiple of their product.

    After a check without a measurement (NaN) every count of checks in a row starts again; "at least
    X" is evidence for growth. The mean of a drifting window lags behind: it counts for growth only
    while its estimate does not fall, and for a change to a smaller batch or a warning only while it
    does not rise.

    All processes decide alike, because ``gns.compute()`` is the same on all of them.

    Raises:
        ValueError: for an invalid setting; the message names it.

    Source: Merrill et al. 2025, batch size warm-up ("Critical Batch Size Revisited"), with an
    interval and hysteresis in place of thresholds by hand, which ``ScheduledBatchSize`` trains;
    those of the rules are in ``RULES``.

    >>> from gnsfast.critical_batch import BatchSizeController
    >>> gns = gnsfast.GradientNoiseScale(torch.nn.Linear(5, 2))
    >>> controller = BatchSizeController(
    ...     32, factor=8.0, tokens_per_sample=512, total_tokens=10**9, max_batch_size=512,
    ...     micro_batch=8,
    ... )
    >>> controller.accumulation  # micro-batches of a step
    4
    >>> decision = controller.update(10_000_000, gns.compute)
    >>> decision.phase, decision.reason
    ('warm up', 'calibration ends at 1 % of the tokens: from here the batch size may grow')
    """

    KIND: ClassVar[str] = "batch size controller"
    FORMAT: ClassVar[int] = 3
    settings: ControllerSettings

    def __init__(
        self,
        batch_size: int,
        *,
        factor: float | CriticalBatchFactor,
        tokens_per_sample: int,
        total_tokens: int,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        metric: str = "euclidean",
        calibrate: float = 0.01,
        warm_up_until: float = 0.9,
        growth: int = 2,
        lr: str = "sqrt",
        betas: str = "keep",
        weight_decay: str = "keep",
        patience: int = 3,
        check_every: int | None = None,
        over: float = OVER,
        shape: Shape | None = None,
        data_parallel: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        batch_size = whole_number("batch_size", batch_size)
        total_tokens = whole_number("total_tokens", total_tokens)
        known = measured_factor(factor, metric)
        known.check_run(RunIdentity(tokens_per_sample=tokens_per_sample))
        settings = ControllerSettings(
            batch_size=batch_size,
            factor=known,
            tokens_per_sample=tokens_per_sample,
            total_tokens=total_tokens,
            max_batch_size=batch_size if max_batch_size is None else max_batch_size,
            min_batch_size=min_batch_size,
            calibrate=calibrate,
            warm_up_until=warm_up_until,
            growth=growth,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            patience=patience,
            check_every=max(1, total_tokens // CHECKS) if check_every is None else check_every,
            over=over,
            falls=None if shape is None else falls(shape, total_tokens, growth),
            data_parallel=data_parallel,
            micro_batch=micro_batch_of(batch_size, data_parallel, micro_batch),
        )
        super().__init__(settings)
        self._evidence = Evidence()
        self._rows = dict.fromkeys(("grow", "shrink", "over", "recovered"), 0)
        self._limit, self._capped = settings.over, False
        self.phase = self._phase_at(0)

    def update(
        self, tokens: int, noise_scale: NoiseScale | Callable[[], NoiseScale]
    ) -> Decision | None:
        """Check the noise scale. Call it between optimizer steps, after every step or some of them.

        Args:
            tokens: trained so far.
            noise_scale: ``gns.compute()``, or ``gns.compute`` itself, which then waits for the
                device only when a check is due.

        Returns:
            A decision that holds from the next step on, or None. A change of phase comes before a
            growth.

        Raises:
            ValueError: for tokens that decrease, or where ``metric`` needs a noise scale that is
                missing.
        """
        tokens = self._checked(tokens)
        every = self.settings.check_every
        if due := tokens // every > self.tokens // every:
            found = noise_scale() if callable(noise_scale) else noise_scale
            known = self._evidence.critical.value
            self._evidence = evidence(found, self.settings.factor, known)
        self.tokens = tokens
        if (phase := self._phase_at(tokens)) != self.phase:
            return self._enter(phase)
        return self._judge() if due and phase != "calibrate" else None

    def next_size(self, tokens: int) -> int:
        return self.settings.growth * self.batch_size

    def _phase_at(self, tokens: int) -> str:
        s = self.settings
        if self._capped or tokens >= s.warm_up_until * s.total_tokens:
            return "monitor"
        if tokens < s.calibrate * s.total_tokens:
            return "calibrate"
        return "warm up" if len(s.sizes) > 1 else "monitor"

    def _enter(self, phase: str) -> Decision:
        share = f"{100 * self.tokens / self.settings.total_tokens:.3g} % of the tokens"
        stays = f"the batch size stays at {self.batch_size:,}"
        if phase == "calibrate":
            reason = f"at {share} calibration begins again: {stays}"
        elif phase == "monitor" and len(self.settings.sizes) == 1:
            reason = f"calibration ends at {share}: {stays}, with a word where it does not fit"
        elif phase == "monitor":
            stays = stays if self.settings.min_batch_size is None else "the batch size may shrink"
            reason = f"the warm-up ends at {share}: {stays}"
        elif self.phase == "calibrate":
            reason = f"calibration ends at {share}: from here the batch size may grow"
        else:
            reason = f"from {share} on the batch size may grow again"
        self.phase = phase
        return self._note(reason)

    def _judge(self) -> Decision | None:
        e, s, B = self._evidence, self.settings, self.batch_size
        critical = e.critical
        larger, smaller, over = s.growth * B, s.smaller(B), excess(B, critical.value)
        verdict = verdict_on(B, critical, s.growth)
        too_large = e.may_warn and verdict == "too large"
        growing = self.phase == "warm up" or (len(s.sizes) == 1 and not self._capped)
        growing = growing and s.due(larger, self.tokens)
        counted = {
            "grow": growing and e.may_grow and verdict == "too small",
            "shrink": smaller is not None and too_large,
            "over": too_large and over > self._limit,
            "recovered": critical.lower >= B or (e.may_warn and over <= s.over),
        }
        self._rows = {row: self._rows[row] + 1 if now else 0 for row, now in counted.items()}
        long = {row for row, checks in self._rows.items() if checks >= s.patience}
        if "recovered" in long:
            self._limit = s.over
        if "grow" in long:
            return self._grow(larger)
        if "shrink" in long and smaller is not None:
            self._forget()
            self._capped = False
            return self._note(
                f"the critical batch size is at most {in_samples(critical.upper)} at {s.patience} "
                f"checks in a row, less than the batch size of {B:,}: it shrinks to {smaller:,}",
                new=smaller,
            )
        if "over" not in long:
            return None
        limit, self._limit, self._rows["over"] = self._limit, 2 * over, 0
        return self._note(
            f"the batch size of {B:,} is more than {limit:.3g} times the estimated critical batch "
            f"size of {in_samples(critical.value)}, which is at most {in_samples(critical.upper)}",
            warning=True,
        )

    def _grow(self, new: int) -> Decision:
        s = self.settings
        allows = (
            f"the critical batch size is at least {in_samples(self._evidence.critical.lower)} at "
            f"{s.patience} checks in a row, which allows {new:,}"
        )
        self._forget()
        if new <= s.max_batch_size:
            return self._note(allows, new=new)
        self._capped, self.phase = True, "monitor"
        if s.max_batch_size == s.batch_size:
            return self._note(
                f"{allows}: the batch size of {self.batch_size:,} is too small, and this "
                "controller does not make it larger",
                warning=True,
            )
        return self._note(
            f"{allows}, but max_batch_size={s.max_batch_size:,} does not: the batch size stays "
            f"at {self.batch_size:,}"
        )

    def check_run(self, run: RunIdentity) -> None:
        """Raise ValueError where the factor was measured in a run that differs."""
        self.settings.factor.check_run(run)

    def _forget(self) -> None:
        """Begin to count anew, for another batch size."""
        self._rows, self._limit = dict.fromkeys(self._rows, 0), self.settings.over

    def _note(self, reason: str, *, new: int | None = None, warning: bool = False) -> Decision:
        size = self.batch_size if new is None else new
        return self._decide(self.phase, size, self._evidence.critical, reason, warning=warning)

    def metrics(self) -> dict[str, float]:
        """Numbers for a tracker, under flat names.

        ``cbs/estimate`` with ``_lo`` and ``_hi``, or ``_lo`` alone where it is at least that;
        ``cbs/ratio``, the batch size divided by the estimate; ``batch/size``; ``batch/phase``: 0
        calibrate, 1 warm up, 2 monitor.
        """
        phase = {"batch/phase": float(PHASES.index(self.phase))}
        critical = critical_batch_metrics(self.batch_size, self._evidence.critical)
        return super().metrics() | phase | critical

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain types that strict JSON can hold."""
        return super().state_dict() | {
            "phase": self.phase,
            "capped": self._capped,
            "limit": finite_or_text(self._limit),
            "rows": dict(self._rows),
            "estimate": [finite_or_text(number) for number in self._evidence.critical],
        }

    def load_state_dict(self, state: dict[str, Any], *, change: Collection[str] = ()) -> None:
        """Continue from ``state_dict()`` with the same batch size, phase and counts of checks.

        Args:
            change: names of settings that may differ from the saved ones, such as ``"factor"`` once
                it was measured again. ``data_parallel`` and ``micro_batch`` may always differ, but
                must divide the first batch size too.

        Raises:
            ValueError: for a state with other settings (the message names the first), with another
                format, or with a batch size that these processes and micro-batches cannot divide.
        """
        super().load_state_dict(state, change=change)
        self.phase, self._limit = state["phase"], float(state["limit"])
        self._rows = dict(state["rows"])
        beyond = self.settings.growth * self.batch_size > self.settings.max_batch_size
        self._capped = state["capped"] and beyond  # a larger maximum lifts the cap
        ours = self.settings.state()
        if any(state["settings"][name] != ours[name] for name in ("factor", "growth", "over")):
            self._forget()  # counted under the old settings
        self._evidence = Evidence(Interval(*map(float, state["estimate"])))
