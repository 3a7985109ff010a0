# SPDX-License-Identifier: Apache-2.0
"""A run as its logs tell it, in numbers."""

import bisect
import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gnsfast.cli.words import factors_in, name_of
from gnsfast.integrations.trackers import PRESENT, SCALES
from gnsfast.interval import Interval
from gnsfast.noise_scale import OTHERS, OVER

GROUP, LOWER = "gns/group/", "_lo"

LISTED = 32
"""How many samples the report lists of a run."""


@dataclass
class Point:
    """The numbers of a step; None is NaN or infinite."""

    step: int
    values: dict[str, float | None]

    @property
    def tokens(self) -> float | None:
        return self.values.get("tokens")

    def scale(self, name: str) -> Interval | None:
        """A noise scale or an estimate; None if it was not logged."""
        keys = (name, f"{name}_lo", f"{name}_hi")
        logged = any(key in self.values for key in keys)
        return Interval.read(self.values, *keys) if logged else None

    @property
    def ratio(self) -> float | None:
        """Batch size / estimate of the critical batch size."""
        if (ratio := self.values.get("cbs/ratio")) is not None:
            return ratio
        size, estimate = self.values.get("batch/size"), self.values.get("cbs/estimate")
        return size / estimate if size and estimate and estimate > 0 else None


class LayerLine(NamedTuple):
    """The noise scale of each module at a step, by path."""

    step: int
    tokens: float | None
    values: dict[str, float | None]


