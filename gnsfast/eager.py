# SPDX-License-Identifier: Apache-2.0
"""Runs compiled models in eager mode for as long as anybody needs it."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Eager:
    """Sets the stance of ``torch.compiler`` while it has owners. The last one restores it, in
    whatever order they end: each stance that torch is asked for restores what it has met.
    """

    def __init__(self) -> None:
        self._owners = 0
        self._stance: Any = None

    def hold(self, owner: object) -> Callable[[], object]:
        """Run compiled models in eager mode until the result is called, or until ``owner`` is
        deleted. It may be called more than once.
        """
        self._enter()
        release = weakref.finalize(owner, self._leave)
        release.atexit = False
        return release

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Run compiled models in eager mode inside of the block."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if not self._owners:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        self._owners += 1

    def _leave(self) -> None:
        self._owners -= 1
        if not self._owners:
            self._stance.__exit__(None, None, None)


EAGER = Eager()
