# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops, reference
from gnsfast.functional import _documents as documents
from gnsfast.functional._groups import Groups, by_group, group_inputs
from gnsfast.functional._samples import (
    Metric,
    check_probe,
    metric_inputs,
    num_samples,
    samples_back,
    samples_first,
    without_autocast,
)
from gnsfast.ops import dtensor
from gnsfast.tensors import accumulate_dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        probe: Tensor,
        shape: list[int],
        eps: float,
        batch_dim: int,
        starts: Tensor | None,
        metric_probe: Tensor | None,
        constants: Tensor | None,
        v_w: Tensor | None,
        v_b: Tensor | None,
        group_probe: Tensor | None,
        members: tuple[Tensor, ...] | None,
    ) -> Tensor:
        for rows in (probe,) if metric_probe is None else (probe, metric_probe):
            check_probe(rows, sum(ctx.needs_input_grad[1:3]))
        y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd, starts, constants, v_w, v_b)
        ctx.members = members
        ctx.num_samples, ctx.batch_dim, ctx.shape = num_samples(probe), batch_dim, shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, mean, rstd, starts, constants, v_w, v_b = ctx.saved_tensors
        _, need_w, need_b, *_ = ctx.needs_input_grad

        def rows(t: Tensor) -> Tensor:
            t = t.flatten(-len(ctx.shape))
            if starts is not None:
                return documents.rows_of(t)
            return samples_first(t, ctx.num_samples, ctx.batch_dim)

        backward = layer_norm_backward if torch.compiler.is_compiling() else ops.layer_norm_backward
        more: tuple[Tensor, ...] = ()
        if starts is not None:
            documents.refuse_sharded(dy)
            backward, more = layer_norm_backward, (starts,)
        with without_autocast(dy):
            flat_w, flat_b = (t if t is None else t.flatten() for t in (w, b))
            taken = (
                rows(dy),
                rows(x),
                *(rows(mean).contiguous(), rows(rstd).contiguous()),  # torch's kernel assumes it
                *(flat_w, flat_b),
            )
            metric_PB = group_PG = None
            if ctx.members is not None:
                dx = taken[1].new_empty(taken[1].shape)

                def run(b: Tensor) -> tuple[Tensor, ...]:
                    own = (t[b] for t in taken[:4])
                    dx[b], *rest = ops.layer_norm_backward(*own, *taken[4:], need_w, need_b)
                    return tuple(rest)

                (dw, db), sqnorm_PB, group_PG = by_group(
                    run, ctx.members, taken[0], (need_w, need_b)
                )
                dw, db = (g if p is None else g.to(p.dtype) for g, p in ((dw, w), (db, b)))
            elif constants is None:
                dx, dw, db, sqnorm_PB = dtensor.replicated(backward)(*taken, need_w, need_b, *more)
            else:
                dx, dw, db, norms = ops.norm_backward_metric(*taken, v_w, v_b, constants, 0.0, 0.0)
                sqnorm_PB, metric_PB = norms.chunk(2)
        flat_shape = x.flatten(-len(ctx.shape)).shape
        return (
            samples_back(dx, flat_shape, ctx.batch_dim).reshape(x.shape),
            dw.reshape(ctx.shape) if need_w else None,
            db.reshape(ctx.shape) if need_b else None,
            sqnorm_PB,
            *(None, None, None, None, metric_PB, None, None, None, group_PG, None),
        )


