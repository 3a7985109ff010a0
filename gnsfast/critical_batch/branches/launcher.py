# SPDX-License-Identifier: Apache-2.0
"""Work that several processes do together, started by torchrun or srun."""

import base64
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnsfast.critical_batch.branches.branch_folder import BranchFolder, shown
from gnsfast.errors import BranchError

LAUNCHED = "gnsfast.critical_batch.branches.launched"
"""The module that each process runs."""

MODULE_STARTERS = re.compile(r"torchrun|torch\.distributed\.run|accelerate|python[\d.]*")
"""After such a word ``-m`` names a module; any other command starts a program."""

SHARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What tells a process that it is one of several."""


def launch(command: str | None, folder: BranchFolder, work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` in the processes that ``command`` starts; return the first one's result.

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
        return work(*args)
    alone = {name: value for name, value in os.environ.items() if name not in SHARED}
    words = shlex.split(command or "")
    if not any(MODULE_STARTERS.fullmatch(Path(word).name) for word in words):
        words.append(sys.executable)
    result = folder.path / f"launched-{uuid.uuid4().hex}.json"
    # Their output goes to stderr: stdout is that of the command that measures.
    line = [*words, "-m", LAUNCHED, _packed(work, args, result)]
    ended = subprocess.run(line, stdout=2, env=alone if command is None else None)
    if ended.returncode and not result.is_file():
        raise BranchError(
            f"{words[0]} ended with exit code {ended.returncode}; its output says why"
        )
    said = json.loads(shown(result).read_text(encoding="utf-8"))
    result.unlink()
    if "error" in said:
        raise BranchError(said["error"])
    return said["value"]


def _packed(work: Callable[..., Any], args: tuple[Any, ...], result: Path) -> str:
    """The work as an argument of a command, and the path that it is imported by."""
    job = pickled(work, args, result)
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
