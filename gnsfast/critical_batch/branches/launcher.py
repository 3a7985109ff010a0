# SPDX-License-Identifier: Apache-2.0
"""Work that several processes do together, started by torchrun or srun."""

import base64
import json
import pickle
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

MODULE_STARTERS = ("torchrun", "torch.distributed.run", "accelerate", "python")
"""After a word that begins so ``-m`` names a module; any other command starts a program."""


def alone(folder: BranchFolder, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` in a process that it shares with nothing else: this one, or a new one.

    A thread beside others, such as a task of Dask has, shares the random numbers of its process.
    """
    if threading.current_thread() is threading.main_thread():
        return work(*args)
    return launch(shlex.quote(sys.executable), folder, work, *args)


def launch(command: str, folder: BranchFolder, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` in the processes that ``command`` starts; what the first one returns.

    Args:
        command: such as ``"torchrun --standalone --nproc-per-node 8"`` or ``"srun"``.
        folder: that all of them share.
        args: the first one makes the run, and calls ``init_process_group``.

    Raises:
        ValueError: where they cannot import ``make_run``.
        BranchError: where the command fails.
    """
    words = shlex.split(command)
    result = folder.path / f"launched-{uuid.uuid4().hex}.json"
    if not any(Path(word).name.startswith(MODULE_STARTERS) for word in words):
        words.append(sys.executable)
    # Their output goes to stderr: stdout is that of the command that measures.
    ended = subprocess.run([*words, "-m", LAUNCHED, _packed(work, args, result)], stdout=2)
    if ended.returncode and not result.is_file():
        raise BranchError(f"{words[0]} ended with code {ended.returncode}")
    shown(result.is_file, result)
    said = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    if "error" in said:
        raise BranchError(said["error"])
    return said["value"]


def _packed(work: Callable[..., Any], args: tuple[Any, ...], result: Path) -> str:
    """The work as an argument of a command, and the path that it is imported by."""
    try:
        job = pickle.dumps((work, args, result))
    except Exception as error:
        raise ValueError(f"make_run must be a function of a module: {error}") from error
    if b"__main__" in job:
        raise ValueError(
            "make_run is called in other processes, which cannot import the script that is run: "
            "move it into a module"
        )
    return base64.b64encode(pickle.dumps((sys.path, job))).decode()
