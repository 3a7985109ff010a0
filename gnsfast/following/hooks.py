# SPDX-License-Identifier: Apache-2.0
"""Hooks that copies of a model do not have."""

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook of one module, which calls ``run``. Copies and pickles of it do nothing."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return None if self.run is None else self.run(*args)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()
