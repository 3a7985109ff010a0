# SPDX-License-Identifier: Apache-2.0
"""Query, key and value projections of an attention layer, and rows appended to keys and values."""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops
from gnsfast.functional._samples import (
    autocast_dtype,
    check_probe,
    num_samples,
    samples_first,
    without_autocast,
)


class _InProjection(torch.autograd.Function):
    """``tensors`` are the weights, one [3 E, I] or three, then the inputs; ``sources`` says which
    input is the query, the key and the value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        b: Tensor | None,
        probe: Tensor,
        dtype: torch.dtype | None,
        batch_dim: int,
        sources: tuple[int, ...],
        blocks: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        n = len(tensors) - max(sources) - 1
        need_b, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[6 : 6 + n]
        check_probe(probe, 3 * blocks // n * sum(need_w) + 3 * blocks * need_b)
        ctx.parameter_dtype = tensors[0].dtype
        if dtype is not None:
            tensors = tuple(t.to(dtype) for t in tensors)
            b = b if b is None else b.to(dtype)
        weights, xs = tensors[:n], tensors[n:]
        ctx.save_for_backward(*weights, *(xs if any(need_w) else ()))
        ctx.num_weights, ctx.sources, ctx.blocks = n, sources, blocks
        ctx.num_samples, ctx.batch_dim = num_samples(probe), batch_dim
        if n == 3:
            biases = (None, None, None) if b is None else b.chunk(3)
            return tuple(F.linear(xs[s], w, c) for s, w, c in zip(sources, weights, biases))
        E = len(weights[0]) // 3
        outputs: list[Tensor] = []
        for source, run in groupby(range(3), key=sources.__getitem__):  # one product for a run
            same = list(run)
            rows = slice(same[0] * E, (same[-1] + 1) * E)
            y = F.linear(xs[source], weights[0][rows], None if b is None else b[rows])
            outputs += y.split(E, dim=-1)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        n, dtype = ctx.num_weights, ctx.parameter_dtype
        saved = ctx.saved_tensors  # checkpointing lets them be read once
        weights, xs = saved[:n], saved[n:]
        need_b, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[6 : 6 + n]
        need_x = ctx.needs_input_grad[6 + n :]
        with without_autocast(dys[0]):
            each = weights if n == 3 else weights[0].chunk(3)
            uses = [[i for i in range(3) if ctx.sources[i] == s] for s in range(len(need_x))]
            dxs = [
                _input_grad([dys[i] for i in use], [each[i] for i in use]) if need else None
                for use, need in zip(uses, need_x)
            ]
            x_BTI: list[Tensor] = []
            dy_BTO: list[Tensor] = []
            for dy, s in zip(dys, ctx.sources):
                whole = samples_first(dy, ctx.num_samples, ctx.batch_dim)
                x = samples_first(xs[s], ctx.num_samples, ctx.batch_dim) if xs else whole
                x_BTI += [x] * ctx.blocks
                dy_BTO += whole.chunk(ctx.blocks, dim=2)
            size = len(dy_BTO) // n
            parts = [
                ops.in_projection_wgrad(
                    x_BTI[i * size : (i + 1) * size],
                    dy_BTO[i * size : (i + 1) * size],
                    *(need, need_b, dtype),
                )
                for i, need in enumerate(need_w)
            ]
            dws, dbs, rows = zip(*parts)
            sqnorms = [r[:size] for r, need in zip(rows, need_w) if need]
            sqnorms += [r[-size:] for r in rows if need_b]
            sqnorm_PB = torch.cat(sqnorms)
        return (
            torch.cat(dbs) if need_b else None,
            *(sqnorm_PB, None, None, None, None),
            *(dw if need else None for dw, need in zip(dws, need_w)),
            *dxs,
        )


def _input_grad(dys: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Σ dy W, each dy as it lies."""
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
    *,
    batch_dim: int = 0,
    blocks: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value projections of an attention layer, whose backward fills ``probe``.

    Equals ``F.linear(t, w, b)`` for the three (t, w, b) of (query, key, value), ``weight`` and
    ``bias.chunk(3)``. What is one tensor is multiplied once; in backward the three gradients go to
    the weight's as they lie.

    Args:
        query, key, value: [B, ..., features], or [T, B, features] with ``batch_dim=1``.
        weight: [3 E, features], or three weights [E, features of its input].
        bias: [3 E] or None.
        blocks: heads, of which query, key and value each have so many, to look at by themselves.
        probe: float32 zeros [P, B + 2], a row for each block: ``blocks`` of the query's weight, of
            the key's, of the value's, then of the three biases; none for what is frozen.

    The squared norms carry the scale of the loss, as those of ``linear``; a packed weight's is the
    sum of its blocks'. Raises ValueError for a probe of another shape.
    Source: Goodfellow 2015 (arXiv 1510.01799), for each block.

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
    dtype = autocast_dtype(query)
    q, k, v = _InProjection.apply(bias, probe, dtype, batch_dim, sources, blocks, *weights, *xs)
    return q, k, v


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, probe: Tensor, rows: int, batch_dim: int) -> Tensor:
        check_probe(probe, 1)
        ctx.num_samples, ctx.batch_dim = num_samples(probe), batch_dim
        ctx.parameter_dtype = p.dtype
        return p.repeat(1, rows, 1) if batch_dim else p.repeat(rows, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy_BTO = samples_first(dy, ctx.num_samples, ctx.batch_dim)
        _, db, row = ops.linear_wgrad(dy_BTO, dy_BTO, False, True, False, ctx.parameter_dtype)
        return db[None, None], row, None, None


def repeated(parameter: Tensor, probe: Tensor, rows: int, *, batch_dim: int = 0) -> Tensor:
    """``parameter`` [1, 1, E] once for each of ``rows`` rows, as an attention layer appends it to
    its keys; backward fills ``probe``.

    Equals ``parameter.expand(rows, 1, E)``, or [1, rows, E] with ``batch_dim=1``.

    >>> p = torch.ones(1, 1, 4, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.repeated(p, probe, 3).sum().backward()
    >>> probe.grad[0, :4]
    tensor([ 4.,  4.,  4., 36.])
    """
    y: Tensor = _Repeated.apply(parameter, probe, rows, batch_dim)
    return y
