# SPDX-License-Identifier: Apache-2.0
"""The query, key and value projections of an attention layer."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass, cast_like
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import InProjectionWgrad


class _InProjection(torch.autograd.Function):
    """``tensors`` are the weights, one [3 E, I] or three, then the distinct inputs. ``sources``
    holds the index of the input that is the query, the key and the value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        sources: tuple[int, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        n = len(tensors) - max(sources) - 1
        need_b, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[4 : 4 + n]
        plan.check("in_projection", probe, 3 // n * sum(need_w) + 3 * need_b)
        ctx.parameter_dtype = tensors[0].dtype
        b, *tensors = cast_like(tensors[n], b, *tensors)  # type: ignore[assignment]
        weights, xs = tensors[:n], tensors[n:]
        saved = xs if any(need_w) else ()
        ctx.save_for_backward(*weights, *saved, *plan.tensors())
        ctx.num_weights, ctx.num_inputs, ctx.sources = n, len(saved), sources
        ctx.samples, ctx.plan = plan.samples(probe), plan.without_tensors()
        if n == 3:
            biases = (None, None, None) if b is None else b.chunk(3)
            return tuple(torch_linear(xs[s], w, c) for s, w, c in zip(sources, weights, biases))
        E = len(weights[0]) // 3
        outputs: list[Tensor] = []
        for source, run in groupby(range(3), key=sources.__getitem__):  # one product for a run
            same = list(run)
            rows = slice(same[0] * E, (same[-1] + 1) * E)
            y = torch_linear(xs[source], weights[0][rows], None if b is None else b[rows])
            outputs += y.split(E, dim=-1)
        return tuple(outputs)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        n, dtype = ctx.num_weights, ctx.parameter_dtype
        weights, xs, saved = (
            tensors[:n],
            tensors[n:][: ctx.num_inputs],
            tensors[n + ctx.num_inputs :],
        )
        plan = ctx.plan.restored(saved)
        need_b, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[4 : 4 + n]
        need_x = ctx.needs_input_grad[4 + n :]
        each = weights if n == 3 else weights[0].chunk(3)
        uses = [[i for i in range(3) if ctx.sources[i] == s] for s in range(len(need_x))]
        dxs = [
            _input_grad([dys[i] for i in use], [each[i] for i in use]) if need else None
            for use, need in zip(uses, need_x)
        ]
        dy_BTO = [plan.rows(dy, ctx.samples) for dy in dys]
        x_BTI = [plan.rows(xs[s], ctx.samples) for s in ctx.sources] if xs else dy_BTO
        size = 3 // n
        parts = [
            _wgrad(plan, x_BTI[i : i + size], dy_BTO[i : i + size], need, need_b, dtype)
            for i, need in zip(range(0, 3, size), need_w)
        ]
        dws, dbs, rows = zip(*parts)
        of_weights = [r[:size] for r, need in zip(rows, need_w) if need]
        of_biases = [r[-size:] for r in rows if need_b]
        return (
            torch.cat(dbs) if need_b else None,
            *(torch.cat([*of_weights, *of_biases]), None, None),
            *(dw if need else None for dw, need in zip(dws, need_w)),
            *dxs,
        )


def _wgrad(
    plan: Plan,
    xs: list[Tensor],
    dys: list[Tensor],
    weight: bool,
    bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The results of ``in_projection_wgrad``; for documents by the operator of linear layers."""
    if plan.starts is None:
        found: tuple[Tensor, ...]
        found = ops.in_projection_wgrad(InProjectionWgrad(xs, dys, weight, bias, dtype))
        return found
    wanted = weight, bias
    each = [ops.linear_wgrad(plan.linear_wgrad(*t, wanted, dtype)) for t in zip(xs, dys)]
    dws, dbs, rows, _ = zip(*each)
    return torch.cat(dws), torch.cat(dbs), torch.stack(rows, 1).flatten(0, 1)


def _input_grad(dys: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Σ dy W, without copying the dy into one tensor."""
    dx = dys[0] @ weights[0]
    for dy, w in zip(dys[1:], weights[1:]):
        dx.view(-1, dx.shape[-1]).addmm_(dy.flatten(0, -2), w)
    return dx


def in_projection(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value projections of an attention layer, whose backward fills ``probe``.

    It equals ``F.linear(t, w, b)`` for the three (t, w, b) of (query, key, value), ``weight`` and
    ``bias.chunk(3)``. Neighbours that are the same tensor are multiplied once. Backward reads the
    three output gradients where they are, without copying them into one tensor.

    Args:
        query, key, value: [B, ..., features], or [T, B, features] with ``plan.batch_dim`` 1.
        weight: [3 E, features], or three weights [E, features of its input].
        bias: [3 E] or None.
        probe: float32 zeros [P, B + 2]: rows for the weight of the query, the key and the value,
            then for the three biases. A frozen parameter has none.
        plan: says which dimension holds the samples, or where documents begin.

    The squared norms scale with the loss, as in ``linear``. That of a packed weight is the sum of
    its three rows. Raises ValueError for a probe of another shape.
    Source: Goodfellow 2015 (arXiv 1510.01799), for each of the three.

    >>> x, w = torch.randn(3, 7, 4), torch.randn(12, 4, requires_grad=True)
    >>> probe = torch.zeros(3, 3 + 2, requires_grad=True)
    >>> q, k, v = gnsfast.functional.in_projection(x, x, x, w, None, probe)
    >>> (q * k + v).sum().backward()
    >>> torch.allclose(probe.grad[:, 3].sum(), w.grad.square().sum())
    True
    """
    xs = list({id(t): t for t in (query, key, value)}.values())
    sources = tuple(next(i for i, x in enumerate(xs) if x is t) for t in (query, key, value))
    weights = (weight,) if isinstance(weight, Tensor) else weight
    q, k, v = _InProjection.apply(bias, probe, plan, sources, *weights, *xs)
    return q, k, v