def layer_norm_backward(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    w_N: Tensor | None,
    b_N: Tensor | None,
    weight: bool,
    bias: bool,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ops.layer_norm_backward`` as plain aten, which Inductor can fuse; with ``starts`` of
    documents, whose rows are [rows, N].
    """
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        dy_BTN, x_BTN, [x_BTN.shape[-1]], mean_BT1, rstd_BT1, w_N, b_N, [True, False, False]
    )
    acc = accumulate_dtype(x_BTN.dtype)

    def of_samples(t: Tensor) -> Tensor:
        return t.sum(1, dtype=acc) if starts is None else ops.segment_sums(t, starts)

    dw_BN = db_BN = None
    if weight:
        dw_BN = of_samples((x_BTN.to(acc) - mean_BT1) * rstd_BT1 * dy_BTN)
    if bias:
        db_BN = of_samples(dy_BTN)
    return dx, *reference.affine_wgrad(dw_BN, db_BN, w_N, b_N)


def layer_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    probe: Tensor,
    *,
    eps: float = 1e-5,
    batch_dim: int = 0,
    starts: Tensor | None = None,
    metric: Metric | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """``torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)`` whose backward
    fills ``probe``; ``starts``: samples are documents, as for ``linear``.

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.layer_norm(x, (5,), w, None, probe).sum().backward()
    >>> normed = torch.nn.functional.layer_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1), atol=1e-5)
    True
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as torch's own autocast does there
    y: Tensor = _LayerNorm.apply(
        *(x, weight, bias, probe, list(normalized_shape), eps, batch_dim, starts),
        *metric_inputs(metric, starts, weight, bias),
        *group_inputs(groups, probe, metric, starts is not None),
    )
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        probe: Tensor,
        eps: float,
        variant: str,
        batch_dim: int,
        starts: Tensor | None,
        metric_probe: Tensor | None,
        constants: Tensor | None,
        v: Tensor | None,
        group_probe: Tensor | None,
        members: tuple[Tensor, ...] | None,
    ) -> Tensor:
        for rows in (probe,) if metric_probe is None else (probe, metric_probe):
            check_probe(rows, 1)
        ctx.save_for_backward(x, w, starts, constants, v)
        ctx.members = members
        ctx.num_samples, ctx.batch_dim = num_samples(probe), batch_dim
        forward, ctx.offset = RMS_NORM_VARIANTS[variant]
        ctx.eps = eps
        return forward(x, w, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, starts, constants, v = ctx.saved_tensors

        def rows(t: Tensor) -> Tensor:
            t = t.flatten(-w.ndim)
            if starts is not None:
                return documents.rows_of(t)
            return samples_first(t, ctx.num_samples, ctx.batch_dim)

        compiling = torch.compiler.is_compiling()
        backward = reference.rms_norm_backward if compiling else ops.rms_norm_backward
        more: tuple[Tensor, ...] = ()
        if starts is not None:
            documents.refuse_sharded(dy)
            backward, more = documents.rms_norm_backward, (starts,)
        with without_autocast(dy):
            last = ctx.eps, ctx.offset
            metric_PB = group_PG = None
            if ctx.members is not None:
                dy_BTN, x_BTN, w_N = rows(dy), rows(x), w.flatten()
                dx = x_BTN.new_empty(x_BTN.shape)

                def run(b: Tensor) -> tuple[Tensor, ...]:
                    dx[b], *rest = ops.rms_norm_backward(dy_BTN[b], x_BTN[b], w_N, *last)
                    return tuple(rest)

                [dw], sqnorm_PB, group_PG = by_group(run, ctx.members, dy_BTN, (True,))
                dw = dw.to(w.dtype)
            elif constants is None:
                dx, dw, sqnorm_PB = dtensor.replicated(backward)(
                    rows(dy), rows(x), w.flatten(), *last, *more
                )
            else:
                dx, dw, _, norms = ops.norm_backward_metric(
                    *(rows(dy), rows(x), None, None, w.flatten(), None, v, None, constants, *last)
                )
                sqnorm_PB, metric_PB = norms.chunk(2)
        dx = samples_back(dx, x.flatten(-w.ndim).shape, ctx.batch_dim).reshape(x.shape)
        no = (None,) * 4
        return dx, dw.reshape(w.shape), sqnorm_PB, *no, metric_PB, None, None, group_PG, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    probe: Tensor,
    *,
    eps: float | None = None,
    variant: str = "torch",
    batch_dim: int = 0,
    starts: Tensor | None = None,
    metric: Metric | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """``torch.nn.functional.rms_norm(x, weight.shape, weight, eps)`` whose backward fills
    ``probe``; ``starts``: samples are documents, as for ``linear``.

    ``variant`` names whose rounding and gain the forward follows: ``"torch"``, ``"llama"``
    (normalised in float32, rounded, then times the weight), ``"olmo"`` (times the weight, then
    rounded), ``"t5"`` (rounded only where the weight is narrow) or ``"gemma"`` (times 1 + weight in
    float32, then rounded).

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.rms_norm(x, w, probe).sum().backward()
    >>> normed = torch.nn.functional.rms_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1))
    True
    """
    if eps is None:
        eps = torch.finfo(accumulate_dtype(x.dtype)).eps  # as F.rms_norm does
    y: Tensor = _RMSNorm.apply(
        *(x, weight, probe, eps, variant, batch_dim, starts),
        *metric_inputs(metric, starts, weight),
        *group_inputs(groups, probe, metric, starts is not None),
    )
    return y


def _rms_norm_torch(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def _rms_norm_llama(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_olmo(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _rms_norm_t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    narrow = w.dtype in (torch.float16, torch.bfloat16)
    return w * (normed.to(w.dtype) if narrow else normed)


def _rms_norm_gemma(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + w.float())).type_as(x)


RMS_NORM_VARIANTS: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], float]] = {
    "torch": (_rms_norm_torch, 0.0),
    "llama": (_rms_norm_llama, 0.0),
    "olmo": (_rms_norm_olmo, 0.0),
    "t5": (_rms_norm_t5, 0.0),
    "gemma": (_rms_norm_gemma, 1.0),
}
