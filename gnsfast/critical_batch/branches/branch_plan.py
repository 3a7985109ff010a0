# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what a measurement asks for, before a run is there."""

import math
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import check_choice, integer
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import check_grid, matching, smoothed
from gnsfast.critical_batch.branches.measurement import SETTINGS, Branch
from gnsfast.critical_batch.rules import Rules

LEAST_STEPS = 3
"""The fewest steps of a branch: the first loss is still the checkpoint's, and the noise of a loss
is estimated from at least three."""


@dataclass(frozen=True)
class Plan:
    """The arguments of ``measure_critical_batch`` on which its branches depend; k ascends.

    Raises:
        ValueError: for one that is invalid whatever the run is.
    """

    ks: tuple[float, ...]
    delta_tokens: int
    tolerance: float
    alpha: float
    lr: str
    loss: str
    save_every_tokens: int | None
    noise_scale: bool

    def __post_init__(self) -> None:
        integer("delta_tokens", self.delta_tokens)
        matching({1: 0.0}, self.tolerance)  # raises for an invalid tolerance
        smoothed([0.0], self.alpha)  # raises for an invalid alpha
        if self.save_every_tokens is not None:
            integer("save_every_tokens", self.save_every_tokens)
        Rules(self.lr)  # raises for an unknown rule
        check_choice("loss", self.loss, ("train", "evaluate"))

    def settings(self, run: BranchRun) -> dict[str, Any]:
        """The settings of the folder, among them the run's own.

        Raises:
            ValueError: where ``run`` cannot train these branches.
        """
        ks = check_grid(self.ks, run.batch_size, getattr(run, "batch_multiple", 1))
        if self.loss == "evaluate" and not callable(getattr(run, "evaluate", None)):
            raise ValueError(
                f"loss='evaluate' needs a run with evaluate(), which {type(run).__name__} lacks "
                "here: give TorchRun(evaluate=...), or pass loss='train'"
            )
        largest = round(ks[-1] * run.batch_size)
        if (least := LEAST_STEPS * largest * run.tokens_per_sample) > self.delta_tokens:
            raise ValueError(
                f"delta_tokens={self.delta_tokens:,} is too few: the branch with k = {ks[-1]:g} "
                f"needs at least {LEAST_STEPS} steps, which are {least:,} tokens. Raise "
                "delta_tokens, or leave out the largest k"
            )
        for k in ks:
            getattr(run, "check_branch", lambda k: None)(k)
        whose = {name: self if hasattr(self, name) else run for name in SETTINGS}
        return {name: getattr(whose[name], name) for name in SETTINGS} | own_settings(run)

    def branches(self, batch_size: int) -> list[Branch]:
        """Those of a run before they are trained, by ascending k."""
        lr_factor = Rules(self.lr).lr_factor
        rest = math.nan, math.nan, 0, 0, "failed"
        return [Branch(k, round(k * batch_size), lr_factor(k), *rest) for k in self.ks]


def own_settings(run: Any) -> dict[str, Any]:
    """The settings of a run that its branches depend on, as the folder names them."""
    return {f"run.{name}": each for name, each in getattr(run, "branch_settings", dict)().items()}
