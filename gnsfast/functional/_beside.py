# SPDX-License-Identifier: Apache-2.0
"""Norms beside torch's own function: the output is torch's, and so is every gradient.

Torch's function takes the parameter itself, and autograd records it as without gnsfast. A layer of
ours whose plan asks for ``norms_alone`` gives a stand-in for the output, which has no memory. Both
become one tensor here. In backward its gradient goes on unchanged to both: torch's function makes
the gradients of it, and our layer the rows of its probe and nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from gnsfast.functional._autocast import graphs_of_gradients
from gnsfast.torch_internals import unsafe_view


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, stand_in: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if not torch.compiler.is_compiling():
            graphs_of_gradients[0] += torch.is_grad_enabled()
        return dy, dy


def passed_on(y: Tensor) -> Tensor:
    """A new tensor with the memory of ``y``, which a custom Function may return: autograd forbids
    in-place operations on a view that it returns.
    """
    if torch.compiler.is_compiling():
        viewed: Tensor = unsafe_view(y, y.shape)
        return viewed
    return y.data


def stand_in(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape, in the dtype of ``like``, without memory."""
    return like.new_zeros(()).expand(shape)


beside: Any = _Beside.apply
"""``beside(y, stand_in)`` is ``y``, whose gradient both get."""
