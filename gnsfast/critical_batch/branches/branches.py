# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: trains branches of a checkpoint for its critical batch size."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from gnsfast.arguments import check_choice, integer
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_process import Job, train_here, train_in_processes
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import check_grid, matching, smoothed
from gnsfast.critical_batch.branches.measurement import Branch, CriticalBatch
from gnsfast.critical_batch.branches.noise_scale_records import (
    noise_scale_records,
    noise_scales_from_record,
)
from gnsfast.critical_batch.rules import Rules
from gnsfast.errors import BranchError

LEAST_STEPS = 3
"""Every branch needs them: the first loss is still the checkpoint's, and noise takes three."""


def measure_critical_batch(
    run: BranchRun,
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
    make_run: Callable[[], BranchRun] | None = None,
    noise_scale: bool = True,
    on_branch: Callable[[Branch], None] | None = None,
) -> CriticalBatch:
    """Measure the critical batch size at the present state of ``run``, as Merrill et al. do.

    Saves a checkpoint and measures the noise scale there. From the checkpoint it trains a branch
    for each k, with the batch size k · B and the learning rate f(k) · η, for Δ tokens. The result
    is the largest k whose loss is at most ε above that of every smaller k. Afterwards the run is
    back at the checkpoint, also after an exception or Ctrl-C.

    To continue an interrupted measurement, make the same call again, in this or another process: it
    trains the branches that are not finished. The run must have trained the same number of tokens;
    it is restored from the checkpoint in the folder. k may differ between calls: the result holds
    all branches of the folder.

    Args:
        run: a ``BranchRun``, such as ``TorchRun``.
        folder: a new folder, or that of a measurement to continue.
        k: batch sizes as multiples of ``run.batch_size``. They include 1, and also one below it
            unless "at most" is answer enough. Every batch must be a multiple of
            ``run.batch_multiple``, where the run has it.
        delta_tokens: Δ. A branch's last step may go beyond it; larger ones can find a larger
            critical batch size.
        tolerance: ε, in the units of the loss.
        alpha: the weight of the newest step in the moving average L_k.
        lr: f(k): ``"sqrt"`` (Adam), ``"linear"`` (SGD), ``"none"``.
        loss: ``"train"``, as in the paper, or ``"evaluate"``: L_k is ``run.evaluate()`` after the
            branch, which has less noise. To find the remaining noise, measure the same checkpoint
            with other data, each time into a new folder, and take ``averaged``.
        save_every_tokens: also save within a branch, so that a killed one continues from there.
        workers: train this many branches at once, each in its own process, which takes as many
            times the memory; 0 trains them in this process.
        make_run: needed with workers: a picklable function without arguments that returns the run,
            in any state. A script that passes it needs the guard ``if __name__ == "__main__"``.
        noise_scale: call ``run.noise_scale()``, where the run has it and the folder does not.
        on_branch: called with each branch: first those in the folder, then each as it ends.

    Raises:
        ValueError: for an invalid setting, or one that differs from the folder's.
        BranchError: where a branch with k <= 1 diverged, or the base k = 1 failed: finished
            branches are kept, and other failures are named in ``missing``. Also where another
            process is measuring in the folder.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """
    size, length = run.batch_size, run.tokens_per_sample
    ks = check_grid(k, size, getattr(run, "batch_multiple", 1))
    integer("delta_tokens", delta_tokens)
    matching({1: 0.0}, tolerance)  # raises for an invalid tolerance
    smoothed([0.0], alpha)  # raises for an invalid alpha
    if save_every_tokens is not None:
        integer("save_every_tokens", save_every_tokens)
    lr_factor = Rules(lr).lr_factor
    check_choice("loss", loss, ("train", "evaluate"))
    if loss == "evaluate" and not callable(getattr(run, "evaluate", None)):
        raise ValueError("loss='evaluate' needs a run with evaluate()")
    if integer("workers", workers, 0) and make_run is None:
        raise ValueError("workers need make_run, a function that makes the run in their processes")
    sizes = {each: round(each * size) for each in ks}
    if (least := LEAST_STEPS * sizes[ks[-1]] * length) > delta_tokens:
        raise ValueError(
            f"delta_tokens={delta_tokens:,} is too few: k = {ks[-1]:g} needs {LEAST_STEPS} steps"
            f" at least, {least:,} tokens"
        )
    settings: dict[str, Any] = {
        "tokens": run.tokens,
        "batch_size": size,
        "tokens_per_sample": length,
        "delta_tokens": delta_tokens,
        "tolerance": tolerance,
        "alpha": alpha,
        "lr": lr,
        "loss": loss,
    }
    files = BranchFolder(folder)
    own: Callable[[], Mapping[str, Any]] | None = getattr(run, "branch_settings", None)
    files.open(settings | {f"run.{name}": each for name, each in (own() if own else {}).items()})
    shared = (delta_tokens, alpha, loss, save_every_tokens)
    jobs = [Job(each, sizes[each], lr_factor(each), *shared) for each in ks]
    with files.locked():
        is_new = files.save_checkpoint(run)
        try:
            if not is_new:
                run.restore(files.checkpoint)
            measured = files.noise_scale() is not None
            scales = _noise_scales(run, files) if noise_scale or measured else {}
            branches, missing = _train(run, files, jobs, workers, make_run, on_branch)
        finally:
            run.restore(files.checkpoint)
    if 1.0 in missing:
        raise BranchError(
            f"the branch with k = 1 failed ({missing[1.0]}), and all others are compared with it: "
            f"call again with the same folder to continue ({files.path})"
        )
    result = CriticalBatch(branches=branches, missing=missing, **settings, **scales)
    files.write_result(result.record())
    return result


def _train(
    run: BranchRun,
    files: BranchFolder,
    jobs: list[Job],
    workers: int,
    make_run: Callable[[], BranchRun] | None,
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

    for finished in files.branches():
        take(finished)
    left = [job for job in jobs if job.k not in {branch.k for branch in found}]
    if workers and make_run is not None:
        training = train_in_processes(make_run, files, left, workers)
    else:
        training = train_here(run, files, left)
    with closing(training):
        for branch in training:
            take(branch)
    return tuple(sorted(found, key=lambda b: b.k)), dict(sorted(missing.items()))


def _noise_scales(run: BranchRun, files: BranchFolder) -> dict[str, Any]:
    """The noise scales at the checkpoint, as ``CriticalBatch`` takes them."""
    if (record := files.noise_scale()) is None:
        measure: Callable[[], Any] | None = getattr(run, "noise_scale", None)
        scale = None if measure is None else measure()
        record = noise_scale_records(scale)
        reason = ""
        if measure is None:
            reason = "the run has no noise_scale()"
        elif record["noise_scale"] is None:
            reason = (
                getattr(run, "noise_scale_reason", "") or "the run's noise_scale() returned none"
            )
        record["noise_scale_reason"] = reason
        files.write_noise_scale(record)
    return {
        **noise_scales_from_record(record),
        "noise_scale_reason": record["noise_scale_reason"],
    }
