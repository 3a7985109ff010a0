# SPDX-License-Identifier: Apache-2.0
"""``CriticalBatch``: the result of a measurement, its factor to the noise scale, and its record."""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_choice, check_format, finite_or_none
from gnsfast.critical_batch.branches.branch_rule import Matching, matching
from gnsfast.critical_batch.critical_batch_factor import CriticalBatchFactor, RunIdentity
from gnsfast.interval import Interval
from gnsfast.noise_scale import (
    METRICS,
    OTHERS,
    DualNormEstimate,
    Estimate,
    ModuleNoiseScale,
    NoiseScale,
)

KIND, FORMAT = "critical batch", 1
RESULT = "critical_batch.jsonl"
"""The file of the result: one line, as ``gnsfast report`` reads it."""

SETTINGS = (
    *("tokens", "batch_size", "tokens_per_sample", "delta_tokens"),
    *("tolerance", "alpha", "lr", "loss"),
)
"""The fields of ``CriticalBatch`` that are known before a branch is trained."""

Scale = type[ModuleNoiseScale] | type[DualNormEstimate]
SCALES: dict[str, Scale] = {
    **dict.fromkeys(("noise_scale", "adam"), ModuleNoiseScale),
    **dict.fromkeys(("sign", "spectral"), DualNormEstimate),
}
"""Its fields that hold a noise scale, and what they are."""


