# SPDX-License-Identifier: Apache-2.0
"""Keeps errors of gnsfast out of the user's forward and backward passes, where a block asks for it:
the update is then not measured, and torch's own functions run.
"""

from collections.abc import Hashable
from types import TracebackType
from typing import Any

from torch import Tensor


class Guard:
    """Takes the errors of gnsfast while its block is open. ``error`` is the first one. ``calls``
    are those that are plain from then on: a checkpoint that runs one again must find it as before.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls: set[Hashable] = set()

    def __enter__(self) -> "Guard":
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        _open.remove(self)


_open: list[Guard] = []


def is_open() -> bool:
    """Whether the block of any guard is open."""
    return bool(_open)


def is_plain(call: Hashable) -> bool:
    """Whether an open guard has an error of this call."""
    return any(call in guard.calls for guard in _open)


def takes(error: Exception, call: Hashable = None) -> bool:
    """Whether a guard is open. All open ones get the error, of a call that is plain from now on."""
    for guard in _open:
        guard.error = guard.error or error
        guard.calls.add(call)
    return bool(_open)


def version_of(t: Any) -> int:
    """How often a tensor was written to. One of inference mode does not count it."""
    counts = isinstance(t, Tensor) and not t.is_inference()
    return t._version if counts else 0
