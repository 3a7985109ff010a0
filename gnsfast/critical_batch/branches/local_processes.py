# SPDX-License-Identifier: Apache-2.0
"""``LocalProcesses``: an executor whose every call has a new process of this machine."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.process import BaseProcess as Process
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from gnsfast.errors import BranchError


class LocalProcesses(Executor):
    """Runs up to ``workers`` calls at once, each in a new process. One that dies ends no other.

    The processes divide torch's threads among them. They end with this process, whatever ends it.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers)
        self._torch_threads = max(1, torch.get_num_threads() // workers)
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._running: set[Process] | None = set()  # None once it is shut down

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in a new process.

        Raises:
            ValueError: for what cannot be pickled, so that no new process could call it.
        """
        try:
            ForkingPickler.dumps((fn, args, kwargs))
        except Exception as error:
            raise ValueError(
                "other processes call make_run, so it must be a function at the top level of a "
                f"module ({error})"
            ) from error
        return self._threads.submit(self._call, fn, args, kwargs)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        receiver, sender = self._context.Pipe(duplex=False)
        work = (sender, self._torch_threads, fn, args, kwargs)
        # Not a daemon: a daemon may not start processes of a DataLoader.
        process = self._context.Process(target=_work, args=work)
        with self._lock:
            if self._running is None:
                raise BranchError("the measurement ended before the process of this branch started")
            process.start()
            self._running.add(process)
        sender.close()
        connection.wait([receiver, process.sentinel])
        try:
            said = receiver.recv() if receiver.poll() else None
        except EOFError:  # it died
            said = None
        process.join()
        with self._lock:
            (self._running or set()).discard(process)
        if said is None:
            raise BranchError(f"its process ended with exit code {process.exitcode}")
        value, error = said
        if error is not None:
            raise error
        return value

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all calls, also those at work when ``cancel_futures``."""
        if cancel_futures:
            with self._lock:
                running, self._running = self._running or set(), None
            for process in running:
                _end(process)
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)

    def __exit__(self, *exception: object) -> None:
        self.shutdown(cancel_futures=True)


def _work(
    sender: "connection.Connection",
    threads: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which ends this one and its processes
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        sender.send((fn(*args, **kwargs), None))
    except Exception as error:
        sender.send((None, error))


def _end(process: Process) -> None:
    """End a process with those that it has started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except (ProcessLookupError, AttributeError):  # not a group yet, or Windows, which has none
        process.terminate()


def _end_with_parent() -> None:
    """End this process when its parent is killed, before another one writes the same branch."""
    if (parent := multiprocessing.parent_process()) is not None:
        connection.wait([parent.sentinel])
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGTERM)
        os._exit(1)
