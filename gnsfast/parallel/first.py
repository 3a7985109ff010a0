# SPDX-License-Identifier: Apache-2.0
"""What one of several processes does for all, such as writing a file, and what all do together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from gnsfast.parallel.processes import gathered

T = TypeVar("T")


def process_count() -> int:
    """The processes of the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is process 0 of the default group, or the only one."""
    return process_count() == 1 or dist.get_rank() == 0


def first(work: Callable[[], T]) -> T:
    """What ``work()`` returns or raises in process 0, in every process. All of them must call it.

    Only an ``Exception`` is shared: after a ``KeyboardInterrupt`` the others lose their connection.
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
    """Return once every process has called it."""
    if process_count() > 1:
        gathered(None, None)


def mean(value: Tensor | float) -> float:
    """The mean of a number over all processes; waits for the device."""
    if process_count() == 1:
        return float(value)
    found = gathered(float(value), None)
    return float(sum(found) / len(found))
