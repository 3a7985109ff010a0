# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what a measurement asks for; and how one branch is trained, in whatever process."""

import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_choice, finite_or_none, integer
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, own_settings
from gnsfast.critical_batch.branches.branch_rule import (
    check_grid,
    matching,
    smoothed,
    smoothed_std,
)
from gnsfast.critical_batch.branches.measurement import (
    SETTINGS,
    Branch,
    known_at_checkpoint,
    noise_scale_records,
    null_to_nan,
)
from gnsfast.critical_batch.critical_batch_factor import RunIdentity
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError
from gnsfast.noise_scale import METRICS
from gnsfast.parallel import first

LOG = logging.getLogger("gnsfast")

LEAST_STEPS = 3
"""The fewest steps of a branch: the first loss is still the checkpoint's, and the noise of a loss
is estimated from at least three."""

CALL = "import pickle, sys; sys.path, work, args = pickle.load(sys.stdin.buffer); "
CALL += "work, args = pickle.loads(work), pickle.loads(args); work(*args)"
"""The program of a new process, which gets its work on stdin: first the path to import it by."""

MakeRun = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """The arguments of ``measure_critical_batch`` on which its branches depend; k ascends.

    Raises:
        ValueError: for one that is invalid whatever the run is.
    """

    delta_tokens: int
    k: tuple[float, ...] = (0.5, 1, 2, 4, 8)
    tolerance: float = 0.01
    alpha: float = 0.5
    lr: str = "sqrt"
    loss: str = "train"
    save_every_tokens: int | None = None
    noise_scale: bool = True
    factor: str | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", tuple(sorted(map(float, self.k))))
        integer("delta_tokens", self.delta_tokens)
        integer("repeats", self.repeats)
        matching({1: 0.0}, self.tolerance)  # raises for an invalid tolerance
        smoothed([0.0], self.alpha)  # raises for an invalid alpha
        if self.save_every_tokens is not None:
            integer("save_every_tokens", self.save_every_tokens)
        Rules(self.lr)  # raises for an unknown rule
        check_choice("loss", self.loss, ("train", "evaluate"))
        if self.factor is not None:
            check_choice("factor", self.factor, METRICS)
            if not self.noise_scale:
                raise ValueError("factor needs the noise scale: leave out noise_scale=False")

    def settings(self, run: BranchRun) -> dict[str, Any]:
        """The settings of the folder, among them the run's own.

        Raises:
            ValueError: where ``run`` cannot train these branches.
        """
        check_grid(self.k, run.batch_size, getattr(run, "batch_multiple", 1))
        if self.loss == "evaluate" and not callable(getattr(run, "evaluate", None)):
            raise ValueError(
                f"loss='evaluate' needs a run with evaluate(), which {type(run).__name__} lacks "
                "here: give TorchRun(evaluate=...), or pass loss='train'"
            )
        if self.repeats > 1 and not callable(getattr(run, "skip", None)):
            raise ValueError(
                f"each repeat trains on other data, and {type(run).__name__} has no skip(tokens) "
                "to reach it: add that method (gnsfast.critical_batch.BranchRun), or measure once"
            )
        if (least := LEAST_STEPS * self.step_tokens(run, self.k[-1])) > self.delta_tokens:
            raise ValueError(
                f"delta_tokens={self.delta_tokens:,} is too few: the branch with k = "
                f"{self.k[-1]:g} needs at least {LEAST_STEPS} steps, which are {least:,} tokens. "
                "Raise delta_tokens, or leave out the largest k"
            )
        for k in self.k:
            getattr(run, "check_branch", lambda k: None)(k)
        whose = {name: self if hasattr(self, name) else run for name in SETTINGS}
        return {name: getattr(whose[name], name) for name in SETTINGS} | own_settings(run)

    def step_tokens(self, run: BranchRun, k: float) -> int:
        return round(k * run.batch_size) * run.tokens_per_sample

    def folders(self, folder: str | os.PathLike[str]) -> list[BranchFolder]:
        """One for each repeat: the folder itself, and others in it."""
        path = Path(folder)
        if self.repeats == 1 and (path / "repeat-1").exists():
            raise ValueError(
                f"{folder} holds repeated measurements, and a single one would replace their mean: "
                "pass repeats again, or another folder"
            )
        return [BranchFolder(path / f"repeat-{n}" if n else path) for n in range(self.repeats)]


def prepare(
    make_run: MakeRun, files: BranchFolder, plan: Plan, before: BranchFolder | None = None
) -> dict[str, Any]:
    """Save the checkpoint and measure the noise scale there; what is known there.

    Args:
        before: of the repeat before this one, whose data is skipped.
    """
    run = make_run()
    if before is not None:
        run.restore(before.checkpoint)
        run.skip(plan.delta_tokens + plan.step_tokens(run, plan.k[-1]))
    files.prepare(plan.settings(run), plan.k, run)
    if plan.noise_scale and before is None and not first(files.noise_scale):
        record = _noise_scale(run)
        first(lambda: files.write_noise_scale(record))
    known = first(lambda: known_in(files))
    _refuse_unmeasured(plan.factor if before is None else None, known)
    return known


def known_in(files: BranchFolder) -> dict[str, Any]:
    """The fields of ``CriticalBatch`` that are known before a branch is trained."""
    return known_at_checkpoint(files.settings() | files.noise_scale())


