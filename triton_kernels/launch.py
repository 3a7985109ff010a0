# SPDX-License-Identifier: Apache-2.0
"""Launches that are repeated: the work of the host is done once."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Argument = Tensor | tuple[Tensor, ...] | TensorDescriptor | None


class Launch:
    """A kernel with all fixed but its tensors, and tuples of them, which are its first arguments.

    ``kernel[grid](...)`` binds and classifies every argument at each call. The compiled kernel that
    it returns is launched directly from then on, as in Triton's tutorial on a fused softmax. Which
    one that is depends on what is fixed here, and for each tensor on its dtype, its device and
    whether it begins at a multiple of 16 bytes. A descriptor's dtype and blocks are fixed.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], values: tuple[Any, ...], **options: Any
    ) -> None:
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.values, self.options = values, known(options)
        self.compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, *tensors: Argument) -> None:
        key = tuple([_kind(t) for t in tensors])
        launch = self.compiled.get(key)
        if launch is not None:
            launch(*tensors, *self.values)
            return
        compiled = self.kernel[self.grid](*tensors, *self.values, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self.compiled[key] = compiled[self.grid]


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Without ``maxnreg`` where it is None, and on an AMD device, which does not know it."""
    most = None if torch.version.hip else options.get("maxnreg")
    return {name: of for name, of in options.items() if name != "maxnreg" or most is not None}


def _kind(t: Argument) -> object:
    if isinstance(t, Tensor):
        return t.dtype, t.data_ptr() % 16 == 0, t.get_device()
    return tuple([_kind(each) for each in t]) if isinstance(t, tuple) else None
