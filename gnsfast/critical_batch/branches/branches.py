# SPDX-License-Identifier: Apache-2.0
"""``measure_critical_batch``: the critical batch size at a checkpoint, by training branches."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from gnsfast.arguments import count
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_process import Job, here, in_processes
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branch_rule import LR_FACTORS, check_grid, matching, smoothed
from gnsfast.critical_batch.branches.measurement import (
    Branch,
    CriticalBatch,
    scale_of,
    scale_record,
)
from gnsfast.errors import BranchError

LEAST_STEPS = 3
"""Of every branch: the first step's loss is that of the checkpoint, and noise needs three."""


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
    """Measure the critical batch size where ``run`` stands, as Merrill et al. do.

    Saves a checkpoint, measures the noise scale there, trains from it a branch for each k with the
    batch size k · B and the learning rate f(k) · η for Δ tokens, and takes the largest k whose
    loss is at most ε above that of every smaller k. In the end, also after an exception or Ctrl-C,
    the run is back at the checkpoint.

    A folder is gone on with: the same call again trains what is not finished, in this or another
    process. The checkpoint in it is the one that counts: a run of the same number of tokens is put
    there. k may differ from call to call: new branches join those that are there, and all of them
    count.

    Args:
        run: a ``BranchRun``, such as ``TorchRun``.
        folder: a new one, or that of a measurement to go on with.
        k: batch sizes as multiples of ``run.batch_size``; with 1, and one below it unless "at most"
            is answer enough. ``run.batch_multiple``, where a run has it, divides every batch.
        delta_tokens: Δ. A branch's last step may go beyond it; larger ones can find a larger
            critical batch size.
        tolerance: ε, in the units of the loss.
        alpha: the weight of the newest step in the moving average that L_k is.
        lr: f(k): ``"sqrt"`` (Adam), ``"linear"`` (SGD), ``"none"``.
        loss: ``"train"``, as the paper has it, or ``"evaluate"``: ``run.evaluate()`` after a branch
            instead, with less noise. How much is left, measurements of the checkpoint with other
            data tell, each in its folder (``gnsfast.critical_batch.averaged``).
        save_every_tokens: also save inside of a branch, so that a killed one goes on from there.
        workers: train so many branches at once, each in a process of its own, 0 for none. It costs
            so many times the memory.
        make_run: for workers: a picklable function without arguments that makes the run, at any
            point of it, as their guard ``if __name__ == "__main__"`` has to allow.
        noise_scale: measure ``run.noise_scale()``, where the run has it and the folder has not.
        on_branch: hears of each branch: at once of those in the folder, then as they end.

    Raises:
        ValueError: for a setting that cannot be, or that differs from the folder's.
        BranchError: where a branch with k <= 1 diverged, or the base k = 1 failed. Finished
            branches are kept; other failures are named in ``missing``. Where another process is
            measuring in the folder.

    Source: Merrill et al. 2025 (arXiv 2505.23971), section 3.
    """
    size, length = run.batch_size, run.tokens_per_sample
    ks = check_grid(k, size, getattr(run, "batch_multiple", 1))
    count("delta_tokens", delta_tokens, 1)
    matching({1: 0.0}, tolerance)
    smoothed([0.0], alpha)
    if save_every_tokens is not None:
        count("save_every_tokens", save_every_tokens, 1)
    _check_choices(run, lr, loss, count("workers", workers, 0), make_run)
    sizes = {each: round(each * size) for each in ks}
    if (least := LEAST_STEPS * sizes[ks[-1]] * length) > delta_tokens:
        raise ValueError(
            f"delta_tokens={delta_tokens:,} is too little: k = {ks[-1]:g} needs {LEAST_STEPS} steps"
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
    jobs = [Job(each, sizes[each], LR_FACTORS[lr](each), *shared) for each in ks]
    with files.alone():
        fresh = files.save_checkpoint(run)
        try:
            if not fresh:
                run.restore(files.checkpoint)
            known = files.noise_scale() is not None
            scales = _noise_scales(run, files) if noise_scale or known else {}
            branches, missing = _train(run, files, jobs, workers, make_run, on_branch)
        finally:
            run.restore(files.checkpoint)
    if 1.0 in missing:
        raise BranchError(
            f"the branch with k = 1 failed ({missing[1.0]}), and all others stand beside it: call "
            f"again with the same folder to go on ({files.path})"
        )
    result = CriticalBatch(branches=branches, missing=missing, **settings, **scales)
    files.write_result(result.record())
    return result


def _check_choices(run: BranchRun, lr: str, loss: str, workers: int, make_run: object) -> None:
    if lr not in LR_FACTORS:
        raise ValueError(f"lr must be one of {', '.join(LR_FACTORS)}, not {lr!r}")
    if loss not in ("train", "evaluate"):
        raise ValueError(f"loss must be 'train' or 'evaluate', not {loss!r}")
    if loss == "evaluate" and not callable(getattr(run, "evaluate", None)):
        raise ValueError("loss='evaluate' needs a run with evaluate()")
    if workers and make_run is None:
        raise ValueError("workers need make_run, a function that makes the run in their processes")


def _train(
    run: BranchRun,
    files: BranchFolder,
    jobs: list[Job],
    workers: int,
    make_run: Callable[[], BranchRun] | None,
    on_branch: Callable[[Branch], None] | None,
) -> tuple[tuple[Branch, ...], dict[float, str]]:
    """All branches by ascending k, trained now or before, and why some are missing."""
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
            matching({1.0: 0.0, branch.k: branch.loss})  # one that diverged ends it all

    for finished in files.branches():
        take(finished)
    left = [job for job in jobs if job.k not in {branch.k for branch in found}]
    if workers and make_run is not None:
        training = in_processes(make_run, files, left, workers)
    else:
        training = here(run, files, left)
    with closing(training):
        for branch in training:
            take(branch)
    return tuple(sorted(found, key=lambda b: b.k)), dict(sorted(missing.items()))


def _noise_scales(run: BranchRun, files: BranchFolder) -> dict[str, Any]:
    """The noise scales at the checkpoint, as ``CriticalBatch`` takes them."""
    if (record := files.noise_scale()) is None:
        measure: Callable[[], Any] | None = getattr(run, "noise_scale", None)
        scale = None if measure is None else measure()
        reason = ""
        if measure is None:
            reason = "the run has no noise_scale()"
        elif scale_record(scale) is None:
            reason = getattr(run, "noise_scale_reason", "") or "the run's noise_scale() found none"
        record = {
            "noise_scale": scale_record(scale),
            "adam": scale_record(None if scale is None else scale.adam),
            "noise_scale_reason": reason,
        }
        files.write_noise_scale(record)
    return {
        "noise_scale": scale_of(record["noise_scale"]),
        "adam": scale_of(record["adam"]),
        "noise_scale_reason": record["noise_scale_reason"],
    }
