# SPDX-License-Identifier: Apache-2.0
"""Work that several processes do together, started by torchrun or srun."""

import base64
import json
import os
import pickle
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gnsfast.critical_batch.branches.branch_folder import BranchFolder, shown, write
from gnsfast.critical_batch.branches.branch_process import reason_of
from gnsfast.errors import BranchError
from gnsfast.parallel import is_first, process_count

MODULE_STARTERS = ("torchrun", "torch.distributed.run", "accelerate", "python")
"""After a word that begins so ``-m`` names a module; any other command starts a program."""

SRUN = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR",
}
"""What ``init_process_group`` reads, and how ``srun`` names it."""


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
    ended = subprocess.run([*words, "-m", __name__, _packed(work, args, result)], stdout=2)
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


def main() -> None:
    """What each launched process does."""
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ.update({name: os.environ[slurm] for name, slurm in SRUN.items()})
        step = int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(20_000 + step % 10_000))
    sys.path, job = pickle.loads(base64.b64decode(sys.argv[1]))
    work, (make_run, *args), result = pickle.loads(job)

    def make() -> Any:
        run, started = make_run(), int(os.environ.get("WORLD_SIZE", 1))
        if process_count() != started:
            raise BranchError(
                f"{started} processes were launched, and make_run made a run of {process_count()}: "
                "it must call torch.distributed.init_process_group()"
            )
        return run

    try:
        value = work(make, *args)
    except Exception as error:
        write(result, {"error": reason_of(error)})
        raise
    if is_first():
        write(result, {"value": value})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
