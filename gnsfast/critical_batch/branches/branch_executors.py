# SPDX-License-Identifier: Apache-2.0
"""Executors, which own the processes that train branches: this process, new ones, or any other.
Processes that do a work together are started by torchrun or srun.
"""

import base64
import multiprocessing
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.errors import BranchError
from gnsfast.parallel import process_count

POLL = 0.02, 2.0
"""Seconds between two looks at the running calls. They grow from the first to the second."""

LAUNCHED = "gnsfast.critical_batch.branches.launched"
"""The module that each process runs."""

MODULE_STARTERS = re.compile(r"torchrun|torch\.distributed\.run|accelerate|python[\d.]*")
"""After such a word ``-m`` names a module; any other command starts a program."""

SHARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What tells a process that it is one of several."""

Key = TypeVar("Key")


class Call(Protocol):
    """What an executor returns for a call: a future of any kind."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Submits(Protocol):
    """Any executor: one of ``concurrent.futures``, submitit's, ``dask_client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Call: ...


class Here:
    """An executor that calls in this process, one after another, when a result is asked for.
    Exceptions reach the caller.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Call:
        found: Any = Future()
        found.done, found.result = lambda: True, partial(fn, *args)
        return found  # type: ignore[no-any-return]


class LocalProcesses(ThreadPoolExecutor):
    """Runs up to ``workers`` calls at once, each in a new process. One that dies ends no other.

    The processes divide torch's threads among them. They end with this process, whatever ends it,
    because each reads from a pipe of which this process alone holds the other end.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._torch_threads = max(1, torch.get_num_threads() // workers)
        self._context = multiprocessing.get_context("spawn")
        self._ours, self._held = self._context.Pipe(duplex=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """Call ``fn`` in a new process. What cannot be pickled is a ValueError."""
        pickled(fn, args)
        return super().submit(self._call, fn, *args)

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        receiver, sender = self._context.Pipe(duplex=False)
        # Not a daemon: a daemon may not start processes of a DataLoader.
        work = self._ours, sender, self._torch_threads, fn, *args
        process = self._context.Process(target=_work, args=work)
        process.start()
        sender.close()
        if self._ours in connection.wait([receiver, process.sentinel, self._ours]):
            process.terminate()  # it may not have come to reading the pipe
        said: list[Any] = []
        with suppress(EOFError):  # it died
            said = [receiver.recv()] if receiver.poll() else []
        process.join()
        if not said:
            raise BranchError(f"its process ended with exit code {process.exitcode}")
        return said[0]

    def __exit__(self, *exception: object) -> None:
        """End all calls, also those at work."""
        self._held.close()
        self.shutdown(cancel_futures=True)


def _work(ours: Any, sender: Any, threads: int, fn: Callable[..., Any], *args: Any) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which ends this one and its processes
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(ours,), daemon=True).start()
    torch.set_num_threads(threads)
    sender.send(fn(*args))


def _end_after(ours: Any) -> None:
    """End this process, with those that it has started, once nobody holds the pipe any more."""
    connection.wait([ours])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGTERM)
    os._exit(1)


def noted(folder: BranchFolder, name: str, work: Callable[..., Any], *args: Any) -> None:
    """Call ``work``, and note in the folder why it failed: its process may not live to tell."""
    try:
        work(*args)
    except Exception as error:
        folder.fail(name, reason_of(error), traceback.format_exc())
        raise


def told(work: Callable[..., Any], *args: Any) -> str | None:
    """Why ``work`` failed, as text, which every executor can pass on; None where it did not. What
    it found is in the folder.
    """
    try:
        failed: str | None = work(*args)
    except Exception as error:
        if process_count() > 1:  # the others wait for this process: it has to end
            raise
        failed = reason_of(error)
    return failed


def ended(calls: dict[Key, Call]) -> Generator[tuple[Key, str | None], None, None]:
    """Each call that has ended, and why it failed. Closing it cancels those that wait."""
    pause = POLL[0]
    try:
        while calls:
            done = [key for key, call in calls.items() if call.done()]
            pause = POLL[0] if done else min(1.5 * pause, POLL[1])
            for key in done:
                yield key, told(calls.pop(key).result)  # an error: it was lost, as its machine
            if calls and not done:
                time.sleep(pause)
    finally:
        for call in calls.values():
            call.cancel()


def reason_of(error: BaseException) -> str:
    """An exception in one line, with its type unless gnsfast worded the message itself."""
    said, kind = str(error).partition("\n")[0], type(error).__name__
    if isinstance(error, BranchError | ValueError):
        return said or kind
    return f"{kind}: {said}" if said else kind


def launch(
    command: str | None, folder: BranchFolder, name: str, work: Callable[..., Any], *args: Any
) -> None:
    """Call ``work(*args)`` in the processes that ``command`` starts.

    Without a command, in a process of its own: this one on the main thread, else a new one.
    Threads, such as Dask's tasks, share the random numbers of their process.

    Args:
        command: such as ``"torchrun --standalone --nproc-per-node 8"`` or ``"srun"``.
        folder: a folder that all of them share.
        args: the first argument makes the run, and calls ``init_process_group``.

    Raises:
        ValueError: where the processes cannot import ``make_run``.
        BranchError: where the command fails.
    """
    if command is None and threading.current_thread() is threading.main_thread():
        return noted(folder, name, work, *args)
    alone = {name: value for name, value in os.environ.items() if name not in SHARED}
    words = shlex.split(command or "")
    if not any(MODULE_STARTERS.fullmatch(Path(word).name) for word in words):
        words.append(sys.executable)
    # Their output goes to stderr: stdout is that of the command that measures.
    line = [*words, "-m", LAUNCHED, _packed(folder, name, work, *args)]
    ended = subprocess.run(line, stdout=2, env=alone if command is None else None)
    if ended.returncode:
        raise BranchError(
            f"{words[0]} ended with exit code {ended.returncode}; its output says why"
        )


def _packed(*work: Any) -> str:
    """A work as an argument of a command, and the path that it is imported by."""
    job = pickled(*work)
    if b"__main__" in job:
        raise ValueError(
            "other processes call make_run, and they cannot import it from the script that runs: "
            "move make_run into a module, and import it from there"
        )
    return base64.b64encode(pickle.dumps((sys.path, job))).decode()


def pickled(*what: Any) -> bytes:
    """What another process is to do.

    Raises:
        ValueError: for what cannot be pickled, so that no other process could call it.
    """
    try:
        return pickle.dumps(what)
    except Exception as error:
        raise ValueError(
            "other processes call make_run, so make_run must be a function at the top level of a "
            f"module ({error})"
        ) from error
