# SPDX-License-Identifier: Apache-2.0
"""Micro-batches opened by the model's own forward passes."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from gnsfast.estimator import GradientNoiseScale


class Attachment:
    """What ``attach`` returns; copies and pickles of the model are not attached."""

    def __init__(self, gns: "GradientNoiseScale") -> None:
        hooks = _Hook(gns, before=True), _Hook(gns, before=False)
        self._gns = gns
        self._handles = [
            gns.model.register_forward_pre_hook(hooks[0], with_kwargs=True),
            gns.model.register_forward_hook(hooks[1], with_kwargs=True),
        ]

    def remove(self) -> None:
        """End it; an open micro-batch counts if its backward pass has run, else it is forgotten."""
        for handle in self._handles:
            handle.remove()
        if self._gns._attachment is self:
            self._gns._attachment = None
            if self._gns._pass_done():
                self._gns._close_attached()
            elif self._gns._attached is not None:
                self._gns.discard()


class _Hook:
    def __init__(self, gns: "GradientNoiseScale | None" = None, before: bool = False) -> None:
        self.gns, self.before = gns, before

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if self.gns is None or module is not self.gns.model:
            return
        if self.before:
            self.gns._before_forward(args, kwargs)
        else:
            self.gns._after_forward()

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()
