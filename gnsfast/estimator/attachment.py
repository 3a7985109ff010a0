# SPDX-License-Identifier: Apache-2.0
"""``attach`` lets the model's own forward passes open micro-batches."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Attachment:
    """The result of ``gns.attach()``. Copies and pickles of the model are not attached."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Any, Any], None],
        after: Callable[[], None],
        removed: Callable[["Attachment"], None],
    ) -> None:
        first = _Hook(model, before)
        last = _Hook(model, lambda args, kwargs: after())
        self._removed = removed
        self._handles = [
            model.register_forward_pre_hook(first, with_kwargs=True, prepend=True),
            model.register_forward_hook(last, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Detach from the model. An open micro-batch counts if its backward pass has run, and is
        forgotten otherwise.
        """
        for handle in self._handles:
            handle.remove()
        self._removed(self)


class _Hook:
    """Calls ``run`` for one model. A copy of the hook does nothing."""

    def __init__(
        self, model: nn.Module | None = None, run: Callable[[Any, Any], None] | None = None
    ) -> None:
        self.model, self.run = model, run

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if self.run is not None and module is self.model:
            self.run(args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()
