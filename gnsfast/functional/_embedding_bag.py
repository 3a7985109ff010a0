# SPDX-License-Identifier: Apache-2.0
"""Embedding bags: sums or means of rows of a table.

Legend: N ids of all bags, G bags, B samples of G / B bags each, V vocabulary, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import embedding_bag as torch_embedding_bag

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass
from gnsfast.functional._beside import stand_in
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import EmbeddingWgrad


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        w: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        probe: Tensor,
        plan: Plan,
        mode: str,
        include_last_offset: bool,
        padding_idx: int | None,
    ) -> Tensor:
        plan.check("embedding_bag", probe, 1, w)
        y: Tensor
        if plan.norms_alone:
            bags = len(ids) if offsets is None else len(offsets) - include_last_offset
            y = stand_in(w, bags, w.shape[1])
        else:
            y = torch_embedding_bag(
                ids,
                w,
                offsets,
                mode=mode,
                per_sample_weights=weights,
                include_last_offset=include_last_offset,
                padding_idx=padding_idx,
            )
        if offsets is not None and not include_last_offset:
            offsets = F.pad(offsets, (0, 1), value=len(ids))
        ctx.save_for_backward(ids, offsets, weights, w if ctx.needs_input_grad[3] else None)
        padding = -1 if padding_idx is None else padding_idx % max(len(w), 1)
        ctx.samples, ctx.mode, ctx.table = plan.samples(probe), mode, (len(w), padding, w.dtype)
        ctx.alone = plan.norms_alone
        return y

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy_GD: Tensor) -> tuple[Tensor | None, ...]:
        ids, starts_G1, weights, w = tensors
        (G, D), B, ids_N = dy_GD.shape, ctx.samples, ids.flatten()
        table: tuple[int, int, torch.dtype] = ctx.table
        row_N = torch.arange(len(ids_N), device=ids.device)
        if starts_G1 is None:
            bag_N = row_N // max(ids.shape[1], 1)
        else:
            bag_N = torch.bucketize(row_N, starts_G1[1:-1].to(row_N.dtype), right=True)
        dweights = None
        real_N = ids_N != table[1]
        if ctx.mode == "mean":  # counted in float32: bfloat16 counts to 256
            size_G = real_N.new_zeros(G, dtype=torch.float32)
            size_G.index_add_(0, bag_N, real_N.to(torch.float32)).clamp_min_(1.0)
            dy_GD = (dy_GD / size_G[:, None]).to(dy_GD.dtype)
        dy_ND = dy_GD[bag_N]
        if ctx.needs_input_grad[3]:
            dweights = ((dy_ND * w[ids_N]).sum(1) * real_N).view_as(weights).to(weights.dtype)
        if weights is not None:
            dy_ND = dy_ND * weights.flatten()[:, None]
        if starts_G1 is None:  # every sample has as many ids
            samples = B, len(ids_N) // max(B, 1)
            a = EmbeddingWgrad(dy_ND.view(*samples, D), ids_N.view(samples), *table)
        else:
            starts_B1 = starts_G1[:: max(G // max(B, 1), 1)]
            a = EmbeddingWgrad(dy_ND, ids_N, *table, starts_B1)
        dw, rows = ops.embedding_wgrad(a)
        dw = None if ctx.alone else dw
        return None, dw, None, dweights, rows, *(None,) * 4


def embedding_bag(
    ids: Tensor,
    weight: Tensor,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``torch.nn.functional.embedding_bag(ids, weight, offsets, ...)``, of mode "sum" or "mean",
    whose backward fills ``probe``.

    If the number of bags G is k · B, k consecutive bags are one sample.

    >>> ids, w = torch.tensor([[1, 1], [0, 2]]), torch.zeros(4, 3, requires_grad=True)
    >>> probe = torch.zeros(1, 2 + 2, requires_grad=True)
    >>> gnsfast.functional.embedding_bag(ids, w, probe, mode="sum").sum().backward()
    >>> probe.grad[0, :2]  # gradients of a repeated id are added, then squared
    tensor([12.,  6.])
    """
    if mode not in ("sum", "mean"):
        raise NotImplementedError(f"an embedding bag of mode {mode!r} has no per-sample norms")
    y: Tensor = _EmbeddingBag.apply(
        *(ids, weight, offsets, per_sample_weights, probe, plan),
        *(mode, include_last_offset, padding_idx),
    )
    return y