@dataclass(eq=False)
class Run:
    """What was read from one file, or from all files of a run."""

    name: str = ""
    path: Path = Path()
    header: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    layers: list[LayerLine] = field(default_factory=list)
    last_layers: dict[str, Interval] = field(default_factory=dict)
    """By path, of the last line that has layers."""
    decisions: list[dict[str, Any]] = field(default_factory=list)
    critical: list[dict[str, Any]] = field(default_factory=list)
    largest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The samples with large gradients, as logged, each with the ``step`` of its line."""
    check: dict[str, Any] | None = None
    state: str = "open"
    """Or ``"ended"`` or ``"interrupted"``, once a line says so."""
    notes: dict[str, None] = field(default_factory=dict)
    """What a reader of the report must know, in order."""

    @property
    def end(self) -> Point | None:
        return self.points[-1] if self.points else None

    @property
    def losses(self) -> list[float | None]:
        return [p.values["loss"] for p in self.points if "loss" in p.values]

    def last(self, name: str) -> float | None:
        """The newest finite value of this name, if there is one."""
        values = (p.values.get(name) for p in reversed(self.points))
        return next((v for v in values if v is not None), None)

    def last_scale(self, name: str) -> Interval | None:
        scales = (p.scale(name) for p in reversed(self.points))
        return next((s for s in scales if s is not None), None)

    @property
    def groups(self) -> list[str]:
        """Names of groups of samples, in the order of their first lines."""
        keys = dict.fromkeys(key for point in self.points for key in point.values)
        found = (key for key in keys if key.startswith(GROUP) and key.endswith(LOWER))
        return [key[len(GROUP) : -len(LOWER)] for key in found]

    @property
    def spikes(self) -> list[dict[str, Any]]:
        """The samples with large gradients, the largest share first. What is no number comes before
        it: it spoils a whole update.
        """
        size = lambda each: math.inf if each["share"] is None else each["share"]
        return sorted(self.largest.values(), key=size, reverse=True)

    @property
    def listed(self) -> list[tuple[dict[str, Any], int]]:
        """The first of these under each id, and how often the id is among them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for each in self.spikes:
            found.setdefault(name_of(each), []).append(each)
        return [(same[0], len(same)) for same in found.values()][:LISTED]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The decisions that changed the batch size."""
        return [d for d in self.decisions if d["old"] != d["new"]]

    @property
    def batch_size(self) -> float | None:
        """That of the last decision, or else that of the last line, a mean over updates."""
        return float(self.decisions[-1]["new"]) if self.decisions else self.last("batch/size")

    @cached_property
    def over(self) -> list[dict[str, Any]]:
        """Stretches on which the batch was above ``OVER`` times the estimate, each up to the first
        point below it.
        """
        known = [p for p in self.points if "cbs/ratio" in p.values or "cbs/estimate" in p.values]
        ratios, found = [p.ratio or 0.0 for p in known], []
        for over, group in groupby(range(len(known)), lambda k: ratios[k] > OVER):
            if over:
                stretch = list(group)
                ends = known[stretch[0]], known[min(stretch[-1] + 1, len(known) - 1)]
                where = {"steps": [p.step for p in ends], "tokens": [p.tokens for p in ends]}
                found.append({**where, "ratio": max(ratios[k] for k in stretch)})
        return found

    def without_tokens(self) -> str:
        """Why the axis shows steps although lines have tokens; empty if it can show tokens."""
        known = [p.tokens for p in self.points if p.tokens is not None]
        if known and (unknown := len(self.points) - len(known)):
            return (
                f"{unknown:,} of {len(self.points):,} lines have no tokens, so the x-axis shows "
                "steps"
            )
        falls = any(b < a for a, b in zip(known, known[1:]))
        return "tokens fall while steps rise, so the x-axis shows steps" if falls else ""

    @property
    def has_tokens(self) -> bool:
        """Whether all points can be drawn over tokens."""
        return not self.without_tokens() and all(p.tokens is not None for p in self.points)

    def at(self, tokens: float, over_tokens: bool) -> float | None:
        """Where a record after ``tokens`` tokens lies on the axis; None if no point lies beyond
        it.
        """
        if over_tokens:
            return tokens
        points = [p for p in self.points if p.tokens is not None]
        k = bisect.bisect_left([p.tokens or 0.0 for p in points], tokens)
        if k == len(points):
            return None
        end = points[k]
        t0, s0 = (points[k - 1].tokens or 0.0, points[k - 1].step) if k else (0.0, 0)
        width = (end.tokens or 0.0) - t0
        return s0 + (end.step - s0) * (tokens - t0) / width if width > 0 else float(end.step)

    def summary(self) -> dict[str, Any]:
        """One JSON object."""
        scales = {"noise_scale": SCALES["euclidean"], "noise_scale_present": PRESENT}
        scales |= {f"noise_scale_{metric}": SCALES[metric] for metric in OTHERS}
        scales |= {"critical_batch_estimate": "cbs/estimate"}
        found = {name: self.last_scale(key) for name, key in scales.items()}
        groups = {group: self.last_scale(GROUP + group) for group in self.groups}
        losses = self.losses
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "step": self.end.step if self.end else None,
            "tokens": self.last("tokens"),
            "loss": losses[-1] if losses else None,
            "losses": len(losses),
            "losses_not_finite": losses.count(None),
            **{name: scale.record() if scale else None for name, scale in found.items()},
            "noise_scale_groups": {name: scale.record() for name, scale in groups.items() if scale},
            "covered": self.last("gns/covered"),
            "covered_norm": self.last("gns/covered_norm"),
            "layers": len(self.last_layers),
            "largest_samples": [{**each, "times_listed": n} for each, n in self.listed],
            "batch_size": self.batch_size,
            "critical_batch_ratio": self.end.ratio if self.end else None,
            "over_critical_batch": self.over,
            "critical_batch_branches": [
                {k: c.get(k) for k in ("tokens", "batch_size", "value", "lower", "upper", "doubts")}
                | {"factors": {m: _known(f) for m, f in factors_in(c).items()}}
                for c in self.critical
            ],
            "decisions": len(self.decisions),
            "warnings": sum(bool(d.get("warning")) for d in self.decisions),
            "check": self.check,
            "notes": list(self.notes),
        }


def _known(factor: Interval) -> dict[str, float | None]:
    """A factor for JSON, without an end that is not known."""
    return factor._replace(lower=factor.lower or math.nan).record()
