# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: trains branches of a checkpoint for its critical batch size.
``measure_repeatedly`` does so with other data each time.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_choice, integer
from gnsfast.critical_batch.branches.branch_executors import (
    Call,
    Here,
    LocalProcesses,
    Submits,
    ended,
    launch,
    noted,
    told,
)
from gnsfast.critical_batch.branches.branch_folder import CHECKPOINT, BranchFolder, branch_name
from gnsfast.critical_batch.branches.branch_process import Plan, train_branch
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import matching
from gnsfast.critical_batch.branches.measurement import (
    Branch,
    CriticalBatch,
    averaged,
    known_at_checkpoint,
    noise_scale_records,
)
from gnsfast.critical_batch.critical_batch_factor import RunIdentity
from gnsfast.errors import BranchError
from gnsfast.noise_scale import METRICS
from gnsfast.parallel import first, process_count


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
    workers: int = 0,
    executor: Submits | None = None,
    launcher: str | None = None,
    make_run: Callable[[], BranchRun] | None = None,
    noise_scale: bool = True,
    factor: str | None = None,
    on_branch: Callable[[Branch], None] | None = None,
) -> CriticalBatch:
    """Measure the critical batch size at the present state of ``run``, as Merrill et al. do.

    Saves a checkpoint and measures the noise scale there. From the checkpoint it trains a branch
    for each k, with the batch size k · B and the learning rate f(k) · η, for Δ tokens. The result
    is the largest k whose loss is at most ε above that of every smaller k. Afterwards the run is
    back at the checkpoint, also after an exception or Ctrl-C.

    To continue an interrupted measurement, make the same call again, in this or another process. It
    restores the run from the checkpoint in the folder and trains the branches that are missing. The
    run must have trained the same number of tokens. k may differ between calls: the result holds
    all branches of the folder. Whoever finishes a branch first wins. Two processes train the same
    one only where this process was killed while jobs of its executor went on and the call is made
    again before they end, or where two machines measure in one folder whose disk has no locks. The
    second one's work is then thrown away, and their files never mix.

    Where several processes train one run (DDP, FSDP2), each calls this with its part of the run,
    and the first one writes. An exception in a branch then ends the whole measurement and leaves
    the run where it is. With ``launcher`` it ends that branch alone.

    Args:
        run: a ``BranchRun``, such as ``TorchRun``. With None, the processes that train branches
            make the run by ``make_run``, and this process needs neither a GPU nor much memory.
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
            branch, which has less noise. To find the remaining noise, measure the same checkpoint
            with other data, each time into a new folder, and take ``averaged``.
        save_every_tokens: also save within a branch, so that a killed one continues from there.
        workers: train this many branches at once, each in its own process, which takes as many
            times the memory; 0 trains them in this process.
        executor: trains the branches instead: an executor of ``concurrent.futures``, submitit or
            Dask (``client.get_executor()``), or anything whose ``submit(function, *args)`` returns
            a future. Its machines must share ``folder``. A branch whose call is lost has failed.
            Call again to train it further.
        launcher: a command that starts the processes which train one branch together, such as
            ``"torchrun --standalone --nproc-per-node 8"`` or ``"srun"``; with ``run=None``. It is
            run by the executor, or by ``workers`` processes of this machine, 1 without either.
        make_run: needed with all of these: a picklable function without arguments that returns the
            run; with ``run=None`` at the state to be measured, else in any. In launched processes
            it calls ``torch.distributed.init_process_group``. A script that passes it needs the
            guard ``if __name__ == "__main__"``.
        noise_scale: call ``run.noise_scale()``, where the run has it and the folder does not.
        factor: the metric of a factor that will be asked of the result. Where its noise scale was
            not measured, this raises before a branch is trained.
        on_branch: called with each branch: first those in the folder, then each as it ends.

    Raises:
        ValueError: for an invalid setting, or one that differs from the folder's, and where the
            noise scale for ``factor`` was not measured.
        BranchError: where a branch with k <= 1 diverged, or the base k = 1 failed: finished
            branches are kept, and other failures are named in ``missing``. Also where another
            process is measuring in the folder.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """
    ks = tuple(sorted(map(float, k)))
    plan = Plan(ks, delta_tokens, tolerance, alpha, lr, loss, save_every_tokens, noise_scale)
    if factor is not None:
        check_choice("factor", factor, METRICS)
        if not noise_scale:
            raise ValueError("factor needs the noise scale: leave out noise_scale=False")
    here = run is not None and not (integer("workers", workers, 0) or executor)
    if workers and executor is not None:
        raise ValueError("workers and executor exclude each other: pass one of them")
    if launcher is not None and run is not None:
        raise ValueError(
            "launcher needs run=None, because each launched process makes its own run by make_run()"
        )
    if not here and make_run is None:
        raise ValueError(
            "workers, executor, launcher and run=None need make_run=..., a function that returns "
            "the run in another process"
        )
    if not here and process_count() > 1:
        raise ValueError(
            f"this run has {process_count()} processes, which train its branches together: leave "
            "out workers, executor and launcher"
        )
    if run is not None:
        plan.settings(run)  # raises before anything is written
    files = BranchFolder(Path(folder).absolute())
    first(files.claim)
    with ExitStack() as stack:
        stack.enter_context(files.locked())
        pool: Submits = executor or Here()
        if executor is None and not here:
            pool = stack.enter_context(LocalProcesses(max(workers, 1)))

        def submit(name: str, work: Callable[..., Any], *args: Any) -> Call:
            first(lambda: files.forget_failure(name))
            how, make = ((noted,), lambda: run) if here else ((launch, launcher), make_run)
            return pool.submit(told, *how, files, name, work, make, files, plan, *args)

        if run is None:
            [(_, failed)] = ended({CHECKPOINT: submit(CHECKPOINT, _prepare)})
            why = files.failure(CHECKPOINT)
            whole = files.checkpoint.is_dir() and (files.noise_scale() or not noise_scale)
            if failed and (why or not whole):  # a process may die once its work is done
                lost = f"the process that saves the checkpoint was lost: {failed}"
                raise BranchError(why or lost)
        else:
            _prepare(lambda: run, files, plan)
            stack.enter_context(restored(run, files))
        scales = first(lambda: files.noise_scale(expected=noise_scale))
        known = known_at_checkpoint({**first(files.settings), **(scales or {})})
        if factor is not None:
            _refuse_unmeasured(factor, known)
        branches, missing = _train(files, plan, known["batch_size"], submit, on_branch)
    if 1.0 in missing:
        raise BranchError(
            f"the branch with k = 1 failed ({missing[1.0]}), and all others are compared with it. "
            f"To train it again, call again with the same folder, {files.path}"
        )
    result = CriticalBatch(branches=branches, missing=missing, **known)
    first(lambda: files.write_result(result.record()))
    return result


