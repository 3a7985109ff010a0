# SPDX-License-Identifier: Apache-2.0
"""No process that a stage of ``make gpu`` starts outlives it: what is left would hold the device.
Linux and the standard library alone.
"""

import contextlib
import ctypes
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PDEATHSIG = 1
"""Of prctl(2)."""
STAGE = "GPU_MACHINE_STAGE"
"""The variable by which a stage's processes are known: each has it from the one that started it."""
SECONDS = 5
"""That killed processes may take to end: one inside of the driver may take forever."""


def following() -> Callable[[], object]:
    """What a new process calls so that it is killed when the thread that started it ends. The
    library is opened here: a fork of a process with threads must not wait for a lock.
    """
    return partial(ctypes.CDLL(None).prctl, PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def none_left(say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """The variables of a stage's processes. At the end kill those that are left, in any group:
    ninja gives each compiler a group of its own.
    """
    stage = {STAGE: uuid.uuid4().hex}
    try:
        yield stage
    finally:
        end, reported = time.monotonic() + SECONDS, set[int]()
        while (left := of_stage(stage)) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for process in left - reported:
                say(f"stopped: process {process}, which its stage left behind")
            reported |= left
            time.sleep(0.01)
        if left:
            say(f"processes that a kill does not end: {sorted(left)}")


def of_stage(stage: dict[str, str]) -> set[int]:
    """The processes with these variables. One that has ended and that nobody has asked for has
    none.
    """
    marks = {f"{name}={value}".encode() for name, value in stage.items()}
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if marks & set(path.read_bytes().split(b"\0")):
                found.add(int(path.parent.name))
    return found
