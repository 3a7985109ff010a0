# SPDX-License-Identifier: Apache-2.0
"""Gain and bias of the channels of a normalised input."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.tensors import accumulate_dtype

WANTED = False, True  # a parameter's copies are the outputs of a linear layer that is all bias


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, plan: Plan, rows: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        plan.check("channel_norm", probe, len(parameters), parameters[0])
        ctx.save_for_backward(*plan.tensors())
        ctx.samples, ctx.plan = plan.samples(probe), plan.without_tensors()
        ctx.rows, ctx.channels = rows, parameters[0].numel()
        return tuple(p.repeat(rows) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dcopies: Tensor) -> tuple[Tensor | None, ...]:
        plan, B = ctx.plan.restored(ctx.saved_tensors), ctx.samples
        rows_a_sample = ctx.rows // max(B, 1)
        grads, found = [], []
        for i, dcopy in enumerate(dcopies):
            own = plan._replace(moments=plan.moments[i : i + 1])
            if plan.constants_P2 is not None:
                own = own._replace(constants_P2=plan.constants_P2[i : i + 1])
            g_BTC = dcopy.reshape(B, rows_a_sample, ctx.channels)
            a = own.linear_wgrad(g_BTC, g_BTC, WANTED, dcopy.dtype)
            _, grad, rows_M, _ = own.run(ops.linear_wgrad, a, WANTED)
            grads.append(grad)
            found.append(rows_M)
        return torch.stack(found, 1).flatten(0, 1), None, None, *grads


def spread(
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    probe: Tensor,
    plan: Plan = PLAIN,
) -> tuple[Tensor | None, Tensor | None]:
    """``weight.repeat(rows), bias.repeat(rows)`` whose backward fills ``probe``.

    The n rows [n, C, ...] of an input become the channels of one row [1, n · C, ...]. A norm layer
    of torch then takes a gain and a bias for each of them, whose gradients are those of the rows.
    ``plan`` is that of ``linear``. A parameter that is frozen, or None, has no row in the probe.

    >>> x, w = torch.randn(3, 4, 7), torch.ones(4, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gains, _ = gnsfast.functional.spread(w, None, 3, probe)
    >>> normed = torch.nn.functional.group_norm(x, 2)
    >>> (normed.view(12, 7) * gains[:, None]).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], normed.sum(2).square().sum(1), atol=1e-5)
    True
    """
    both = weight, bias
    trained = [p for p in both if p is not None and p.requires_grad]
    copies = iter(_Spread.apply(probe, plan, rows, *trained) if trained else ())
    spread_out = (
        None if p is None else next(copies) if p.requires_grad else p.repeat(rows) for p in both
    )
    return next(spread_out), next(spread_out)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        mean_NC: Tensor,
        rstd_NC: Tensor,
        w: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, mean_NC, rstd_NC)
        ctx.dtypes = [None if t is None else t.dtype for t in (w, b)]
        # Autograd forbids in-place operations on a view that a custom Function returns.
        out: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean_NC, rstd_NC = ctx.saved_tensors
        acc, dw, db = accumulate_dtype(x.dtype), None, None
        if ctx.needs_input_grad[4]:
            mean = mean_NC.to(acc).view(*mean_NC.shape, *(1,) * (x.ndim - 2))
            dw_NC = _over_positions(torch.sub(x, mean).mul_(dy), acc) * rstd_NC
            dw = dw_NC.flatten().to(ctx.dtypes[0])
        if ctx.needs_input_grad[5]:
            db = _over_positions(dy, acc).flatten().to(ctx.dtypes[1])
        return dy, None, None, None, dw, db


def _over_positions(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum [N, C] over the positions. (``t.sum(())`` would be the sum over the whole tensor.)"""
    return t.sum(tuple(range(2, t.ndim)), dtype=dtype) if t.ndim > 2 else t.to(dtype)


def attach_parameters(
    y: Tensor,
    x: Tensor,
    mean_NC: Tensor,
    rstd_NC: Tensor,
    weights: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """Return ``y`` = (x - mean) rstd w + b, which was computed without gradients of w and b. Its
    backward gives the gradients of each row to ``weights`` and ``biases`` [n · C]. The statistics
    are [n, C] or [1, C].

    >>> x, w = torch.randn(3, 4, 7), torch.ones(12, requires_grad=True)
    >>> zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    >>> gnsfast.functional.attach_parameters(x, x, zero, one, w, None).sum().backward()
    >>> torch.allclose(w.grad, x.sum(2).flatten())
    True
    """
    if weights is None and biases is None:
        return y
    out: Tensor = _Attach.apply(y, x, mean_NC, rstd_NC, weights, biases)
    return out