def _refuse_unmeasured(factor: str | None, known: dict[str, Any]) -> None:
    """Raise ValueError if the noise scale that a factor is to be computed with is not there."""
    scales = [m for m in METRICS if known.get("noise_scale" if m == "euclidean" else m)]
    if factor is None or factor in scales:
        return
    why = f" ({known['noise_scale_reason']})" if known["noise_scale_reason"] else ""
    raise ValueError(
        f"The {factor} noise scale was not measured at the checkpoint{why}, so there will be no "
        f"factor for it, and no branch was begun. Measured: {', '.join(scales) or 'none'}. Ask for "
        "the factor of one of these, or for none."
    )


def begun(k: float, batch_size: int, plan: Plan) -> Branch:
    """A branch before its first step."""
    rest = math.nan, math.nan, 0, 0, "failed"
    return Branch(k, round(k * batch_size), Rules(plan.lr).lr_factor(k), *rest)


def train(make_run: MakeRun, files: BranchFolder, plan: Plan, k: float) -> Branch:
    """Train a branch from its newest save to its end, or until a loss is not finite.

    Raises:
        ValueError: where the run has other settings than the folder.
        BranchError: where the run takes steps of another size than asked for or ends early.
    """
    with ExitStack() as stack:
        run = make_run()
        if (finished := first(lambda: files.branch(k))) is not None:
            return finished
        steps = files.resume(run, k)
        settings = {name: value for name, value in plan.settings(run).items() if name != "tokens"}
        first(lambda: files.check(settings))
        branch, own = begun(k, run.batch_size, plan), plan.loss == "train"
        done = saved = steps[-1]["tokens"] if steps else 0
        left, per_step = plan.delta_tokens - done, branch.batch_size * run.tokens_per_sample

        def note(number: int, tokens: int, loss: float) -> None:
            step = {"kind": "branch step", "k": k, "step": number, "tokens": tokens}
            steps.append(step | {"loss": finite_or_none(loss)})

        if not own and not steps:
            note(0, 0, run.evaluate())
        training = run.train(left, batch_size=branch.batch_size, lr_factor=branch.lr_factor)
        stack.callback(getattr(training, "close", lambda: None))
        full = True  # a short step, such as the last of an epoch, is accepted after a full one
        for tokens, loss in training:
            full, full_before = tokens == per_step, full
            short = full_before and 0 < tokens < per_step
            if not (full or short) or done >= plan.delta_tokens:
                raise BranchError(
                    f"the run's train({left}, batch_size={branch.batch_size}) took a step of "
                    f"{tokens} tokens after {done} tokens. Every step must have {per_step} "
                    f"tokens until the branch has {plan.delta_tokens}"
                )
            done += tokens
            note(steps[-1]["step"] + 1 if steps else 1, done, loss)
            if not math.isfinite(loss):
                break
            every = plan.save_every_tokens
            if every and done - saved >= every and done < plan.delta_tokens:
                files.save(run, k, steps)
                saved = done
                if (finished := first(lambda: files.branch(k))) is not None:
                    return finished
        losses = [null_to_nan(step["loss"]) for step in steps]
        end, noise, state = math.inf, math.nan, "diverged"
        if not losses or math.isfinite(losses[-1]):
            if done < plan.delta_tokens:
                raise BranchError(
                    f"the run's train() ended after {done:,} of {plan.delta_tokens:,} tokens: it "
                    "must go on until it has trained all of them"
                )
            end = smoothed(losses, plan.alpha) if own else run.evaluate()
        if math.isfinite(end):
            noise = smoothed_std(losses, plan.alpha) if own else math.nan
            state = "finished"
        counts = {"steps": steps[-1]["step"], "tokens": done, "start": losses[0]}
        ended = replace(branch, loss=end, loss_std=noise, state=state, **counts)
        return files.finish(ended, steps)


def _noise_scale(run: BranchRun) -> dict[str, Any]:
    """The record of the noise scales at the present weights, and of what identifies the run."""
    measure: Callable[[], Any] | None = getattr(run, "noise_scale", None)
    record = noise_scale_records(None if measure is None else measure())
    reason = ""
    if measure is None:
        reason = "the run has no method noise_scale()"
    elif record["noise_scale"] is None:
        reason = getattr(run, "noise_scale_reason", "") or "the run's noise_scale() returned None"
    known: RunIdentity = getattr(run, "identity", RunIdentity)()
    own = replace(known, tokens_per_sample=run.tokens_per_sample)
    return record | {"noise_scale_reason": reason, "run": asdict(own)}


def called(work: Callable[..., Any], make_run: MakeRun, files: BranchFolder, *args: Any) -> Any:
    """``work(make_run, files, *args)`` as an executor calls it.

    In a thread, such as Dask's, it runs in a process of its own: other threads draw from the same
    generators of random numbers. What it has found is in the folder.
    """
    if threading.current_thread() is threading.main_thread():
        return work(make_run, files, *args)
    given = pickle.dumps(work), pickle.dumps((make_run, files, *args))
    words = [sys.executable, "-c", CALL]
    done = subprocess.run(words, input=pickle.dumps((sys.path, *given)), stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        LOG.error("%s", "\n".join(lines))
        ended = f"its process ended with exit code {done.returncode}"
        raise BranchError(lines[-1] if lines and done.returncode > 0 else ended)
    return known_in(files) if work is prepare else files.branch(args[-1])