@dataclass(frozen=True)
class Branch:
    """A branch that was trained.

    Args:
        k: its batch size divided by that of the run.
        batch_size: its batch size in samples.
        lr_factor: the factor by which it multiplies every learning rate of the run.
        loss: L_k, infinite where a loss was not finite.
        loss_std: the noise of ``loss`` (``branch_rule.smoothed_std``); NaN where it is unknown.
        steps, tokens: what this branch has trained. The last step may go beyond Δ.
        state: ``"finished"``, ``"diverged"``, or ``"failed"``, which the next call trains again. A
            branch has diverged if a loss is not finite. In a ``CriticalBatch`` it also has if it
            does not match and ends above ``start``, by more than the tolerance and three times the
            noise of that difference.
        reason: why the branch failed.
        start: the loss before the first step.
    """

    k: float
    batch_size: int
    lr_factor: float
    loss: float
    loss_std: float
    steps: int
    tokens: int
    state: str = "finished"
    reason: str = ""
    start: float = math.nan

    def record(self) -> dict[str, Any]:
        """A JSON object; an infinite ``loss`` and an unknown ``loss_std`` are null."""
        return {k: finite_or_none(v) for k, v in asdict(self).items()}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "Branch":
        loss = math.inf if record["loss"] is None else record["loss"]
        rest = {name: null_to_nan(record[name]) for name in ("loss_std", "start")}
        return Branch(**{**record, "loss": loss, **rest})


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch size at a checkpoint, in samples, measured by training branches.

    It lies between ``lower`` and ``upper``; ``value`` is their geometric mean. Where only one bound
    was found, ``value`` is NaN and ``resolved`` is False: an infinite ``upper`` means "at least
    ``lower``", a ``lower`` of 0 means "at most ``upper``". The interval comes from the spacing of
    the grid, and is not a confidence interval. ``noisy`` names the branches whose loss is less
    certain than the tolerance.

    Args:
        tokens: the tokens that the run had trained before the checkpoint.
        batch_size, tokens_per_sample: those of the run.
        delta_tokens: Δ, the tokens that each branch trains.
        tolerance, alpha: ε and the weight of the newest step in L_k.
        lr: f(k): ``"sqrt"``, ``"linear"`` or ``"keep"``.
        loss: ``"train"``, where L_k is a moving average of training losses, or ``"evaluate"``,
            where it is the loss that the run's ``evaluate()`` returned.
        branches: those that were trained, by ascending k.
        noise_scale: the Euclidean noise scale at the checkpoint. None where it was not measured;
            ``noise_scale_reason`` says why.
        adam, sign, spectral: those in other metrics, where they were measured.
        missing: why each failed branch failed, by its k.
        run: what identifies the run, as far as it was known where the noise scale was measured.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """

    tokens: int
    batch_size: int
    tokens_per_sample: int
    delta_tokens: int
    tolerance: float
    alpha: float
    lr: str
    loss: str
    branches: tuple[Branch, ...]
    noise_scale: ModuleNoiseScale | None = None
    adam: ModuleNoiseScale | None = None
    noise_scale_reason: str = ""
    missing: Mapping[float, str] = field(default_factory=dict)
    sign: DualNormEstimate | None = None
    spectral: DualNormEstimate | None = None
    run: RunIdentity = RunIdentity()

    def __post_init__(self) -> None:
        self._matching  # noqa: B018 - raises where the branch k = 1 is missing or diverged
        least, named = math.inf, []
        for b in self.branches:
            noise = 0.0 if math.isnan(b.loss_std) else b.loss_std * math.sqrt(2 / self.alpha)
            worse = (
                b.loss > least + self.tolerance and b.loss > b.start + self.tolerance + 3 * noise
            )
            worse = worse or not math.isfinite(b.loss)
            named.append(replace(b, state="diverged" if worse else "finished"))
            least = min(least, b.loss)
        object.__setattr__(self, "branches", tuple(named))

    @property
    def _matching(self) -> Matching:
        return matching({b.k: b.loss for b in self.branches}, self.tolerance)

    @property
    def interval(self) -> Interval:
        """``value`` from ``lower`` to ``upper``."""
        bounds = self._matching
        lower, upper = bounds.lower * self.batch_size, bounds.upper * self.batch_size
        both = lower > 0 and math.isfinite(upper)
        return Interval(math.sqrt(lower * upper) if both else math.nan, lower, upper)

    lower = property(lambda self: self.interval.lower)
    upper = property(lambda self: self.interval.upper)
    value = property(lambda self: self.interval.value)
    resolved = property(lambda self: self.interval.resolved)

    def _scale(self, metric: str) -> Estimate | None:
        scale: Estimate | None = vars(self)["noise_scale" if metric == "euclidean" else metric]
        return scale

    @property
    def noisy(self) -> tuple[float, ...]:
        """Each k whose ``loss_std`` exceeds the tolerance, so that its verdict may be chance."""
        return tuple(b.k for b in self.branches if b.loss_std > self.tolerance)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to think that noise decided a verdict; empty where there is none.

        There are two reasons: a ``noisy`` branch, and a k that fails while a larger one matches.
        Evaluation losses of a single measurement can only show the second. Their ``loss_std`` is
        unknown until ``averaged`` finds how much they depend on the data of a branch.
        """
        found = []
        if self.noisy:
            ks = ", ".join(f"{k:g}" for k in self.noisy)
            remedy = "pass loss='evaluate', which needs a run with evaluate(), or a smaller alpha"
            if self.loss == "evaluate":
                remedy = "average more measurements"
            found.append(
                f"the noise of the loss exceeds the tolerance of {self.tolerance:g} for k = {ks}: "
                f"{remedy}"
            )
        if uneven := self._matching.uneven:
            found.append(
                f"k = {uneven[0]:g} does not match, but the larger k = {self._matching.largest:g} "
                "does: average measurements on other data (repeats=3, --repeats 3)"
            )
        return tuple(found)

    def ratio(self, metric: str = "euclidean") -> Interval:
        """Critical batch size / noise scale, with the lower and upper bound from both intervals.

        The ratio is NaN where a bound of the critical batch size is missing, or the mean |G|² is
        not positive; its bounds still hold.

        Args:
            metric: of the noise scale: ``"euclidean"``, ``"adam"``, ``"sign"`` or ``"spectral"``.

        Raises:
            ValueError: where that noise scale was not measured.
        """
        check_choice("metric", metric, METRICS)
        scale = self._scale(metric)
        if scale is None or math.isnan(scale.noise_scale):
            why = f": {self.noise_scale_reason}" if self.noise_scale_reason else ""
            raise ValueError(f"the {metric} noise scale was not measured at this checkpoint{why}")
        return self.interval.over(scale.interval)

    def factor(
        self, metric: str = "euclidean", *, despite_doubts: bool = False
    ) -> CriticalBatchFactor:
        """``ratio`` as a factor that can be saved and used in another run.

        Raises:
            ValueError: where the ratio is unknown, or its noise scale was not measured; where
                there are ``doubts``, unless ``despite_doubts``.
        """
        return pooled_factor([self], metric, despite_doubts=despite_doubts)

    def record(self) -> dict[str, Any]:
        """A JSON object; infinite and unknown numbers are null (``lower`` is 0 without a bound)."""
        return {
            "kind": KIND,
            "format": FORMAT,
            **{name: getattr(self, name) for name in SETTINGS},
            **self.interval.record(),
            "resolved": self.resolved,
            "noisy": list(self.noisy),
            "doubts": list(self.doubts),
            "branches": [b.record() for b in self.branches],
            "missing": [{"k": k, "reason": reason} for k, reason in self.missing.items()],
            **_records(vars(self)),
            "noise_scale_reason": self.noise_scale_reason,
            "run": asdict(self.run),
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "CriticalBatch":
        """The measurement that ``record()`` came from.

        Raises:
            ValueError: for a record of another kind or format.
        """
        check_format("the record", record, KIND, FORMAT)
        return CriticalBatch(
            branches=tuple(map(Branch.from_record, record["branches"])),
            missing={each["k"]: each["reason"] for each in record["missing"]},
            **known_at_checkpoint(record),
        )

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "CriticalBatch":
        """The result that ``measure_critical_batch`` wrote into its folder.

        Raises:
            ValueError: where there is no result, or this version of gnsfast cannot read it.
        """
        path = Path(folder) / RESULT
        if not path.is_file():
            raise ValueError(f"{folder} holds no finished measurement: {RESULT} is missing")
        try:
            return CriticalBatch.from_record(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path} is damaged, or another version of gnsfast wrote it ({e!r})"
            ) from e

    def __str__(self) -> str:
        rows = [["k", "batch", "lr x", "steps", "loss", "noise", "above least", ""]]
        least = math.inf
        for b in self.branches:
            above = b.loss - least if math.isfinite(least) else math.nan
            verdict = b.state if b.state == "diverged" else ""
            if not verdict and not math.isnan(above):
                verdict = "matches" if above <= self.tolerance else "does not match"
            cells = (f"{x:.4f}" if math.isfinite(x) else "-" for x in (b.loss, b.loss_std, above))
            size = (f"{b.k:g}", f"{b.batch_size:,}", f"{b.lr_factor:.3g}", f"{b.steps:,}")
            rows.append([*size, *cells, verdict])
            least = min(least, b.loss)
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(r[:-1], widths)) + f"  {r[-1]}" for r in rows]
        return "\n".join([*(line.rstrip() for line in lines), self.summary()])

    def summary(self) -> str:
        """The result in a few lines, without the table."""
        note = "for a lower bound, measure a smaller k too"
        if self.resolved:
            note = "about " + (f"{self.value:.3g}" if self.value < 1000 else f"{self.value:,.0f}")
        elif self.lower > 0:
            note = "for an upper bound, measure a larger k too"
        ends = self.interval.ends("{:,.0f}".format)
        size = f"{ends} samples ({note})"
        if not ends:
            size = "unknown, because a single branch has nothing to be compared with"
        what = "evaluation loss" if self.loss == "evaluate" else "training loss"
        lines = [
            f"critical batch size {size}",
            f"at {self.tokens:,} tokens, by branches of {self.delta_tokens:,} tokens, "
            f"{what} within {self.tolerance:g}, learning rate {self.lr}",
        ]
        lines += [f"doubtful: {doubt}" for doubt in self.doubts]
        if self.loss == "evaluate" and all(math.isnan(b.loss_std) for b in self.branches):
            lines.append(
                "the noise of the losses is unknown: average measurements on other data "
                "(repeats=3, --repeats 3)"
            )
        lines += [f"k = {k:g} is missing: {why}" for k, why in self.missing.items()]
        for metric in METRICS:
            if (scale := self._scale(metric)) is not None:
                words = f"{OTHERS[metric]}: " if metric in OTHERS else ""
                times = _times_noise_scale(self.ratio(metric))
                lines.append(f"{words}{scale}: the critical batch size is {times}")
        if self.noise_scale_reason:
            lines.append(f"the noise scale was not measured: {self.noise_scale_reason}")
        return "\n".join(lines)


