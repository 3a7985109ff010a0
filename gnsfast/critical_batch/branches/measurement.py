# SPDX-License-Identifier: Apache-2.0
"""``CriticalBatch``: what branches of a checkpoint say, and the factor to its noise scale."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gnsfast.arguments import finite
from gnsfast.critical_batch.branches.branch_rule import Matching, matching
from gnsfast.critical_batch.factor import CriticalBatchFactor
from gnsfast.noise_scale import ModuleNoiseScale

KIND, FORMAT = "critical batch", 1
NUMBERS = ("noise_scale", "lower", "upper", "trace", "grad_sqnorm")


@dataclass(frozen=True)
class Branch:
    """A branch that was trained.

    Args:
        k: its batch size over that of the run.
        batch_size: in samples.
        lr_factor: what its learning rates are multiplied with.
        loss: L_k, infinite where it diverged.
        loss_std: the noise of ``loss`` (``branch_rule.smoothed_std``); NaN where it is not known.
        steps, tokens: that it trained; the last step may go beyond Δ.
        state: ``"finished"``, ``"diverged"`` or, for one that will be tried again, ``"failed"``.
        reason: of a failure.
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

    def record(self) -> dict[str, Any]:
        return {k: finite(v) if isinstance(v, float) else v for k, v in asdict(self).items()}

    @staticmethod
    def of(record: Mapping[str, Any]) -> "Branch":
        loss = math.inf if record["loss"] is None else record["loss"]
        return Branch(**{**record, "loss": loss, "loss_std": number(record["loss_std"])})


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch size at a checkpoint by branched training, in samples.

    It lies between ``lower`` and ``upper``; ``value`` is their geometric mean. Where only one of
    them was found ``value`` is NaN and ``resolved`` False: ``upper`` infinite means "at least
    ``lower``", ``lower`` 0 "at most ``upper``". That interval is one of the grid, not of chance:
    ``noisy`` names the branches whose loss is less certain than the tolerance.

    Args:
        tokens: trained before the checkpoint.
        batch_size, tokens_per_sample: of the run.
        delta_tokens: Δ, trained by each branch.
        tolerance, alpha: ε and the weight of the newest step in L_k.
        lr: f(k): ``"sqrt"``, ``"linear"`` or ``"none"``.
        loss: what L_k is: ``"train"``, the moving average, or ``"evaluate"``, the run's own.
        branches: those that were trained, by ascending k.
        noise_scale, adam: at the checkpoint, Euclidean and under Adam's metric; None, for the
            reason in ``noise_scale_reason``, where there is none.
        missing: k and reason of the branches that failed.

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

    def __post_init__(self) -> None:
        self._matching  # noqa: B018 - a base that is missing or diverged is an error now

    @property
    def _matching(self) -> Matching:
        return matching({b.k: b.loss for b in self.branches}, self.tolerance)

    @property
    def lower(self) -> float:
        return self._matching.lower * self.batch_size

    @property
    def upper(self) -> float:
        return self._matching.upper * self.batch_size

    @property
    def resolved(self) -> bool:
        return self.lower > 0 and math.isfinite(self.upper)

    @property
    def value(self) -> float:
        return math.sqrt(self.lower * self.upper) if self.resolved else math.nan

    @property
    def noisy(self) -> tuple[float, ...]:
        """The k whose ``loss_std`` exceeds the tolerance: no verdict on them can be trusted."""
        return tuple(b.k for b in self.branches if b.loss_std > self.tolerance)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the verdicts may be those of noise; empty where nothing says so.

        Of a single measurement's evaluation losses only the second is looked at: how much they
        depend on the data that a branch happened to train on, ``averaged`` tells.
        """
        found = []
        if self.noisy:
            ks = ", ".join(f"{k:g}" for k in self.noisy)
            remedy = "take loss='evaluate' (a run with evaluate()), or a smaller alpha"
            if self.loss == "evaluate":
                remedy = "average more measurements"
            found.append(f"the noise of the loss exceeds {self.tolerance:g} for k = {ks}: {remedy}")
        if uneven := self._matching.uneven:
            found.append(
                f"k = {uneven[0]:g} does not match and the larger {self._matching.largest:g} does: "
                "take the average of measurements from several seeds of the data (averaged)"
            )
        return tuple(found)

    def ratio(self, metric: str = "euclidean") -> tuple[float, float, float]:
        """Critical batch size / noise scale, and the bounds that both intervals allow.

        NaN is a ratio that is not known, for want of a bound or of a |G|² above zero; its bounds
        still hold.

        Args:
            metric: of the noise scale: ``"euclidean"`` or ``"adam"``.

        Raises:
            ValueError: where that noise scale was not measured.
        """
        if metric not in ("euclidean", "adam"):
            raise ValueError(f"metric must be 'euclidean' or 'adam', not {metric!r}")
        scale = self.adam if metric == "adam" else self.noise_scale
        if scale is None or math.isnan(scale.noise_scale):
            why = f": {self.noise_scale_reason}" if self.noise_scale_reason else ""
            raise ValueError(f"no {metric} noise scale was measured at this checkpoint{why}")
        return (
            self.value / scale.noise_scale if math.isfinite(scale.noise_scale) else math.nan,
            self.lower / scale.upper,
            self.upper / scale.lower if scale.lower > 0 else math.inf,
        )

    def factor(
        self, metric: str = "euclidean", *, despite_doubts: bool = False
    ) -> CriticalBatchFactor:
        """``ratio``, to be saved and used elsewhere.

        Raises:
            ValueError: where the ratio is not known, or its noise scale was not measured; where
                there are ``doubts``, unless ``despite_doubts``.
        """
        return pooled_factor([self], metric, despite_doubts=despite_doubts)

    def record(self) -> dict[str, Any]:
        """A JSON object; what is infinite or not known is null (``lower`` has 0 for no bound)."""
        own = ("tokens", "batch_size", "tokens_per_sample", "delta_tokens")
        settings = ("tolerance", "alpha", "lr", "loss")
        return {
            "kind": KIND,
            "format": FORMAT,
            **{name: getattr(self, name) for name in own + settings},
            **{name: finite(getattr(self, name)) for name in ("lower", "upper", "value")},
            "resolved": self.resolved,
            "noisy": list(self.noisy),
            "doubts": list(self.doubts),
            "branches": [b.record() for b in self.branches],
            "missing": [{"k": k, "reason": reason} for k, reason in self.missing.items()],
            "noise_scale": scale_record(self.noise_scale),
            "adam": scale_record(self.adam),
            "noise_scale_reason": self.noise_scale_reason,
        }

    @staticmethod
    def of(record: Mapping[str, Any]) -> "CriticalBatch":
        """The measurement that ``record()`` came from.

        Raises:
            ValueError: for another kind of record, or one of another format.
        """
        if record.get("kind") != KIND or record.get("format") != FORMAT:
            raise ValueError(f"no {KIND!r} record of format {FORMAT}")
        names = ("tokens", "batch_size", "tokens_per_sample", "delta_tokens", "tolerance", "alpha")
        return CriticalBatch(
            **{name: record[name] for name in (*names, "lr", "loss", "noise_scale_reason")},
            branches=tuple(map(Branch.of, record["branches"])),
            noise_scale=scale_of(record["noise_scale"]),
            adam=scale_of(record["adam"]),
            missing={each["k"]: each["reason"] for each in record["missing"]},
        )

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "CriticalBatch":
        """The result that ``measure_critical_batch`` has left in its folder.

        Raises:
            ValueError: where there is none, or none that this version reads.
        """
        path = Path(folder) / RESULT
        if not path.is_file():
            raise ValueError(f"{folder} holds no finished measurement ({RESULT})")
        try:
            return CriticalBatch.of(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{path} is damaged or of another version: {e!r}") from e

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
        if self.resolved:
            value = f"{self.value:.3g}" if self.value < 1000 else f"{self.value:,.0f}"
            size = f"{self.lower:,.0f} to {self.upper:,.0f} samples (about {value})"
        elif self.lower > 0:
            size = (
                f"at least {self.lower:,.0f} samples: the grid has no larger k to find a bound with"
            )
        elif math.isfinite(self.upper):
            size = (
                f"at most {self.upper:,.0f} samples: the grid has no smaller k to find a bound with"
            )
        else:
            size = "any size: one branch has nothing to be compared with"
        what = "evaluation loss" if self.loss == "evaluate" else "training loss"
        lines = [
            f"critical batch size {size}",
            f"at {self.tokens:,} tokens, by branches of {self.delta_tokens:,} tokens, "
            f"{what} within {self.tolerance:g}, learning rate {self.lr}",
        ]
        lines += [f"not to be trusted: {doubt}" for doubt in self.doubts]
        if self.loss == "evaluate" and all(math.isnan(b.loss_std) for b in self.branches):
            lines.append(
                "how noisy the losses are is not known: measure again from other seeds of the "
                "data, and take the average (averaged)"
            )
        lines += [f"k = {k:g} is missing: {why}" for k, why in self.missing.items()]
        if self.noise_scale is not None:
            lines.append(f"{self.noise_scale}: the critical batch size is {_times(self.ratio())}")
        if self.adam is not None:
            times = _times(self.ratio("adam"))
            lines.append(f"under Adam's metric: {self.adam}: the critical batch size is {times}")
        if self.noise_scale_reason:
            lines.append(f"no noise scale: {self.noise_scale_reason}")
        return "\n".join(lines)


RESULT = "critical_batch.jsonl"
"""The file with the result: a line, as ``gnsfast report`` reads it."""


def pooled_factor(
    measurements: Sequence[CriticalBatch],
    metric: str = "euclidean",
    *,
    despite_doubts: bool = False,
) -> CriticalBatchFactor:
    """One factor from several checkpoints, for a later or larger run.

    ``value`` is the geometric mean over the checkpoints whose ratio is known. ``lower`` to
    ``upper`` holds the interval of every checkpoint, also of those that only know one bound: the
    spread between checkpoints is part of it.

    Raises:
        ValueError: without a measurement whose ratio is known, or where one has no noise scale
            under ``metric``; where one has ``doubts``, unless ``despite_doubts``.
    """
    for m in measurements:
        if m.doubts and not despite_doubts:
            raise ValueError(
                f"the measurement at {m.tokens:,} tokens is not to be trusted: {m.doubts[0]}. To "
                "take it all the same: despite_doubts=True"
            )
    ratios = [m.ratio(metric) for m in measurements]
    logs = [math.log(value) for value, _, _ in ratios if math.isfinite(value)]
    if not logs:
        at = ", ".join(f"{_times(r)} at {m.tokens:,} tokens" for r, m in zip(ratios, measurements))
        raise ValueError(f"the factor is not known from branches: {at or 'no measurement'}")
    each = ", ".join(
        f"{f'{r[0]:.3g}' if math.isfinite(r[0]) else 'a bound'} at {m.tokens:,} tokens"
        for r, m in zip(ratios, measurements)
    )
    return CriticalBatchFactor(
        math.exp(math.fsum(logs) / len(logs)),
        min(lower for _, lower, _ in ratios),
        max(upper for _, _, upper in ratios),
        metric,
        f"branches: {each}",
    )


def scale_record(scale: ModuleNoiseScale | None) -> dict[str, Any] | None:
    """Its five numbers, where it was measured."""
    if scale is None or math.isnan(scale.noise_scale):
        return None
    return {k: finite(getattr(scale, k)) for k in NUMBERS} | {"resolved": scale.resolved}


def scale_of(record: Mapping[str, Any] | None) -> ModuleNoiseScale | None:
    """A ``noise_scale`` or an ``upper`` of null is infinite."""
    if record is None:
        return None
    numbers = [math.inf if record[k] is None else record[k] for k in NUMBERS]
    return ModuleNoiseScale(*numbers)


def number(x: float | None) -> float:
    return math.nan if x is None else x


def _times(ratio: tuple[float, float, float]) -> str:
    value, lower, upper = ratio
    if math.isfinite(value):
        return f"{value:.3g} times that ({lower:.3g} to {upper:.3g})"
    if lower > 0:
        return f"at least {lower:.3g} times that"
    if math.isfinite(upper):
        return f"at most {upper:.3g} times that"
    return "not known beside it"
