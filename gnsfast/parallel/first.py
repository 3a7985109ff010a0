# SPDX-License-Identifier: Apache-2.0
"""Work that one process does for all, such as writing a file, and work that all do together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from gnsfast.parallel.processes import gathered

T = TypeVar("T")


def process_count() -> int:
    """The number of processes in the default group, or 1 if there is no group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is process 0 of the default group, or the only one."""
    return process_count() == 1 or dist.get_rank() == 0


def first(work: Callable[[], T]) -> T:
    """Run ``work()`` in process 0, and return or raise its result in every process. All processes
    must call this.

    Only an ``Exception`` is shared. After a ``KeyboardInterrupt`` the others lose their connection.
    """
    if process_count() == 1:
        return work()
    said: list[Any] = [None, None]
    if is_first():
        try:
            said[0] = work()
        except Exception as error:
            said[1] = error
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    value: T = said[0]
    return value


def meet() -> None:
    """Wait until every process has called this."""
    if process_count() > 1:
        gathered(None, None)


def mean(value: Tensor | float) -> float:
    """The mean of a number over all processes. This waits for the device."""
    if process_count() == 1:
        return float(value)
    found = gathered(float(value), None)
    return float(sum(found) / len(found))