def pooled_factor(
    measurements: Sequence[CriticalBatch],
    metric: str = "euclidean",
    *,
    despite_doubts: bool = False,
) -> CriticalBatchFactor:
    """One factor from several checkpoints, for a later or larger run.

    ``value`` is the geometric mean over the checkpoints whose ratio is known. ``lower`` to
    ``upper`` covers the interval of every checkpoint, even where a checkpoint has only one bound,
    so that it includes the spread between checkpoints.

    Raises:
        ValueError: where no measurement has a known ratio, or one has no noise scale under
            ``metric``; where one has ``doubts``, unless ``despite_doubts``; where they are of
            different runs.
    """
    for m in measurements:
        if m.doubts and not despite_doubts:
            raise ValueError(
                f"the measurement at {m.tokens:,} tokens is doubtful: {m.doubts[0]}. To use it "
                "anyway, pass despite_doubts=True"
            )
        if other := measurements[0].run.differences(m.run):
            raise ValueError(
                f"The measurements are of different runs, one with {', '.join(other)}. A factor "
                "holds for one run."
            )
    ratios = [m.ratio(metric) for m in measurements]
    logs = [math.log(value) for value, _, _ in ratios if math.isfinite(value)]
    if not logs:
        at = ", ".join(
            f"{_times_noise_scale(r)} at {m.tokens:,} tokens" for r, m in zip(ratios, measurements)
        )
        raise ValueError(
            f"the branches do not give a factor: {at or 'there is no measurement'}. A factor needs "
            "a measurement with both bounds: extend the grid of k"
        )
    each = ", ".join(
        f"{f'{r[0]:.3g}' if math.isfinite(r[0]) else 'a bound'} at {m.tokens:,} tokens"
        for r, m in zip(ratios, measurements)
    )
    ends = min(ratio.lower for ratio in ratios), max(ratio.upper for ratio in ratios)
    run, tokens = measurements[0].run, tuple(m.tokens for m in measurements)
    value = math.exp(math.fsum(logs) / len(logs))
    return CriticalBatchFactor(value, *ends, metric, f"branches: {each}", run, tokens)


