# SPDX-License-Identifier: Apache-2.0
"""Parameters that meet the data element by element: gains, biases, tables, class tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast.following.layouts import Chosen, Layout, Owned
from gnsfast.following.leaf import Expression
from gnsfast.following.sample_gradients import Dense, is_wanted, leave, reduced
from gnsfast.functional import Plan
from gnsfast.tensors import accumulate_dtype


class _Spread(torch.autograd.Function):
    """``e.expand(shape)``, whose backward adds up the gradient over all but the samples."""

    @staticmethod
    def forward(
        ctx: Any,
        e: Tensor,
        probe: Tensor,
        plan: Plan,
        shape: torch.Size,
        layout: Layout | Chosen | Owned,
        expression: Expression | None,
        rows: int,
    ) -> Tensor:
        ctx.own, ctx.dtype, ctx.device = e.shape, e.dtype, e.device
        ctx.samples = plan.samples(probe)
        if expression is not None and expression.is_parted:
            plan = Plan(starts=plan.starts)
        ctx.plan, ctx.layout, ctx.expression = plan.without_tensors(), layout, expression
        ctx.use, ctx.shape = None if expression is None else object(), probe.shape
        ctx.rows = rows or 1
        ctx.save_for_backward(*plan.tensors())
        return e.detach().expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan.restored(ctx.saved_tensors)
        if plan.starts is None:
            g_BTP = of_samples(g, ctx.own, ctx.layout, ctx.samples)
        else:
            g_BTP = of_tokens(ctx.layout.samples_first(g, ctx.rows), ctx.own)
        total, rows = reduced(g_BTP, plan, ctx.dtype)
        if ctx.expression is not None and ctx.expression.is_parted:
            starts = plan.starts
            if is_wanted([ctx.expression]):
                leave(ctx.expression, Dense(lambda b: _of_one(g_BTP, starts, b)), ctx.use)
            rows = rows.new_zeros(ctx.shape)
        return total.reshape(ctx.own), rows, None, None, None, None, None


def of_samples(g: Tensor, own: torch.Size, layout: Layout | Chosen | Owned, B: int) -> Tensor:
    """The gradient ``g`` of a tensor of shape ``own`` that was broadcast to that of ``g``, as
    [B, T, elements]: the sum over T is the gradient of a sample.
    """
    if isinstance(layout, Owned):
        g_BTP = g.new_zeros(B, 1, own.numel(), dtype=accumulate_dtype(g.dtype))
        for b in layout.owner.unique().tolist():
            g_BTP[b, 0] = (
                g.masked_fill(layout.owner != b, 0.0).to(g_BTP.dtype).sum_to_size(own).flatten()
            )
        return g_BTP
    wide = (1,) * (g.ndim - len(own)) + tuple(own)
    if isinstance(layout, Layout) and layout.dim < g.ndim - 1 and wide[:-1] == (1,) * (g.ndim - 1):
        if wide[-1] > 1:  # the operator adds up the tokens
            F = g.shape[-1]
            return layout.samples_first(g, B).reshape(B, g.numel() // max(B * F, 1), F)
    acc = accumulate_dtype(g.dtype)
    d = layout.dim if isinstance(layout, Layout) else 0
    dims = [i for i in range(g.ndim) if wide[i] == 1 and i != d]
    g = g.sum(dims, keepdim=True, dtype=acc) if dims else g.to(acc)
    if isinstance(layout, Chosen):
        g_B = g.new_zeros(B, *g.shape[1:]).index_add_(0, layout.owner_N, g)
        return g_B.reshape(B, 1, own.numel())
    P = own.numel()
    return layout.samples_first(g, B).reshape(B, g.numel() // max(B * P, 1), P)


def of_tokens(g: Tensor, own: torch.Size) -> Tensor:
    """The same for packed documents, of which ``g`` begins with the tokens, as [N, elements] with a
    row, or several, for each token.
    """
    lead = g.ndim - len(own)
    wide = (1,) * lead + tuple(own)
    first = next((i for i, size in enumerate(wide) if size != 1), g.ndim)
    rest = [i for i in range(first, g.ndim) if wide[i] == 1]
    acc = accumulate_dtype(g.dtype)
    g = g.sum(rest, keepdim=True, dtype=acc) if rest else g
    return g.reshape(-1, own.numel())


def _of_one(g: Tensor, starts: Tensor | None, b: int) -> Tensor:
    """Sample b's gradient."""
    if starts is None:
        return g[b].sum(0, dtype=accumulate_dtype(g.dtype))
    start, end = (int(n) for n in starts[b : b + 2])
    return g[start:end].sum(0, dtype=accumulate_dtype(g.dtype))


def spread(
    e: Tensor,
    probe: Tensor,
    plan: Plan,
    shape: torch.Size,
    layout: Layout | Chosen | Owned,
    expression: Expression | None,
    rows: int,
) -> Tensor:
    """``e.expand(shape)`` whose backward fills ``probe``; in ``shape`` the samples, or the ``rows``
    of packed documents, lie as ``layout`` says. ``expression`` says in backward whether the norms
    are joined with others.
    """
    y: Tensor = _Spread.apply(e, probe, plan, shape, layout, expression, rows)
    return y
