# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops
from gnsfast.functional import _documents as documents
from gnsfast.functional._groups import Groups, by_group, group_inputs
from gnsfast.functional._samples import (
    Link,
    Metric,
    autocast_dtype,
    check_probe,
    metric_inputs,
    num_samples,
    samples_first,
    without_autocast,
)
from gnsfast.ops import dtensor
from gnsfast.tensors import accumulate_dtype, is_dtensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        probe: Tensor,
        dtype: torch.dtype | None,
        batch_dim: int,
        transposed: bool,
        input_blocks: int,
        starts: Tensor | None,
        metric_probe: Tensor | None,
        constants: Tensor | None,
        v_w: Tensor | None,
        v_b: Tensor | None,
        group_probe: Tensor | None,
        members: tuple[Tensor, ...] | None,
        *links: Tensor,
    ) -> Tensor:
        ctx.parameter_dtype = w.dtype
        if dtype is not None:
            w, b = w.to(dtype), b if b is None else b.to(dtype)
        _, need_w, need_b, *_ = ctx.needs_input_grad
        check_probe(probe, need_w * input_blocks + need_b)
        ctx.input_blocks = input_blocks
        if metric_probe is not None:
            check_probe(metric_probe, need_w + need_b)
        ctx.members = members
        saved = x if need_w else None, w, starts, constants, v_w, v_b
        ctx.save_for_backward(*saved, *links[::3])
        ctx.num_samples, ctx.batch_dim, ctx.transposed = num_samples(probe), batch_dim, transposed
        y = F.linear(x, w.t() if transposed else w, b)
        if not torch.compiler.is_compiling() and y._is_view():
            # With a bias torch returns a view, and no in-place operation may follow a Function's.
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, starts, constants, v_w, v_b, *link_ids = ctx.saved_tensors
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        dx, link_grads, metric_PB, group_PG = None, [], None, None
        with without_autocast(dy):
            if need_x:
                dx = dy @ (w.t() if ctx.transposed else w)
            samples = 1 if starts is not None else ctx.num_samples
            dy_BTO = samples_first(dy, samples, ctx.batch_dim)
            x_BTI = dy_BTO if x is None else samples_first(x, samples, ctx.batch_dim)
            ids_BS = torch.cat(link_ids, dim=1) if link_ids else None
            if starts is not None:
                x_NI, dy_NO = x_BTI[0], dy_BTO[0]
                documents.refuse_sharded(dy)
                dw, db, sqnorm_PB = ops.linear_wgrad_segments(
                    *(x_NI, dy_NO, starts, 1, need_w, need_b, ctx.transposed, ctx.parameter_dtype)
                )
                dw, db = (t[0] if len(t) else t for t in (dw, db))
                own = [documents.tied_rows(x_NI, dy_NO, ids[0], starts)[None] for ids in link_ids]
                rows = torch.cat(own, 1) if own else None
            elif ctx.members is not None:
                acc = accumulate_dtype(dy.dtype)
                flags = need_w, need_b, ctx.transposed, acc
                (dw, db), sqnorm_PB, group_PG = by_group(
                    lambda b: ops.linear_wgrad(x_BTI[b], dy_BTO[b], *flags),
                    *(ctx.members, dy_BTO, (need_w, need_b)),
                )
                dw, db = dw.to(ctx.parameter_dtype), db.to(ctx.parameter_dtype)
            elif constants is not None:
                dw, db, norms, rows = ops.linear_wgrad_metric(
                    *(x_BTI, dy_BTO, v_w, v_b, constants, ids_BS),
                    *(ctx.transposed, ctx.parameter_dtype),
                )
                sqnorm_PB, metric_PB = norms.chunk(2)
            elif link_ids:
                dw, db, sqnorm_PB, rows = ops.linear_wgrad_tied(
                    x_BTI, dy_BTO, ids_BS, need_b, ctx.parameter_dtype
                )
            elif ctx.input_blocks > 1 and need_w:
                # Blocks of columns are those of rows, the other way round.
                x_blocks = list(x_BTI.chunk(ctx.input_blocks, dim=2))
                dw_IO, _, sqnorm_PB = ops.in_projection_wgrad(
                    [dy_BTO] * len(x_blocks), x_blocks, True, False, ctx.parameter_dtype
                )
                dw = dw_IO.t().contiguous()
                _, db, row = ops.linear_wgrad(
                    x_BTI, dy_BTO, False, need_b, False, ctx.parameter_dtype
                )
                sqnorm_PB = torch.cat([sqnorm_PB, row])
            else:
                wgrad = dtensor.linear_wgrad if is_dtensor(dy) else ops.linear_wgrad
                dw, db, sqnorm_PB = wgrad(
                    x_BTI, dy_BTO, need_w, need_b, ctx.transposed, ctx.parameter_dtype
                )
            if link_ids:
                assert rows is not None
                for ids, rows_BSI in zip(link_ids, rows.split([i.shape[1] for i in link_ids], 1)):
                    link_grads += [None, rows_BSI, dw[ids].to(rows.dtype)]
        return (
            dx,
            dw if need_w else None,
            db if need_b else None,
            sqnorm_PB,
            *(None,) * 5,
            metric_PB,
            *(None,) * 3,
            group_PG,
            None,
            *link_grads,
        )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe: Tensor,
    *,
    batch_dim: int = 0,
    transposed: bool = False,
    input_blocks: int = 1,
    starts: Tensor | None = None,
    links: tuple[Link, ...] = (),
    metric: Metric | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """``torch.nn.functional.linear(x, weight, bias)`` whose backward fills ``probe``.

    Equals ``F.linear(x, weight, bias)``; sample b's norm is that of ``autograd.grad`` of its own
    loss term.

    Args:
        x: [B, ..., in_features], or [T, B, in_features] with ``batch_dim=1``. Rows may be k · B:
            then k consecutive rows are one sample.
        weight: [out_features, in_features], or [in_features, out_features] when ``transposed``.
        bias: [out_features] or None.
        probe: float32 zeros [P, B + 2], P = number of trainable ones of (weight, bias).
        input_blocks: heads along ``in_features``, each with a row of the probe for the weight's.
        starts: [B + 1], where samples are documents: all rows of ``x`` as one list, document b
            from ``starts[b]`` to ``starts[b + 1]`` (FlashAttention's ``cu_seqlens``); all rows
            are some document's.
        links: earlier embeddings that share ``weight``.
        metric: a second probe, for norms under a metric; not with ``input_blocks`` or ``starts``.
        groups: a second probe, for norms of groups of samples; not with ``links``.

    The squared norms carry the scale of the loss: a mean over B samples scales them by 1 / B².
    Raises ValueError for a probe of another shape, and for links to a ``transposed`` weight.
    Source: Goodfellow 2015 (arXiv 1510.01799), eq. for a fully connected layer, summed over tokens.

    >>> x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.linear(x, w, None, probe).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], 2 * x.square().sum(1))
    True
    """
    if transposed and links:
        raise ValueError("links belong to a weight [out_features, in_features], not transposed")
    dtype = autocast_dtype(x)
    if dtype is not None and x.is_floating_point():
        x = x.to(dtype)
    if metric is not None and input_blocks > 1:
        raise ValueError("a weight in input_blocks has no norms under a metric")
    flat = [t for link in links for t in link]
    y: Tensor = _Linear.apply(
        *(x, weight, bias, probe, dtype, batch_dim, transposed, input_blocks, starts),
        *metric_inputs(metric, starts, weight, bias),
        *group_inputs(groups, probe, metric, starts is not None, links, input_blocks > 1),
        *flat,
    )
    return y
