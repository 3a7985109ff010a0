# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what a measurement asks for, before a run is there, and its branches once it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnsfast.arguments import check_choice, integer
from gnsfast.critical_batch.branches.branch_process import Job
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import check_grid, matching, smoothed
from gnsfast.critical_batch.rules import Rules

LEAST_STEPS = 3
"""The fewest steps of a branch: the first loss is still the checkpoint's, and the noise of a loss
is estimated from at least three."""


@dataclass(frozen=True)
class Plan:
    """The arguments of ``measure_critical_batch`` on which its branches depend.

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
        check: Callable[[float], None] | None = getattr(run, "check_branch", None)
        if check is not None:
            for k in ks:
                check(k)
        own: Callable[[], Mapping[str, Any]] | None = getattr(run, "branch_settings", None)
        return {
            "tokens": run.tokens,
            "batch_size": run.batch_size,
            "tokens_per_sample": run.tokens_per_sample,
            "delta_tokens": self.delta_tokens,
            "tolerance": self.tolerance,
            "alpha": self.alpha,
            "lr": self.lr,
            "loss": self.loss,
            **{f"run.{name}": each for name, each in (own() if own else {}).items()},
        }

    def jobs(self, batch_size: int) -> list[Job]:
        """The branches of a run, by ascending k."""
        shared = (self.delta_tokens, self.alpha, self.loss, self.save_every_tokens)
        lr_factor = Rules(self.lr).lr_factor
        return [
            Job(k, round(k * batch_size), lr_factor(k), *shared)
            for k in check_grid(self.ks, batch_size)
        ]
