# SPDX-License-Identifier: Apache-2.0
"""Convolutions, plain and transposed."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast import ops
from gnsfast.functional._autocast import autocast_dtype, backward_pass, cast_like
from gnsfast.functional._beside import stand_in
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import ConvWgrad

CONVS: Any = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        output_padding: list[int] | None,
        *geometry: Any,
    ) -> Tensor:
        plan.check("conv", probe, sum(ctx.needs_input_grad[1:3]), w)
        ctx.parameter_dtype = w.dtype
        ctx.kernel = list(w.shape[2:])
        y: Tensor
        if plan.norms_alone:
            y = stand_in(x, *_shape(x, w, geometry, output_padding))
        else:
            w, b = cast_like(x, w, b)
            y = _convolved(x, w, b, geometry, output_padding)
        ctx.save_for_backward(x, w if ctx.needs_input_grad[0] else None)
        ctx.samples, ctx.plan = plan.samples(probe), plan
        ctx.geometry, ctx.output_padding = geometry, output_padding
        return y

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = tensors
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        stride, padding, dilation, groups = ctx.geometry
        transposed, dx = ctx.output_padding is not None, None
        if need_x:
            added = ctx.output_padding if transposed else [0] * len(stride)
            dx, _, _ = torch.ops.aten.convolution_backward(
                *(dy, x, w, None, stride, padding, dilation, transposed, added),
                *(groups, [True, False, False]),
            )
        last: Any = *ctx.geometry, need_w, need_b, ctx.parameter_dtype
        a = ConvWgrad(x, dy, ctx.samples, ctx.kernel, *last)
        wgrad: Any = ops.conv_wgrad
        if transposed:
            wgrad = partial(_transposed_wgrad, output_padding=ctx.output_padding)
        dw, db, rows = ctx.plan.run(wgrad, a, (need_w, need_b))
        return dx, *ctx.plan.gradients((need_w, need_b), dw, db), rows, *(None,) * 6


def _convolved(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Any, added: list[int] | None
) -> Tensor:
    """The output, of a transposed convolution if an output padding is ``added``."""
    y: Tensor
    if added is None:
        y = CONVS[w.ndim - 3](x, w, b, *geometry)
    else:
        stride, padding, dilation, groups = geometry
        y = TRANSPOSED[w.ndim - 3](x, w, b, stride, padding, added, groups, dilation)
    return y


def _shape(x: Tensor, w: Tensor, geometry: Any, added: list[int] | None) -> tuple[int, ...]:
    """The shape of the output."""
    stride, padding, dilation, groups = geometry
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:])]
    sizes = zip(x.shape[2:], stride, padding, reach)
    if added is None:
        return len(x), len(w), *((n + 2 * p - r - 1) // s + 1 for n, s, p, r in sizes)
    own = [(n - 1) * s - 2 * p + r + a + 1 for (n, s, p, r), a in zip(sizes, added)]
    return len(x), w.shape[1] * groups, *own


def _transposed_wgrad(
    a: ConvWgrad, output_padding: list[int]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """``conv_wgrad`` of a transposed convolution. Its weight's gradient is that of a convolution
    from dy to x.
    """
    dw, db, rows = None, None, []
    if a.weight:
        dy, padding = a.dy, a.padding
        if any(o >= s for o, s in zip(output_padding, a.stride)):  # it would have more patches
            edges = [(p, p - o) for p, o in zip(padding, output_padding)]
            dy = F.pad(dy, [p for edge in reversed(edges) for p in edge])
            padding = [0] * len(padding)
        dw, _, row = ops.conv_wgrad(a._replace(x=dy, dy=a.x, padding=padding, bias=False))
        rows.append(row)
    if a.bias:
        _, db, row = ops.conv_wgrad(a._replace(x=a.dy, weight=False))
        rows.append(row)
    return dw, db, torch.cat(rows)


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
    output_padding: tuple[int, ...] | None = None,
) -> Tensor:
    """``torch.nn.functional.conv1d``, ``conv2d`` or ``conv3d``, as the weight's dimensions say,
    with a backward that fills ``probe``. With an ``output_padding``, which may be zeros, it is
    ``conv_transpose1d``, ``conv_transpose2d`` or ``conv_transpose3d``.

    >>> x, w = torch.randn(3, 2, 8), torch.randn(4, 2, 3, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> one = dict(stride=(1,), padding=(0,), dilation=(1,))
    >>> gnsfast.functional.conv(x, w, None, probe, **one).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], 4 * x.unfold(2, 3, 1).sum(2).square().sum((1, 2)))
    True
    """
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    added = None if output_padding is None else list(output_padding)
    geometry = list(stride), list(padding), list(dilation), groups
    y: Tensor = _Conv.apply(x, weight, bias, probe, plan, added, *geometry)
    return y
