# SPDX-License-Identifier: Apache-2.0
"""Torch's activation checkpoints while a model is learnt, in the thread that learns and no
other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils import checkpoint

from gnsfast.torch_internals import FIRST_FORWARD


class _Replaced:
    """Replaces ``name`` of torch's module or class ``owner`` for the threads that ask for it.
    Others get what is there. It is put back when no thread asks for it.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._owner, self._name, self._instead = owner, name, instead
        self._lock, self._here, self._users = threading.Lock(), threading.local(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._install()
            self._users += 1
        before = getattr(self._here, "depth", 0)
        self._here.depth = before + 1
        try:
            yield
        finally:
            self._here.depth = before
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _install(self) -> None:
        self._is_inherited = self._name not in vars(self._owner)
        self._before = before = getattr(self._owner, self._name)

        def call(*args: Any, **kwargs: Any) -> Any:
            asks = getattr(self._here, "depth", 0)
            return (self._instead if asks else before)(*args, **kwargs)

        setattr(self._owner, self._name, call)

    def _restore(self) -> None:
        if self._is_inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


def _not_reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


keeping_graphs = _Replaced(checkpoint, FIRST_FORWARD, lambda frame: nullcontext())
"""Let non-reentrant checkpoints keep their graphs, in which rows that the data have chosen are
found.
"""

not_reentrant = _Replaced(checkpoint.CheckpointFunction, "apply", _not_reentrant)
"""Let reentrant checkpoints be others, which have a gradient in ``autograd.grad`` too."""
