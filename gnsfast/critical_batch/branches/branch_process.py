# SPDX-License-Identifier: Apache-2.0
"""Trains branches: one after another in this process, or several at once in processes."""

import math
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess as Process
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch

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


def train_branch(run: BranchRun, folder: BranchFolder, job: Job) -> Branch:
    """Train a branch from its newest save to its end, or until a loss is not finite.

    Raises:
        BranchError: where ``run`` takes steps of another size than asked for, or ends early.
    """
    done, losses = folder.restore(run, job.k)
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
                    f"train({left}, batch_size={job.batch_size}) made a step of {step.tokens} "
                    f"tokens after {done}: it must make steps of {per_step} until "
                    f"{job.delta_tokens}"
                )
            done += step.tokens
            losses.append(step.loss)
            file.write(step_line(job.k, len(losses), done, step.loss))
            if not math.isfinite(step.loss):
                return _finish(folder, job, losses, done, math.nan)
            every = job.save_every_tokens
            if every and done - saved >= every and done < job.delta_tokens:
                folder.save(run, job.k, done)
                saved = done
    if done < job.delta_tokens:
        raise BranchError(f"train() ended after {done:,} of {job.delta_tokens:,} tokens")
    loss = smoothed(losses, job.alpha) if job.loss == "train" else cast(Any, run).evaluate()
    return _finish(folder, job, losses, done, loss)


def _finish(
    folder: BranchFolder, job: Job, losses: list[float], tokens: int, loss: float
) -> Branch:
    own = job.k, job.batch_size, job.lr_factor
    if not math.isfinite(loss):
        branch = Branch(*own, math.inf, math.nan, len(losses), tokens, "diverged")
    else:
        noise = smoothed_std(losses, job.alpha) if job.loss == "train" else math.nan
        branch = Branch(*own, loss, noise, len(losses), tokens)
    folder.finish(branch)
    return branch


def train_here(
    run: BranchRun, folder: BranchFolder, jobs: Iterable[Job]
) -> Generator[Branch, None, None]:
    """Train one branch after another. A branch that raises has failed; the next is trained."""
    for job in jobs:
        folder.forget_failure(job.k)
        try:
            branch = train_branch(run, folder, job)
        except Exception as error:
            branch = _record_failure(folder, job, error)
        yield branch


def train_in_processes(
    make_run: Callable[[], BranchRun], folder: BranchFolder, jobs: Iterable[Job], workers: int
) -> Generator[Branch, None, None]:
    """Train up to ``workers`` branches at once, each in a new process; yield them as they end.

    The processes divide torch's threads among them, and end with this process, whatever ends it.

    Raises:
        ValueError: for a ``make_run`` that cannot be pickled, so that no new process could call it.
    """
    try:
        ForkingPickler.dumps(make_run)
    except Exception as error:
        raise ValueError(
            f"make_run is called in other processes and must be a function of a module: {error}"
        ) from error
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    waiting = list(jobs)
    running: dict[int, tuple[Process, Job]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                folder.forget_failure(job.k)
                work = (make_run, folder, job, threads)
                # Not a daemon: a daemon may not start processes of a DataLoader.
                process: Process = context.Process(target=_work, args=work)
                process.start()
                running[process.sentinel] = process, job
            for sentinel in connection.wait(list(running)):
                process, job = running.pop(cast(int, sentinel))
                process.join()
                reason = folder.failure(job.k) or f"its process ended with code {process.exitcode}"
                yield folder.branch(job.k) or job.failed(reason)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _work(make_run: Callable[[], BranchRun], folder: BranchFolder, job: Job, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        train_branch(make_run(), folder, job)
    except Exception as error:
        _record_failure(folder, job, error)


def _end_with_parent() -> None:
    """End this process when its parent is killed, before another one writes the same branch."""
    if (parent := multiprocessing.parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _record_failure(folder: BranchFolder, job: Job, error: Exception) -> Branch:
    said = str(error).partition("\n")[0]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    folder.fail(job.k, reason, traceback.format_exc())
    return job.failed(reason)
