# SPDX-License-Identifier: Apache-2.0
"""``attach`` lets the model's own forward passes open micro-batches."""

from collections.abc import Callable
from typing import Any

from torch import nn

from gnsfast.following import Hook


class Attachment:
    """The result of ``gns.attach()``. Copies and pickles of the model are not attached."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Any, Any], None],
        after: Callable[[], None],
        removed: Callable[["Attachment"], None],
    ) -> None:
        def first(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is model:  # and no shallow copy
                before(args, kwargs)

        def last(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is model:
                after()

        self._removed = removed
        self._handles = [
            model.register_forward_pre_hook(Hook(first), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(last), with_kwargs=True),
        ]

    def remove(self) -> None:
        """Detach from the model. An open micro-batch counts if its backward pass has run, and is
        forgotten otherwise.
        """
        for handle in self._handles:
            handle.remove()
        self._removed(self)
