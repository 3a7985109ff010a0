# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: trains branches of a checkpoint for its critical batch size. Each of
them can be trained by a process of its own: a call of an executor, or ``train_branch``.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import matching
from gnsfast.critical_batch.branches.branch_training import (
    LOG,
    MakeRun,
    Plan,
    begun,
    called,
    known_in,
    prepare,
    train,
)
from gnsfast.critical_batch.branches.measurement import Branch, CriticalBatch, averaged
from gnsfast.errors import BranchError, first_line
from gnsfast.parallel import first, process_count

OnBranch = Callable[[Branch], None]


class Executor(Protocol):
    """Any executor: one of ``concurrent.futures``, submitit's, ``dask_client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any: ...


def measure_critical_batch(
    run: BranchRun | None,
    *,
    folder: str | os.PathLike[str],
    executor: Executor | None = None,
    make_run: MakeRun | None = None,
    on_branch: OnBranch | None = None,
    **plan: Any,
) -> CriticalBatch:
    """Measure the critical batch size at the present state of ``run``, as Merrill et al. do.

    Saves a checkpoint and measures the noise scale there. From the checkpoint it trains a branch
    for each k, with the batch size k · B and the learning rate f(k) · η, for Δ tokens. The result
    is the largest k whose loss is at most ε above that of every smaller k. Afterwards the run is
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
            Call again to train it further. A call in a thread, as Dask's, starts a process. Without
            it, this process trains them in turn.
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
        BranchError: where the loss of a branch with k <= 1 is not finite, or k = 1 failed: finished
            branches are kept, and other failures are named in ``missing``.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """
    asked, own = Plan(**plan), run
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
        if own is None and asked.repeats > 1:
            raise ValueError("repeats skip data of the run, and run=None has none: pass the run")
    found: list[CriticalBatch] = []
    with ExitStack() as stack:
        if executor is not None and own is None:
            [files] = asked.folders(folder)
            each = iter(
                [(files, executor.submit(called, prepare, make_run, files, asked).result())]
            )
        else:
            each = _prepared(own, folder, asked)
        for files, known in each:
            if own is not None and not found:
                stack.enter_context(_restored(own, files))
            make = (lambda: own) if executor is None else make_run
            found.append(_measured(make, files, asked, known, executor, on_branch))
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
    own = plan if k == 1 else replace(plan, noise_scale=False, factor=None)
    return [train(lambda: run, files, own, k) for files, _ in _prepared(run, folder, own)][-1]


def critical_batch_in(folder: str | os.PathLike[str]) -> CriticalBatch:
    """Apply the rule to the branches that a folder holds, and write the result into it.

    Raises:
        ValueError: for a folder of something else.
        BranchError: where k = 1 is missing, or the loss of a branch with k <= 1 is not finite.
    """
    paths = [Path(folder), *sorted(Path(folder).glob("repeat-[1-9]*"))]
    each = list(map(BranchFolder, paths))
    if not each[0].checkpoint.is_dir():
        raise ValueError(f"{folder} holds no branch measurement")
    return _written(
        each[0], [_result(files, known_in(files), files.branches(), {}) for files in each]
    )


def _prepared(
    run: Any, folder: str | os.PathLike[str], plan: Plan
) -> Iterator[tuple[BranchFolder, dict[str, Any]]]:
    """The folder of each repeat, with the run at its checkpoint, and what is known there."""
    before = None
    for files in plan.folders(folder):
        yield files, prepare(lambda: run, files, plan, before)
        before = files


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
            matching({1.0: 0.0, branch.k: branch.loss})  # raises where the branch diverged

    for branch in filter(None, there.values()):
        take(branch)
    asked, work = [k for k in plan.k if there[k] is None], partial(train, make_run, files, plan)
    futures = (
        {}
        if executor is None
        else {k: executor.submit(called, train, make_run, files, plan, k) for k in asked}
    )
    try:
        for k in asked:
            try:
                there[k] = work(k) if executor is None else futures[k].result()
            except Exception as error:
                if process_count() > 1:  # the others wait for this process: it has to end
                    raise
                LOG.error("The branch with k = %g failed.", k, exc_info=error)
                there[k] = files.branch(k)  # which another process may have finished
                failed = replace(begun(k, known["batch_size"], plan), reason=first_line(error))
            take(there[k] or failed)
    finally:
        for future in futures.values():
            if not future.done():
                future.cancel()
    return _result(files, known, there, missing)


def _result(
    files: BranchFolder,
    known: dict[str, Any],
    there: dict[float, Branch | None],
    reasons: dict[float, str],
) -> CriticalBatch:
    """The rule's result for the branches that are there, and why others are missing."""
    missing = {
        k: reasons.get(k, "it has not finished") for k, branch in there.items() if not branch
    }
    if 1.0 in missing:
        raise BranchError(
            f"the branch with k = 1 failed ({missing[1.0]}), and all others are compared with it. "
            f"To train it again, call again with the same folder, {files.path}"
        )
    branches = tuple(branch for _, branch in sorted(there.items()) if branch)
    return CriticalBatch(branches=branches, missing=missing, **known)


def _written(files: BranchFolder, found: list[CriticalBatch]) -> CriticalBatch:
    result = averaged(found) if len(found) > 1 else found[0]
    first(lambda: files.write_result(result.record()))
    return result