def _refuse_unmeasured(factor: str, known: dict[str, Any]) -> None:
    """Raise ValueError if the noise scale that a factor is to be computed with is not there."""
    scales = [m for m in METRICS if known["noise_scale" if m == "euclidean" else m] is not None]
    if factor in scales:
        return
    why = f" ({known['noise_scale_reason']})" if known["noise_scale_reason"] else ""
    raise ValueError(
        f"The {factor} noise scale was not measured at the checkpoint{why}, so there will be no "
        f"factor for it, and no branch was begun. Measured: {', '.join(scales) or 'none'}. Ask for "
        "the factor of one of these, or for none. A TorchRun measures spectral for "
        "torch.optim.Muon, sign for any other optimizer, and adam too for an Adam or AdamW that "
        "has stepped."
    )


def _prepare(make_run: Callable[[], BranchRun], files: BranchFolder, plan: Plan) -> None:
    """Save the checkpoint and measure the noise scale there."""
    run = make_run()
    files.prepare(plan.settings(run), run)
    if plan.noise_scale and first(files.noise_scale) is None:
        record = _measured(run)
        first(lambda: files.write_noise_scale(record))


@contextmanager
def restored(run: BranchRun, files: BranchFolder) -> Iterator[None]:
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


def _train(
    files: BranchFolder,
    plan: Plan,
    batch_size: int,
    submit: Callable[..., Call],
    on_branch: Callable[[Branch], None] | None,
) -> tuple[tuple[Branch, ...], dict[float, str]]:
    """All branches by ascending k, trained now or before, and why others failed."""
    found: list[Branch] = []
    missing: dict[float, str] = {}

    def take(branch: Branch) -> None:
        if on_branch is not None:
            on_branch(branch)
        if branch.state == "failed":
            missing[branch.k] = branch.reason
            return
        found.append(branch)
        if branch.k <= 1:
            matching({1.0: 0.0, branch.k: branch.loss})  # raises where the branch diverged

    for finished in first(files.branches):
        take(finished)
    trained = {branch.k for branch in found}
    asked = [branch for branch in plan.branches(batch_size) if branch.k not in trained]
    calls = {branch: submit(branch_name(branch.k), train_branch, branch) for branch in asked}
    with closing(ended(calls)) as ends:
        for branch, failed in ends:
            take(first(partial(files.outcome, branch, failed)))
    return tuple(sorted(found, key=lambda b: b.k)), dict(sorted(missing.items()))


def _measured(run: BranchRun) -> dict[str, Any]:
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


def measure_repeatedly(
    run: BranchRun,
    *,
    folder: str | os.PathLike[str],
    repeats: int,
    delta_tokens: int,
    k: Iterable[float] = (0.5, 1, 2, 4, 8),
    noise_scale: bool = True,
    factor: str | None = None,
    **how: Any,
) -> CriticalBatch:
    """Measure one checkpoint several times, each time on other data, and return ``averaged``.

    The first measurement is that of ``measure_critical_batch`` in the same folder. Before each
    further one the run goes back to the weights of the checkpoint and skips the data that earlier
    branches trained on. Its branches are in ``repeat-1``, ``repeat-2`` and so on below the folder,
    and the folder itself gets the averaged result. To continue, or to add repeats, call again.

    Args:
        run: a run with a method ``skip(tokens)``, such as ``TorchRun``.
        repeats: the number of measurements, at least 2. Each costs as much as a single one.
        how: further arguments of ``measure_critical_batch``.

    Raises:
        ValueError: for a run that cannot skip data, and where ``measure_critical_batch`` raises it.
        BranchError: where ``measure_critical_batch`` raises it.
    """
    integer("repeats", repeats, 2)
    skip = getattr(run, "skip", None)
    if not callable(skip):
        raise ValueError(
            f"each repeat trains on other data, and {type(run).__name__} has no skip(tokens) to "
            "reach it: add that method (gnsfast.critical_batch.BranchRun), or measure once"
        )
    path, ks = Path(folder), tuple(k)
    how |= {"k": ks, "delta_tokens": delta_tokens}
    longest = delta_tokens + round(max(ks, default=1) * run.batch_size) * run.tokens_per_sample
    measured: dict[str, Any] = {"noise_scale": noise_scale, "factor": factor}
    found = [measure_critical_batch(run, folder=path, **measured, **how)]
    files = BranchFolder(path)
    with restored(run, files):
        for number in range(1, repeats):
            skip(longest)
            below = path / f"repeat-{number}"
            found.append(measure_critical_batch(run, folder=below, noise_scale=False, **how))
    result = averaged(found)
    first(lambda: files.write_result(result.record()))
    return result
