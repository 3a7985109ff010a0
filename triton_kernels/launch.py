# SPDX-License-Identifier: Apache-2.0
"""Launches that are repeated: the work of the host is done once."""

from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Launch:
    """A kernel with all fixed but its tensors, which are its first arguments.

    ``kernel[grid](...)`` binds and classifies every argument at each call. The compiled kernel that
    it returns is launched directly from then on, as in Triton's tutorial on a fused softmax. Which
    one that is depends on what is fixed here, and for each tensor on its dtype, its device and
    whether it begins at a multiple of 16 bytes. A descriptor's dtype and blocks are fixed.
    """

    def __init__(self, kernel: Any, programs: int, values: tuple[Any, ...], **options: Any) -> None:
        self.kernel, self.grid = kernel, (programs, 1, 1)
        self.values, self.options = values, options
        self.compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        key = tuple([_kind(t) if isinstance(t, Tensor) else None for t in tensors])
        launch = self.compiled.get(key)
        if launch is not None:
            launch(*tensors, *self.values)
            return
        compiled = self.kernel[self.grid](*tensors, *self.values, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self.compiled[key] = compiled[self.grid]


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.dtype, t.data_ptr() % 16 == 0, t.get_device()
