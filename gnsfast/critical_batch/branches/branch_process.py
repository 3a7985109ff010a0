# SPDX-License-Identifier: Apache-2.0
"""Trains one branch, in whatever process it is called."""

import math
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from gnsfast.critical_batch.branches.branch_attempt import Attempt
from gnsfast.critical_batch.branches.branch_folder import BranchFolder, step_line
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import smoothed, smoothed_std
from gnsfast.critical_batch.branches.measurement import Branch
from gnsfast.errors import BranchError


@dataclass(frozen=True)
class Job:
    """A branch to train: its k, batch size and learning rate, then what all branches share."""

    k: float
    batch_size: int
    lr_factor: float
    delta_tokens: int
    alpha: float
    loss: str
    save_every_tokens: int | None

    def failed(self, reason: str) -> Branch:
        own = self.k, self.batch_size, self.lr_factor
        return Branch(*own, math.nan, math.nan, steps=0, tokens=0, state="failed", reason=reason)


def train_branch(run: BranchRun, folder: BranchFolder, job: Job, attempt: Attempt) -> Branch:
    """Train a branch from its newest save to its end, or until a loss is not finite.

    Raises:
        BranchError: where ``run`` takes steps of another size than asked for or ends early, or
            where another process has taken over the branch.
    """
    if (finished := folder.finished(job.k, attempt)) is not None:
        return finished
    done, losses = folder.restore(run, job.k, attempt)
    per_step, saved = job.batch_size * run.tokens_per_sample, done
    # A short step, such as the last of an epoch, is accepted after a full one.
    left, full = job.delta_tokens - done, True
    steps = run.train(left, batch_size=job.batch_size, lr_factor=job.lr_factor)
    with folder.steps(job.k) as file, ExitStack() as stack:
        stack.callback(getattr(steps, "close", lambda: None))
        for step in steps:
            full, full_before = step.tokens == per_step, full
            short = full_before and 0 < step.tokens < per_step
            if not (full or short) or done >= job.delta_tokens:
                raise BranchError(
                    f"the run's train({left}, batch_size={job.batch_size}) took a step of "
                    f"{step.tokens} tokens after {done} tokens. Every step must have {per_step} "
                    f"tokens until the branch has {job.delta_tokens}"
                )
            attempt.check()
            done += step.tokens
            losses.append(step.loss)
            file.write(step_line(job.k, len(losses), done, step.loss))
            if not math.isfinite(step.loss):
                return _finish(folder, job, attempt, losses, done, math.nan)
            every = job.save_every_tokens
            if every and done - saved >= every and done < job.delta_tokens:
                folder.save(run, job.k, done, attempt)
                saved = done
    if done < job.delta_tokens:
        raise BranchError(
            f"the run's train() ended after {done:,} of {job.delta_tokens:,} tokens: it must go on "
            "until it has trained all of them"
        )
    loss = smoothed(losses, job.alpha) if job.loss == "train" else cast(Any, run).evaluate()
    return _finish(folder, job, attempt, losses, done, loss)


def _finish(
    folder: BranchFolder,
    job: Job,
    attempt: Attempt,
    losses: list[float],
    tokens: int,
    loss: float,
) -> Branch:
    own = job.k, job.batch_size, job.lr_factor
    if not math.isfinite(loss):
        branch = Branch(*own, math.inf, math.nan, len(losses), tokens, "diverged")
    else:
        noise = smoothed_std(losses, job.alpha) if job.loss == "train" else math.nan
        branch = Branch(*own, loss, noise, len(losses), tokens)
    folder.finish(branch, attempt)
    return branch


def train_job(
    make_run: Callable[[], BranchRun], folder: BranchFolder, job: Job, after: int
) -> dict[str, Any] | None:
    """Train a branch with a new run; its record, or None where another process has begun it.

    The folder also gets the reason of a failure. Where several processes train the branch and one
    of them raises, it has to end: the others wait for it, and its end ends them too.

    Args:
        after: the attempt of the branch that is known to be over.
    """
    try:
        run = make_run()
        folder.refuse_other(run)
        if (attempt := folder.attempts(job.k).take(after)) is None:
            return None
        with attempt:
            return train_branch(run, folder, job, attempt).record()
    except Exception as error:
        folder.fail(job.k, reason_of(error), traceback.format_exc())
        raise


def reason_of(error: BaseException) -> str:
    """An exception in one line, with its type unless gnsfast worded the message itself."""
    said, kind = str(error).partition("\n")[0], type(error).__name__
    if isinstance(error, BranchError | ValueError):
        return said or kind
    return f"{kind}: {said}" if said else kind
