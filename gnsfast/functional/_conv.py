# SPDX-License-Identifier: Apache-2.0
"""Convolutions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops
from gnsfast.functional._autocast import autocast_dtype, cast_like, without_autocast
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import ConvWgrad


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        *geometry: Any,
    ) -> Tensor:
        plan.check("conv", probe, sum(ctx.needs_input_grad[1:3]), w)
        ctx.parameter_dtype = w.dtype
        w, b = cast_like(x, w, b)
        ctx.save_for_backward(x, w)
        ctx.samples, ctx.plan, ctx.geometry = plan.samples(probe), plan, geometry
        conv = F.conv1d if w.ndim == 3 else F.conv2d
        y: Tensor = conv(x, w, b, *geometry)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        stride, padding, dilation, groups = ctx.geometry
        dx = None
        with without_autocast(dy):
            if need_x:
                dx, _, _ = torch.ops.aten.convolution_backward(
                    *(dy, x, w, None, stride, padding, dilation, False),
                    *([0] * len(stride), groups, [True, False, False]),
                )
            last: Any = *ctx.geometry, need_w, need_b, ctx.parameter_dtype
            a = ConvWgrad(x, dy, ctx.samples, list(w.shape[2:]), *last)
            dw, db, rows = ctx.plan.run(ops.conv_wgrad, a, (need_w, need_b))
        return dx, dw if need_w else None, db if need_b else None, rows, *(None,) * 5


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv1d`` or ``conv2d`` (by the number of the weight's dimensions) whose
    backward fills ``probe``.

    >>> x, w = torch.randn(3, 2, 8), torch.randn(4, 2, 3, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> one = dict(stride=(1,), padding=(0,), dilation=(1,))
    >>> gnsfast.functional.conv(x, w, None, probe, **one).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], 4 * x.unfold(2, 3, 1).sum(2).square().sum((1, 2)))
    True
    """
    if plan.calls is not None:
        probe, weight, bias = plan.calls.enter("conv", plan, (probe, weight, bias))
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    geometry = list(stride), list(padding), list(dilation), groups
    y: Tensor = _Conv.apply(x, weight, bias, probe, plan, *geometry)
    return y
