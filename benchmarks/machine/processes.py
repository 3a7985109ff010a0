# SPDX-License-Identifier: Apache-2.0
"""No process that a stage of ``make gpu`` starts outlives it: what is left would hold the device.
Linux and the standard library alone.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PDEATHSIG, CHILD_SUBREAPER = 1, 36
"""Of prctl(2)."""
SECONDS = 5
"""That killed processes may take to end: one inside of the driver may take forever."""


def following() -> Callable[[], object]:
    """What a new process calls so that it is killed when the thread that started it ends. The
    library is opened here: a fork of a process with threads must not wait for a lock.
    """
    return partial(ctypes.CDLL(None).prctl, PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def none_left(say: Callable[[str], None]) -> Iterator[None]:
    """At the end kill every process that was started meanwhile, in any group: ninja gives each
    compiler a group of its own. Orphans become this process's children.
    """
    before = descendants()
    prctl = ctypes.CDLL(None).prctl
    prctl(CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end, reported = time.monotonic() + SECONDS, set[int]()
        while (left := descendants() - before) and time.monotonic() < end:
            for process in left:
                if not ended(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                    if process not in reported:
                        say(f"stopped: process {process}, which its stage left behind")
                    reported.add(process)
            time.sleep(0.01)
        if left:
            say(f"processes that a kill does not end: {sorted(left)}")
        prctl(CHILD_SUBREAPER, 0)


def ended(child: int) -> bool:
    """Whether it has ended. An orphan stays in /proc until this asks; nobody else does."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:  # another process's
        return False


def descendants() -> set[int]:
    """This process's children, their children and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found, new = set[int](), [os.getpid()]
    while new:
        new = [child for process in new for child in children.get(process, [])]
        found.update(new)
    return found
