# SPDX-License-Identifier: Apache-2.0
"""Several gloo processes for a test, and what becomes of others."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def enter(rank: int, work: Callable[..., None], ranks: int, port: int, args: tuple) -> None:
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def each(rank: int, works: Sequence[Callable[..., None]], *args: tuple) -> None:
    """All of ``works``, or of one with each of ``args``, in one start of the processes: each of
    them takes seconds to import torch.
    """
    cases = [(work, own) for work in works for own in args or [()]]
    for work, own in cases:
        torch.manual_seed(0)
        try:
            work(rank, *own)
        except BaseException as error:
            raise AssertionError(f"{work.__name__}{own}") from error


PRELOADED = ["pytest", "torch.distributed.fsdp", "torch.distributed.pipelining"]
PRELOADED += ["torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental"]
"""Imports that take each process 4 s: a server does them once, and every process is forked off it.
"""


def spawn(
    work: Callable[..., None], ranks: int = 2, args: tuple = (), method: str = "forkserver"
) -> None:
    """Run ``work(rank, *args)`` in every process; an error of any rank is the test's. ``"fork"``
    also keeps what the test itself has imported.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(enter, (work, ranks, port, args), nprocs=ranks, start_method=method)


def as_launched(rank: int, **more: str) -> None:
    """The environment of one of two processes that a launcher has started."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **more}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used


def runs(pid: str) -> bool:
    """Whether a process is there, and no zombie that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
