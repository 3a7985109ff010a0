# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what a measurement asks for; and how one branch is trained, in whatever process."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from gnsfast.arguments import check_choice, finite_or_none, integer
from gnsfast.critical_batch.branches.branch_folder import BranchFolder, line_of
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, own_settings
from gnsfast.critical_batch.branches.branch_rule import check_grid, matching, smoothed, smoothed_std
from gnsfast.critical_batch.branches.measurement import SETTINGS, Branch, null_to_nan
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError
from gnsfast.parallel import first

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


def train_branch(
    make_run: Callable[[], BranchRun], folder: BranchFolder, plan: Plan, branch: Branch
) -> None:
    """Train a branch from its newest save to its end, or until a loss is not finite.

    Raises:
        BranchError: where the run takes steps of another size than asked for or ends early.
    """
    run = make_run()
    folder.refuse_other(run)
    k, batch_size, lr_factor = branch.k, branch.batch_size, branch.lr_factor
    if first(lambda: folder.finished(k)) is not None:
        return
    steps = folder.resume(run, k)
    done = saved = steps[-1]["tokens"] if steps else 0
    left, per_step = plan.delta_tokens - done, batch_size * run.tokens_per_sample
    # A short step, such as the last of an epoch, is accepted after a full one.
    full, loss = True, 0.0
    training = run.train(left, batch_size=batch_size, lr_factor=lr_factor)
    with folder.steps(k, *steps) as file, ExitStack() as stack:
        stack.callback(getattr(training, "close", lambda: None))
        for trained in training:
            tokens, loss = trained.tokens, trained.loss
            full, full_before = tokens == per_step, full
            short = full_before and 0 < tokens < per_step
            if not (full or short) or done >= plan.delta_tokens:
                raise BranchError(
                    f"the run's train({left}, batch_size={batch_size}) took a step of "
                    f"{tokens} tokens after {done} tokens. Every step must have {per_step} "
                    f"tokens until the branch has {plan.delta_tokens}"
                )
            done += tokens
            step = {"kind": "branch step", "k": k, "step": len(steps) + 1, "tokens": done}
            steps.append(step | {"loss": finite_or_none(loss)})
            file.write(line_of(steps[-1]))
            if not math.isfinite(loss):
                break
            every = plan.save_every_tokens
            if every and done - saved >= every and done < plan.delta_tokens:
                folder.save(run, k, steps)
                saved = done
                if (finished := first(lambda: folder.finished(k))) is not None:
                    first(lambda: folder.finish(finished, []))
                    return
    losses = [null_to_nan(step["loss"]) for step in steps]
    if math.isfinite(loss):
        if done < plan.delta_tokens:
            raise BranchError(
                f"the run's train() ended after {done:,} of {plan.delta_tokens:,} tokens: it must "
                "go on until it has trained all of them"
            )
        own = plan.loss == "train"
        loss = smoothed(losses, plan.alpha) if own else cast(Any, run).evaluate()
    ended = replace(branch, steps=len(steps), tokens=done, loss=math.inf, state="diverged")
    if math.isfinite(loss):
        noise = smoothed_std(losses, plan.alpha) if own else math.nan
        ended = replace(ended, loss=loss, loss_std=noise, state="finished")
    first(lambda: folder.finish(ended, steps))
