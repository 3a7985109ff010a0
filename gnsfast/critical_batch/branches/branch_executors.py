# SPDX-License-Identifier: Apache-2.0
"""Executors, which own the processes that train branches: this process, new ones, or any other."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

import torch

from gnsfast.critical_batch.branches.branch_process import reason_of
from gnsfast.critical_batch.branches.launcher import pickled
from gnsfast.errors import BranchError
from gnsfast.parallel import process_count

POLL = 0.02, 2.0
"""Seconds between two looks at the running calls. They grow from the first to the second."""

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
        connection.wait([receiver, process.sentinel])
        said = None
        with suppress(EOFError):  # it died
            said = receiver.recv() if receiver.poll() else None
        process.join()
        if said is None:
            raise BranchError(f"its process ended with exit code {process.exitcode}")
        value, error = said
        if error is not None:
            raise error
        return value

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
    try:
        sender.send((fn(*args), None))
    except Exception as error:
        sender.send((None, error))


def _end_after(ours: Any) -> None:
    """End this process, with those that it has started, once nobody holds the pipe any more."""
    connection.wait([ours])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGTERM)
    os._exit(1)


def told(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What ``work`` returns, or its exception as text, which every executor can pass on."""
    try:
        return {"value": work(*args)}
    except Exception as error:
        if process_count() > 1:  # the others wait for this process: it has to end
            raise
        return {"error": reason_of(error)}


def ended(calls: dict[Key, Call]) -> Generator[tuple[Key, Any], None, None]:
    """What each call was ``told``, as they end. Closing it cancels those that wait."""
    pause = POLL[0]
    try:
        while calls:
            done = [key for key, call in calls.items() if call.done()]
            pause = POLL[0] if done else min(1.5 * pause, POLL[1])
            for key in done:
                said = told(calls.pop(key).result)  # an error: it was lost, as with its machine
                yield key, said.get("value", said)
            if calls and not done:
                time.sleep(pause)
    finally:
        for call in calls.values():
            call.cancel()