def null_to_nan(x: float | None) -> float:
    return math.nan if x is None else x


def _times_noise_scale(ratio: Interval) -> str:
    value, lower, upper = map("{:.3g}".format, ratio)
    if math.isfinite(ratio.value):
        return f"{value} times that ({lower} to {upper})"
    ends = ratio.ends("{:.3g}".format)
    return f"{ends} times that" if ends else "an unknown multiple of that"


def noise_scale_records(found: NoiseScale | None) -> dict[str, Any]:
    """A JSON object of the noise scale in each metric, or None where it was not measured."""
    return _records({} if found is None else {"noise_scale": found, **found.others})


def _records(scales: Mapping[str, Any]) -> dict[str, Any]:
    records: dict[str, Any] = dict.fromkeys(SCALES)
    for name, kind in SCALES.items():
        if (scale := scales.get(name)) is not None and not math.isnan(scale.noise_scale):
            numbers = {f.name: finite_or_none(getattr(scale, f.name)) for f in fields(kind)}
            records[name] = numbers | {"resolved": scale.resolved}
    return records


def known_at_checkpoint(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``CriticalBatch`` that are known before a branch is trained, from a record with
    the settings and what was measured at the checkpoint, if anything was.
    """
    own: dict[str, Any] = {name: record[name] for name in SETTINGS}
    for name, kind in SCALES.items():
        if numbers := record.get(name):  # in which null is infinity
            each = (numbers[f.name] for f in fields(kind))
            own[name] = kind(*(math.inf if x is None else x for x in each))
    own["noise_scale_reason"] = record.get("noise_scale_reason", "")
    return own | {"run": RunIdentity.from_record(record.get("run"))}


def averaged(measurements: Sequence[CriticalBatch]) -> CriticalBatch:
    """Apply the rule to the mean losses of several measurements.

    Each measurement starts from the same checkpoint and trains on other data: restore the same
    folder, take a stream of another seed, and measure into a new folder. ``loss_std`` of the result
    is the standard error of the mean, ``statistics.stdev(losses) / sqrt(len(losses))``. It includes
    what a single measurement cannot know: how much the weights depend on the data that a branch
    trained on. The result has each k that all measurements trained. A branch that diverged in one
    of them counts as diverged.

    Args:
        measurements: at least two, with the same checkpoint and settings.

    Raises:
        ValueError: for fewer than two measurements, or where a setting differs (the message names
            it).
        BranchError: where one of them lacks k = 1.

    >>> import math
    >>> from dataclasses import replace
    >>> from gnsfast.critical_batch import Branch, CriticalBatch
    >>> from gnsfast.critical_batch import averaged
    >>> one = CriticalBatch(
    ...     5000, 32, 10, 9000, 0.01, 0.5, "sqrt", "evaluate",
    ...     branches=(Branch(1.0, 32, 1.0, 2.0, math.nan, 28, 9000),
    ...               Branch(2.0, 64, 1.4, 2.1, math.nan, 14, 9000)),
    ... )
    >>> other = replace(one, branches=tuple(replace(b, loss=b.loss + 0.004) for b in one.branches))
    >>> [f"{b.loss:.3f} ± {b.loss_std:.3f}" for b in averaged([one, other]).branches]
    ['2.002 ± 0.002', '2.102 ± 0.002']
    """
    if len(measurements) < 2:
        raise ValueError(
            f"averaged() needs at least two measurements of one checkpoint, not {len(measurements)}"
        )
    first = measurements[0]
    for other in measurements[1:]:
        for name in SETTINGS:
            if (theirs := getattr(other, name)) != (ours := getattr(first, name)):
                raise ValueError(
                    f"the measurements differ in {name}: {ours!r} and {theirs!r}. An average needs "
                    "measurements of one checkpoint with the same settings"
                )
    by_k = [{b.k: b for b in m.branches} for m in measurements]
    shared = [k for k in by_k[0] if all(k in each for each in by_k)]
    missing = {k: "not trained in every measurement" for each in by_k for k in each}
    return replace(
        first,
        branches=tuple(_mean([each[k] for each in by_k]) for k in shared),
        missing={k: why for k, why in sorted(missing.items()) if k not in shared},
    )


def _mean(branches: Sequence[Branch]) -> Branch:
    losses, start = [b.loss for b in branches], statistics.fmean(b.start for b in branches)
    if not all(map(math.isfinite, losses)):
        return replace(branches[0], loss=math.inf, loss_std=math.nan, start=start)
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return replace(branches[0], loss=statistics.fmean(losses), loss_std=error, start=start)
