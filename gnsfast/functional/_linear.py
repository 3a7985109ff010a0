# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear  # what replaces it there calls it

from gnsfast import ops
from gnsfast.functional._autocast import autocast_dtype, backward_pass, cast_like
from gnsfast.functional._beside import stand_in
from gnsfast.functional._links import Link, link_grads
from gnsfast.functional.plan import PLAIN, Plan


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, probe: Tensor, plan: Plan, *links: Tensor
    ) -> Tensor:
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        plan.check("linear", probe, need_w + need_b, w, bool(links))
        ctx.plan, ctx.kept = plan.without_tensors(), (plan.samples(probe), w.dtype, links[::3])
        if plan.norms_alone:
            y = stand_in(x, *x.shape[:-1], w.shape[1 if plan.transposed else 0])
        else:
            w, b = cast_like(x, w, b)
            y = torch_linear(x, w.t() if plan.transposed else w, b)
        ctx.save_for_backward(x if need_w else None, w if need_x else None, *plan.tensors())
        if not torch.compiler.is_compiling() and y._is_view():
            # With a bias torch returns a view. Autograd forbids in-place operations on a view that
            # a custom Function returns.
            y = y.data
        return y

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *saved = tensors
        plan, (B, dtype, link_ids) = ctx.plan.restored(saved), ctx.kept
        need_x, *need = ctx.needs_input_grad[:3]
        dx = dy @ (w.t() if plan.transposed else w) if need_x else None
        dy = plan.rows(dy, B)
        x = dy if x is None else plan.rows(x, B)
        ids = torch.cat(link_ids, 1) if link_ids else None
        a = plan.linear_wgrad(x, dy, need, dtype, ids)
        dw, db, rows, *linked = plan.run(ops.linear_wgrad, a, need, ids)
        to_links = link_grads(link_ids, linked[0], dw, *linked[1:])
        return dx, *plan.gradients(need, dw, db), rows, None, *to_links


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
    links: tuple[Link, ...] = (),
) -> Tensor:
    """``torch.nn.functional.linear(x, weight, bias)`` whose backward fills ``probe``.

    Sample b's norm is that of ``autograd.grad`` of its own loss term.

    Args:
        x: [B, ..., in_features], or [T, B, in_features] with ``plan.batch_dim`` 1. If there are
            k · B rows, k consecutive rows are one sample.
        weight: [out_features, in_features], or with ``plan.transposed`` [in_features,
            out_features].
        bias: [out_features] or None.
        probe: float32 zeros [P, B + 2], where P is the number of trainable ones of (weight, bias).
            A plan with groups needs more columns (``Plan``).
        plan: which rows belong to which sample, and what is measured.
        links: the links of earlier embeddings that share ``weight``.

    The squared norms scale with the loss: a mean over B samples scales them by 1 / B².
    Raises ValueError for a probe of another shape and for links to a transposed weight, and
    NotImplementedError for measurements that do not go together.
    Source: Goodfellow 2015 (arXiv 1510.01799), eq. for a fully connected layer, summed over tokens.

    >>> x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.linear(x, w, None, probe).sum().backward()
    >>> torch.allclose(probe.grad[0, :3], 2 * x.square().sum(1))
    True
    """
    if plan.transposed and links:
        raise ValueError("links need a weight [out_features, in_features], not a transposed one")
    if (dtype := autocast_dtype(x)) is not None and x.is_floating_point():
        x = x.to(dtype)
    y: Tensor = _Linear.apply(x, weight, bias, probe, plan, *chain(*links))
    return y
