# SPDX-License-Identifier: Apache-2.0
"""Gain and bias of the channels of a normalised input, as in group norm, instance norm and batch
norm with running statistics.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.tensors import accumulate_dtype
from gnsfast.torch_internals import unsafe_view

CACHED = 1 << 16
"""The most numbers that are normalised at a time on a CPU."""

AS_BIAS = False, True
"""A gradient of each sample is that of the bias of a linear layer."""


class _ChannelNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        normalised: Callable[[Tensor], Tensor],
    ) -> Tensor:
        plan.check("channel_norm", probe, sum(ctx.needs_input_grad[2:4]), w)
        ctx.save_for_backward(x, *plan.tensors())
        ctx.plan, ctx.samples = plan.without_tensors(), plan.samples(probe)
        ctx.normalised, ctx.dtypes = normalised, [None if t is None else t.dtype for t in (w, b)]
        # Autograd forbids in-place operations on a view that a custom Function returns.
        out: Tensor = unsafe_view(y, y.shape)
        return out

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = tensors
        plan, (need_w, need_b) = ctx.plan.restored(saved), ctx.needs_input_grad[2:4]
        acc = accumulate_dtype(x.dtype)
        grads_of: list[Tensor] = []
        if need_w:
            grads_of.append(torch.cat([_gains(*some, ctx.normalised) for some in _parts(x, dy)]))
        if need_b:
            grads_of.append(_of_rows(dy))
        grads, rows = [], []
        for k, g_NC in enumerate(grads_of):
            plan_k = plan.of(k)
            B, (N, C) = ctx.samples, g_NC.shape
            g_BTC = g_NC.reshape(B, N // max(B, 1), C)
            a = plan_k.linear_wgrad(g_BTC, g_BTC, AS_BIAS, acc)
            _, grad, row, _ = plan_k.run(ops.linear_wgrad, a, AS_BIAS)
            grads.append(grad)
            rows.append(row)
        iterator = iter(grads)
        dw, db = (
            next(iterator).to(dtype) if need and not plan.norms_alone else None
            for need, dtype in zip((need_w, need_b), ctx.dtypes)
        )
        return dy, None, dw, db, torch.cat(rows), None, None


def _parts(x: Tensor, dy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Some rows of both at a time: on a CPU, new memory for all takes longer than the sums. One
    graph of ``torch.compile`` takes any number of rows.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return ((x, dy),)
    rows = max(1, CACHED // max(1, x.shape[1:].numel()))
    return zip(x.split(rows), dy.split(rows))


def _gains(x: Tensor, dy: Tensor, normalised: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient [N, C] of the gain in each row."""
    acc = accumulate_dtype(x.dtype)
    return _of_rows(dy.to(acc) * normalised(x.to(acc, memory_format=torch.contiguous_format)))


def _of_rows(t: Tensor) -> Tensor:
    """The sum [N, C] over the positions. (``t.sum(())`` would be the sum over the whole tensor.)"""
    acc = accumulate_dtype(t.dtype)
    return t.sum(tuple(range(2, t.ndim)), dtype=acc) if t.ndim > 2 else t.to(acc)


def channel_norm(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    normalised: Callable[[Tensor], Tensor],
) -> Tensor:
    """``y``, which is ``normalised(x) * weight + bias`` for each channel and was computed with
    ``weight.detach()`` and ``bias.detach()``. Its backward gives their gradients and fills
    ``probe``. ``plan`` is that of ``linear``; x is [n, C, ...], with n / B rows for each sample.

    >>> x, w = torch.randn(3, 4, 7), torch.ones(4, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> normalised = lambda t: torch.nn.functional.group_norm(t, 2)
    >>> y = normalised(x)
    >>> z = gnsfast.functional.channel_norm(y, x, w, None, probe, normalised=normalised)
    >>> z.sum().backward()
    >>> torch.allclose(probe.grad[0, :3], normalised(x).sum(2).square().sum(1), atol=1e-5)
    True
    """
    out: Tensor = _ChannelNorm.apply(y, x, weight, bias, probe, plan, normalised)
    return out
