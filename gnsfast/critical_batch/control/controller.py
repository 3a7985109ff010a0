# SPDX-License-Identifier: Apache-2.0
"""``BatchSizeController``: a batch size that grows with the critical batch size."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from gnsfast.arguments import finite_or_text, whole_number
from gnsfast.critical_batch.control.decision import Decision, Estimate, estimate
from gnsfast.critical_batch.control.settings import make_settings
from gnsfast.critical_batch.control.token_schedules import Shape, by_tokens
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor
from gnsfast.noise_scale import NoiseScale

KIND, FORMAT = "batch size controller", 2
PHASES = ("calibrate", "warm up", "monitor")


class BatchSizeController:
    """Grow the batch size when the noise scale times a factor shows that training can use it.

    There are three phases:

    - "calibrate" only observes, because the noise scale of the first steps is small and moves.
    - "warm up" grows the batch size from B to ``growth`` * B, and with it the learning rate, once
      the lower end of the estimate has been at least ``growth`` * B at ``patience`` checks in a
      row.
    - "monitor" only warns.

    The estimate is that of the critical batch size (CBS): the noise scale times ``factor``. The
    noise scale alone is not the CBS (Merrill et al. 2025 find it off by orders of magnitude), so
    the factor has no default; ``factor=1.0`` treats the two as equal.

    Args:
        batch_size: samples of the first optimizer steps, over all processes, counted as
            ``gns.microbatch`` counts them.
        factor: CBS / noise scale, as a number or measured by branches. A measured factor's own
            lower end is used to decide on growth.
        tokens_per_sample: of each sample.
        total_tokens: of the whole run.
        max_batch_size: never exceeded. The first growth beyond it is refused and ends the warm-up.
        metric: ``"adam"``, ``"sign"`` or ``"spectral"`` uses ``noise_scale.under(metric)``, and a
            factor measured with it.
        calibrate, warm_up_until: shares of ``total_tokens`` at which these phases end.
        growth: a whole number, at least 2.
        lr, betas, weight_decay: the rules (``Rules``) by which they follow the batch size:
            ``"sqrt"`` multiplies the learning rate by √growth (Adam), ``"linear"`` by growth (SGD);
            ``betas="half_life"`` keeps the half-life of Adam's second moments in tokens;
            ``weight_decay="timescale"`` keeps that of the weights, which AdamW's decay sets.
        patience: checks in a row before a growth or a warning. Checks closer together than the
            noise scale's window see some updates twice.
        check_every: tokens between two checks; by default 1/400 of ``total_tokens``.
        over: warn where the batch size exceeds the estimate times this, and not again before it
            has recovered. Only a noise scale with a bounded interval can cause a warning.
        data_parallel, micro_batch: processes, and samples of a micro-batch on each, by default the
            first batch in one piece. Every batch size is a multiple of their product.

    After a check without a measurement (NaN) every count of checks in a row starts again; "at least
    X" is evidence for growth. The mean of a drifting window lags behind: it counts for growth only
    while its estimate does not fall, and for a warning only while it does not rise. The batch size
    never shrinks.

    All processes decide alike, because ``gns.compute()`` is the same on all of them.

    Raises:
        ValueError: for an invalid setting; the message names it.

    Source: Merrill et al. 2025, batch size warm-up ("Critical Batch Size Revisited"), with an
    interval and hysteresis in place of thresholds by hand; those of the rules are in ``RULES``.

    >>> from gnsfast.critical_batch import BatchSizeController
    >>> gns = gnsfast.GradientNoiseScale(gnsfast.convert(torch.nn.Linear(5, 2)))
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

    def __init__(
        self,
        batch_size: int,
        *,
        factor: float | CriticalBatchFactor,
        tokens_per_sample: int,
        total_tokens: int,
        max_batch_size: int,
        metric: str = "euclidean",
        calibrate: float = 0.01,
        warm_up_until: float = 1.0,
        growth: int = 2,
        lr: str = "sqrt",
        betas: str = "keep",
        weight_decay: str = "keep",
        patience: int = 3,
        check_every: int | None = None,
        over: float = 1.2,
        data_parallel: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        self.settings = make_settings(
            batch_size=batch_size,
            factor=factor,
            metric=metric,
            tokens_per_sample=tokens_per_sample,
            total_tokens=total_tokens,
            max_batch_size=max_batch_size,
            calibrate=calibrate,
            warm_up_until=warm_up_until,
            growth=growth,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            patience=patience,
            check_every=check_every,
            over=over,
            data_parallel=data_parallel,
            micro_batch=micro_batch,
        )
        self.batch_size = self.settings.batch_size
        self.tokens = 0
        self.decisions: list[Decision] = []
        self._estimate = Estimate()
        self._rows = {"grow": 0, "over": 0, "recovered": 0}
        self._warned = self._capped = self.scheduled = False
        self.phase = self._phase_at(0)

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step on each process."""
        return self.batch_size // self.settings.samples_at_once

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.batch_size * self.settings.tokens_per_sample

    @property
    def lr_factor(self) -> float:
        """The factor by which all growth so far has multiplied the learning rate."""
        return self.settings.rules.lr_factor(self.batch_size / self.settings.batch_size)

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
        tokens = whole_number("tokens", tokens, 0)
        risen, length = tokens - self.tokens, self.settings.tokens_per_sample
        if 0 < risen < length and 10 * risen < self.batch_tokens:
            raise ValueError(
                f"tokens rose by {risen:,} to {tokens:,}, but a step has about "
                f"{self.batch_tokens:,}: progress is counted in tokens, not in steps or samples"
            )
        if tokens < self.tokens:
            raise ValueError(
                f"tokens went back from {self.tokens:,} to {tokens:,}: a run that resumes from a "
                "checkpoint must load the controller's state too"
            )
        every = self.settings.check_every
        if due := tokens // every > self.tokens // every:
            found = noise_scale() if callable(noise_scale) else noise_scale
            self._estimate = estimate(found, self.settings.factor, self._estimate.value)
        self.tokens = tokens
        if (phase := self._phase_at(tokens)) != self.phase:
            return self._enter(phase)
        return self._judge() if due and phase != "calibrate" else None

    def _phase_at(self, tokens: int) -> str:
        s = self.settings
        if self._capped or tokens >= s.warm_up_until * s.total_tokens:
            return "monitor"
        return "warm up" if tokens >= s.calibrate * s.total_tokens else "calibrate"

    def _enter(self, phase: str) -> Decision:
        share = f"{100 * self.tokens / self.settings.total_tokens:.3g} % of the tokens"
        stays = f"the batch size stays at {self.batch_size:,}"
        if phase == "calibrate":
            reason = f"at {share} calibration begins again: {stays}"
        elif phase == "monitor":
            reason = f"the warm-up ends at {share}: {stays}"
        elif self.phase == "calibrate":
            reason = f"calibration ends at {share}: from here the batch size may grow"
        else:
            reason = f"from {share} on the batch size may grow again"
        self.phase = phase
        return self._decide(reason)

    def _judge(self) -> Decision | None:
        e, s, B = self._estimate, self.settings, self.batch_size
        wanted = s.growth * B
        over = e.may_warn and B > s.over * e.value
        growing = self.phase == "warm up" and e.may_grow and e.lower >= wanted
        recovered = e.lower >= B or (e.may_warn and not over)
        for row, counts in (("grow", growing), ("over", over), ("recovered", recovered)):
            self._rows[row] = self._rows[row] + 1 if counts else 0
        if self._rows["recovered"] >= s.patience:
            self._warned = False
        if self._rows["grow"] >= s.patience:
            return self._grow(wanted)
        if self._rows["over"] >= s.patience and not self._warned:
            self._warned = True
            return self._decide(
                f"the batch size of {B:,} is more than {s.over:g} times the estimated critical "
                f"batch size of {_samples(e.value)}",
                warning=True,
            )
        return None

    def _grow(self, new: int) -> Decision:
        s, old = self.settings, self.batch_size
        allows = (
            f"the critical batch size is at least {_samples(self._estimate.lower)} at {s.patience} "
            f"checks in a row, which allows {new:,}"
        )
        self._rows = dict.fromkeys(self._rows, 0)
        if new > s.max_batch_size:
            self._capped, self.phase = True, "monitor"
            return self._decide(
                f"{allows}, but max_batch_size={s.max_batch_size:,} does not: the batch size stays "
                f"at {old:,}"
            )
        self.batch_size = new
        return self._decide(allows, old=old)

    def _decide(self, reason: str, *, old: int | None = None, warning: bool = False) -> Decision:
        new, s, e = self.batch_size, self.settings, self._estimate
        old = new if old is None else old
        decision = Decision(
            *(self.tokens, self.phase, old, new),
            lr_factor=s.rules.lr_factor(new / old),
            estimate=e.value,
            lower=e.lower,
            upper=e.upper,
            reason=reason,
            warning=warning,
        )
        self.decisions.append(decision)
        return decision

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where an optimizer could not follow the growth that is left."""
        k, s = 1, self.settings
        while self.batch_size * k * s.growth <= s.max_batch_size:
            k *= s.growth
        s.rules.check(optimizer, k)

    def apply(
        self, decision: Decision, optimizer: torch.optim.Optimizer, *, lr: bool = True
    ) -> None:
        """Move the hyperparameters of every parameter group as a decision says, by the rules.

        Args:
            lr: False leaves the learning rate to the caller; so does an earlier ``lr_lambda``.

        Raises:
            ValueError: where an optimizer cannot follow (``check_optimizer`` says so before the
                first step); where the learning rate changes and a scheduler sets it, which would
                undo the change at its next step.
        """
        lr = lr and not self.scheduled and decision.lr_factor != 1
        if lr and any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                "a scheduler sets the learning rates (its initial_lr is in the parameter groups) "
                "and would undo this change: give LambdaLR controller.lr_lambda(shape), or pass "
                "lr='none'"
            )
        self.settings.rules.apply(optimizer, decision.new / decision.old, lr=lr)

    def lr_lambda(self, shape: Shape) -> Callable[[int], float]:
        """``shape`` at the controller's tokens, times ``lr_factor``, for ``LambdaLR``.

        Call ``scheduler.step()`` after ``update``, once per optimizer step; the scheduler's step
        number is ignored. From now on ``apply`` leaves the learning rate alone.

        >>> from gnsfast.critical_batch import BatchSizeController
        >>> from gnsfast.critical_batch.control import cosine
        >>> controller = BatchSizeController(
        ...     8, factor=4.0, tokens_per_sample=64, total_tokens=10**6, max_batch_size=64
        ... )
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
        >>> rate = controller.lr_lambda(cosine(10**6, warm_up=10**4))
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        """
        self.scheduled = True
        return by_tokens(lambda tokens: shape(tokens) * self.lr_factor, lambda: self.tokens)

    def metrics(self) -> dict[str, float]:
        """Numbers for a tracker, under flat names.

        ``cbs/estimate`` with ``_lo`` and ``_hi``, or ``_lo`` alone where it is at least that;
        ``cbs/ratio``, the batch size divided by the estimate; ``batch/size``; ``batch/phase``: 0
        calibrate, 1 warm up, 2 monitor.
        """
        e = self._estimate
        found = {
            "batch/size": float(self.batch_size),
            "batch/phase": float(PHASES.index(self.phase)),
        }
        if math.isnan(e.value):
            return found
        found["cbs/estimate_lo"] = e.lower
        if math.isfinite(e.upper):
            found |= {"cbs/estimate": e.value, "cbs/estimate_hi": e.upper}
            if e.value > 0:
                found["cbs/ratio"] = self.batch_size / e.value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain types that strict JSON can hold."""
        e = self._estimate
        return {
            "kind": KIND,
            "format": FORMAT,
            "settings": self.settings.state(),
            "tokens": self.tokens,
            "batch_size": self.batch_size,
            "phase": self.phase,
            "capped": self._capped,
            "warned": self._warned,
            "rows": dict(self._rows),
            "estimate": [finite_or_text(number) for number in (e.value, e.lower, e.upper)],
            "decisions": [decision.state() for decision in self.decisions],
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
        if state.get("kind") != KIND or state.get("format") != FORMAT:
            raise ValueError(
                f"the state is a {state.get('kind')!r} of format {state.get('format')!r}; this "
                f"version of gnsfast reads a {KIND!r} of format {FORMAT}"
            )
        self.settings.check_saved(state["settings"], change)
        self.settings.check_batch(state["batch_size"])
        if state["batch_size"] > self.settings.max_batch_size:
            raise ValueError(
                f"the state's batch size of {state['batch_size']} is beyond "
                f"max_batch_size={self.settings.max_batch_size}, and a batch size never shrinks"
            )
        self.batch_size, self.tokens = state["batch_size"], state["tokens"]
        self.phase, self._warned, self._rows = state["phase"], state["warned"], dict(state["rows"])
        beyond = self.settings.growth * self.batch_size > self.settings.max_batch_size
        self._capped = state["capped"] and beyond  # a larger maximum lifts the cap
        ours = self.settings.state()
        if any(state["settings"][name] != ours[name] for name in ("factor", "growth", "over")):
            self._rows = dict.fromkeys(self._rows, 0)  # counted under the old settings
        value, lower, upper = map(float, state["estimate"])
        self._estimate = Estimate(value, lower, upper)
        self.decisions = [Decision.from_state(each) for each in state["decisions"]]


def _samples(estimate: float) -> str:
    """An estimate with four digits, or all of its digits from 1,000 on."""
    return f"{estimate:.4g}" if estimate < 1000 else f"{estimate:,.0f}"
