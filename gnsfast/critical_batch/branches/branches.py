# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: trains branches of a checkpoint for its critical batch size. Each of
them can be trained by a process of its own: a call of an executor, or ``train_branch``.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gnsfast.arguments import check_choice, finite_or_none, integer
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun, own_settings
from gnsfast.critical_batch.branches.branch_rule import (
    check_grid,
    has_diverged,
    matching,
    smoothed,
    smoothed_std,
)
from gnsfast.critical_batch.branches.measurement import (
    SETTINGS,
    Branch,
    CriticalBatch,
    averaged,
    known_at_checkpoint,
    noise_scale_records,
    null_to_nan,
)
from gnsfast.critical_batch.critical_batch_factor import RunIdentity
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError, first_line
from gnsfast.noise_scale import METRICS
from gnsfast.parallel import first, process_count

LOG = logging.getLogger("gnsfast")

LEAST_STEPS = 3
"""The fewest steps of a branch: the first loss is still the checkpoint's, and the noise of a loss
is estimated from at least three."""

ONE = threading.Lock()
"""Branches in threads of one process take turns: they share its generators of random numbers."""

MakeRun = Callable[[], BranchRun]
OnBranch = Callable[[Branch], None]


class Executor(Protocol):
    """Any executor: one of ``concurrent.futures``, submitit's, ``dask_client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """The arguments of ``measure_critical_batch`` on which its branches depend; k ascends.

    Raises:
        ValueError: for one that is invalid whatever the run is.
    """

    k: tuple[float, ...]
    delta_tokens: int
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
        """One for each repeat: the folder itself and those below it."""
        path = Path(folder)
        if self.repeats == 1 and (path / "repeat-1").exists():
            raise ValueError(
                f"{folder} holds repeated measurements, and a single one would replace their mean: "
                "pass repeats again, or another folder"
            )
        return [BranchFolder(path / f"repeat-{n}" if n else path) for n in range(self.repeats)]


def measure_critical_batch(
    run: BranchRun | None,
    *,
    folder: str | os.PathLike[str],
    k: Iterable[float] = (0.5, 1, 2, 4, 8),
    delta_tokens: int,
    tolerance: float = 0.01,
    alpha: float = 0.5,
    lr: str = "sqrt",
    loss: str = "train",
    save_every_tokens: int | None = None,
    executor: Executor | None = None,
    make_run: MakeRun | None = None,
    noise_scale: bool = True,
    factor: str | None = None,
    repeats: int = 1,
    on_branch: OnBranch | None = None,
) -> CriticalBatch:
    """Measure the critical batch size at the present state of ``run``, as Merrill et al. do.

    Saves a checkpoint and measures the noise scale there. From the checkpoint it trains a branch
    for each k, with the batch size k · B and the learning rate f(k) · η, for Δ tokens. The result
    is the largest k whose loss is at most ε above that of every smaller k. A branch that diverged
    matches nothing: its loss was not finite, or above that of its start. Afterwards the run is
    back at the checkpoint, also after an exception or Ctrl-C.

    To continue an interrupted measurement, make the same call again, in this or another process. It
    restores the run from the checkpoint in the folder and trains the branches that are missing. The
    run must have trained the same number of tokens. k may differ between calls: the result holds
    all branches of the folder. Where two processes train the same branch, the first one wins, and
    the work of the second is thrown away.

    Where several processes train one run (DDP, FSDP2), each calls this with its part of the run,
    and the first one writes. An exception in a branch then ends the whole measurement and leaves
    the run where it is.

    Args:
        run: a ``BranchRun``, such as ``TorchRun``. With None, the executor's processes make the run
            by ``make_run``, and this process needs neither a GPU nor much memory.
        folder: a new folder, or that of a measurement to continue.
        k: batch sizes as multiples of ``run.batch_size``. Include 1, and one below 1 unless "at
            most" is a sufficient answer. Every batch must be a multiple of ``run.batch_multiple``,
            where the run has it.
        delta_tokens: Δ. A branch's last step may go beyond it; larger ones can find a larger
            critical batch size.
        tolerance: ε, in the units of the loss.
        alpha: the weight of the newest step in the moving average L_k.
        lr: f(k): ``"sqrt"`` (Adam), ``"linear"`` (SGD), ``"keep"``: 1.
        loss: ``"train"``, as in the paper, or ``"evaluate"``: L_k is ``run.evaluate()`` after the
            branch, which has less noise. To find the remaining noise, pass ``repeats``.
        save_every_tokens: also save within a branch, so that a killed one continues from there.
        executor: trains the branches, each in a call: ``ProcessPoolExecutor``, submitit's, Dask's
            (``client.get_executor()``), or anything whose ``submit(function, *args)`` returns a
            future. Its machines must share ``folder``. A branch whose call is lost has failed.
            Call again to train it further. Without it, this process trains them in turn.
        make_run: needed with ``executor``: a function without arguments that returns the run, which
            the executor can send; with ``run=None`` at the state to be measured, else in any. A
            script that passes it needs the guard ``if __name__ == "__main__"``.
        noise_scale: call ``run.noise_scale()``, where the run has it and the folder does not.
        factor: the metric of a factor that will be asked of the result. Where its noise scale was
            not measured, this raises before a branch is trained.
        repeats: measure so often, each time on other data, and return ``averaged``: before each
            further one the run goes back to the weights of the checkpoint and skips the data that
            earlier branches trained on, for which it needs ``skip(tokens)``. The branches are in
            ``repeat-1``, ``repeat-2`` and so on below the folder. Later calls may add repeats.
        on_branch: called with each branch: first those in the folder, then each as it ends.

    Raises:
        ValueError: for an invalid setting, or one that differs from the folder's, and where the
            noise scale for ``factor`` was not measured.
        BranchError: where a branch with k <= 1 diverged, or the base k = 1 failed: finished
            branches are kept, and other failures are named in ``missing``.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """
    rule = delta_tokens, tolerance, alpha, lr, loss, save_every_tokens, noise_scale, factor, repeats
    plan, own = Plan(tuple(k), *rule), run
    if executor is not None or own is None:
        if executor is None or make_run is None:
            raise ValueError(
                "run=None needs executor=..., and executor needs make_run=..., a function that "
                "returns the run in another process"
            )
        if process_count() > 1:
            raise ValueError(
                f"this run has {process_count()} processes, which train its branches together: "
                "leave out executor"
            )
        if own is None and repeats > 1:
            raise ValueError("repeats skip data of the run, and run=None has none: pass the run")
    found = []
    with ExitStack() as stack:
        for number, files in enumerate(plan.folders(folder)):
            if own is None:
                assert executor is not None and make_run is not None
                known = executor.submit(prepare, make_run, files, plan).result()
            else:
                known = prepare(lambda: own, files, plan, skipping=number > 0)
                if not number:
                    stack.enter_context(_restored(own, files))
            _refuse_unmeasured(plan.factor if not number else None, known)
            make = (lambda: own) if executor is None else make_run
            found.append(_measured(make, files, plan, known, executor, on_branch))
            if own is not None and repeats > 1:
                own.restore(files.checkpoint)
    return _written(BranchFolder(folder), found)


def train_branch(run: BranchRun, k: float, folder: str | os.PathLike[str], plan: Plan) -> Branch:
    """Train one branch of a measurement, in each of its repeats, unless that is done already.

    All branches of a measurement may be trained at once, each by a process or several. The first
    one of them saves the checkpoint, from which all begin; that of k = 1 measures the noise scale.
    ``critical_batch_in`` then applies the rule.

    Returns:
        The branch of the last repeat.

    Raises:
        ValueError, BranchError: where ``measure_critical_batch`` raises them for a setting or a
            run. What the run raises goes on.
    """
    base = plan if k == 1 else replace(plan, noise_scale=False, factor=None)
    for number, files in enumerate(base.folders(folder)):
        known = prepare(lambda: run, files, base, skipping=number > 0)
        _refuse_unmeasured(base.factor if not number else None, known)
        branch = _train(lambda: run, files, base, k)
        run.restore(files.checkpoint)
    return branch


def critical_batch_in(folder: str | os.PathLike[str]) -> CriticalBatch:
    """Apply the rule to the branches that a folder holds, and write the result into it.

    Raises:
        ValueError: for a folder of something else.
        BranchError: where k = 1 is missing, or a branch with k <= 1 diverged.
    """
    paths = [Path(folder), *sorted(Path(folder).glob("repeat-[1-9]*"))]
    each = list(map(BranchFolder, paths))
    if not each[0].checkpoint.is_dir():
        raise ValueError(f"{folder} holds no branch measurement")
    return _written(each[0], [_result(files, _known(files)) for files in each])


def prepare(
    make_run: MakeRun, files: BranchFolder, plan: Plan, *, skipping: bool = False
) -> dict[str, Any]:
    """Save the checkpoint and measure the noise scale there; what is known there.

    Args:
        skipping: skip the data of the branches before, and measure no noise scale.
    """
    run = make_run()
    settings = plan.settings(run)
    if skipping:
        run.skip(plan.delta_tokens + plan.step_tokens(run, plan.k[-1]))  # type: ignore[attr-defined]
    files.prepare(settings, plan.k, run)
    if plan.noise_scale and not skipping and not first(files.noise_scale):
        record = _noise_scale(run)
        first(lambda: files.write_noise_scale(record))
    return first(lambda: _known(files))


def _known(files: BranchFolder) -> dict[str, Any]:
    """The fields of ``CriticalBatch`` that are known before a branch is trained."""
    return known_at_checkpoint(files.settings() | files.noise_scale())


def _refuse_unmeasured(factor: str | None, known: dict[str, Any]) -> None:
    """Raise ValueError if the noise scale that a factor is to be computed with is not there."""
    scales = [m for m in METRICS if known["noise_scale" if m == "euclidean" else m] is not None]
    if factor is None or factor in scales:
        return
    why = f" ({known['noise_scale_reason']})" if known["noise_scale_reason"] else ""
    raise ValueError(
        f"The {factor} noise scale was not measured at the checkpoint{why}, so there will be no "
        f"factor for it, and no branch was begun. Measured: {', '.join(scales) or 'none'}. Ask for "
        "the factor of one of these, or for none. A TorchRun measures spectral for "
        "torch.optim.Muon, sign for any other optimizer, and adam too for an Adam or AdamW that "
        "has stepped."
    )


@contextmanager
def _restored(run: BranchRun, files: BranchFolder) -> Iterator[None]:
    """Restore the run afterwards to the checkpoint.

    Not after an exception among several processes: the others may be anywhere.
    """
    try:
        yield
    except BaseException:
        if process_count() == 1:
            run.restore(files.checkpoint)
        raise
    run.restore(files.checkpoint)


def _measured(
    make_run: Any,
    files: BranchFolder,
    plan: Plan,
    known: dict[str, Any],
    executor: Executor | None,
    on_branch: OnBranch | None,
) -> CriticalBatch:
    """Train the branches that are missing, here or by an executor, and apply the rule."""
    there, missing = first(files.branches), {}

    def take(branch: Branch) -> None:
        if on_branch is not None:
            on_branch(branch)
        if branch.state == "failed":
            missing[branch.k] = branch.reason
        elif branch.k <= 1:
            matching({1.0: 0.0, branch.k: branch.matched})  # raises where the branch diverged

    for branch in filter(None, there.values()):
        take(branch)
    asked, work = [k for k in plan.k if there[k] is None], partial(_train, make_run, files, plan)
    futures = {} if executor is None else {k: executor.submit(work, k) for k in asked}
    try:
        for k in asked:
            try:
                there[k] = work(k) if executor is None else futures[k].result()
            except Exception as error:
                if process_count() > 1:  # the others wait for this process: it has to end
                    raise
                LOG.error("The branch with k = %g failed.", k, exc_info=error)
                there[k] = files.branch(k)  # which another process may have finished
                failed = replace(_begun(k, known["batch_size"], plan), reason=first_line(error))
            take(there[k] or failed)
    finally:
        for future in futures.values():
            if not future.done():
                future.cancel()
    return _result(files, known, there, missing)


def _begun(k: float, batch_size: int, plan: Plan) -> Branch:
    """A branch before its first step."""
    rest = math.nan, math.nan, 0, 0, "failed"
    return Branch(k, round(k * batch_size), Rules(plan.lr).lr_factor(k), *rest)


def _train(make_run: MakeRun, files: BranchFolder, plan: Plan, k: float) -> Branch:
    """Train a branch from its newest save to its end, or until a loss is not finite.

    Raises:
        ValueError: where the run has other settings than the folder.
        BranchError: where the run takes steps of another size than asked for or ends early.
    """
    with ONE, ExitStack() as stack:
        run = make_run()
        if (finished := first(lambda: files.branch(k))) is not None:
            return finished
        steps = files.resume(run, k)
        settings = {name: value for name, value in plan.settings(run).items() if name != "tokens"}
        first(lambda: files.check(settings))
        branch, own = _begun(k, run.batch_size, plan), plan.loss == "train"
        done = saved = steps[-1]["tokens"] if steps else 0
        left, per_step = plan.delta_tokens - done, branch.batch_size * run.tokens_per_sample

        def note(number: int, tokens: int, loss: float) -> None:
            step = {"kind": "branch step", "k": k, "step": number, "tokens": tokens}
            steps.append(step | {"loss": finite_or_none(loss)})

        if not own and not steps:
            note(0, 0, run.evaluate())  # type: ignore[attr-defined]
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
        end, noise, of_step = math.inf, math.nan, 0.0
        if math.isfinite(losses[-1]):
            if done < plan.delta_tokens:
                raise BranchError(
                    f"the run's train() ended after {done:,} of {plan.delta_tokens:,} tokens: it "
                    "must go on until it has trained all of them"
                )
            end = smoothed(losses, plan.alpha) if own else run.evaluate()  # type: ignore[attr-defined]
        if own and math.isfinite(end):
            noise, of_step = smoothed_std(losses, plan.alpha), smoothed_std(losses, 1.0)
        worse = has_diverged(losses[0], end, plan.tolerance, of_step)
        state = "diverged" if worse else "finished"
        counts = {"steps": steps[-1]["step"], "tokens": done, "start": losses[0]}
        ended = replace(branch, loss=end, loss_std=noise, state=state, **counts)
        return files.finish(ended, steps)


def _result(
    files: BranchFolder,
    known: dict[str, Any],
    there: dict[float, Branch | None] | None = None,
    reasons: dict[float, str] | None = None,
) -> CriticalBatch:
    """The rule's result for the branches that are there, and why others are missing."""
    each, why = first(files.branches) if there is None else there, reasons or {}
    missing = {k: why.get(k, "it has not finished") for k, branch in each.items() if not branch}
    if 1.0 in missing:
        raise BranchError(
            f"the branch with k = 1 failed ({missing[1.0]}), and all others are compared with it. "
            f"To train it again, call again with the same folder, {files.path}"
        )
    branches = tuple(branch for _, branch in sorted(each.items()) if branch)
    return CriticalBatch(branches=branches, missing=missing, **known)


def _written(files: BranchFolder, found: list[CriticalBatch]) -> CriticalBatch:
    result = averaged(found) if len(found) > 1 else found[0]
    first(lambda: files.write_result(result.record()))
    return result


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
