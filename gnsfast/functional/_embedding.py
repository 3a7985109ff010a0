# SPDX-License-Identifier: Apache-2.0
"""Embeddings, and the links to later uses of their weight."""

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
    check_probe,
    metric_inputs,
    num_samples,
    samples_first,
    without_autocast,
)
from gnsfast.ops import dtensor
from gnsfast.reference import metric
from gnsfast.tensors import accumulate_dtype, is_dtensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        w: Tensor,
        probe: Tensor,
        padding_idx: int | None,
        batch_dim: int,
        tied: bool,
        shared: bool,
        trusted: Tensor | None,
        starts: Tensor | None,
        metric_probe: Tensor | None,
        constants: Tensor | None,
        v: Tensor | None,
        group_probe: Tensor | None,
        members: tuple[Tensor, ...] | None,
        *links: Tensor,
    ) -> tuple[Tensor, ...]:
        check_probe(probe, 1)
        if metric_probe is not None:
            check_probe(metric_probe, 1)
        ctx.members = members
        ctx.set_materialize_grads(False)
        ctx.sharded = w if is_dtensor(w) else None
        ctx.save_for_backward(ids, trusted, starts, constants, v, *links[::3])
        ctx.num_samples, ctx.batch_dim, ctx.shared = _samples(probe, starts), batch_dim, shared
        ctx.num_embeddings, ctx.parameter_dtype = w.shape[0], w.dtype
        ctx.padding_idx = -1 if padding_idx is None else padding_idx % max(w.shape[0], 1)
        y = F.embedding(ids, w, padding_idx)
        if not tied:
            return (y,)
        B, T, D = samples_first(y, ctx.num_samples, batch_dim).shape
        zero = w.new_zeros((), dtype=accumulate_dtype(w.dtype))
        return y, zero.expand(B, T, D), zero.clone().expand(B, T, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dlinks: Tensor | None) -> tuple[Tensor | None, ...]:
        ids, trusted, starts, constants, v, *link_ids = ctx.saved_tensors
        if dy is None:  # the output took no part in the loss: neither did its cross terms
            return (None,) * (14 + 3 * len(link_ids))
        link_grads: list[Tensor | None] = []
        metric_PB: Any = None
        group_PG: Tensor | None = None
        with without_autocast(dy):
            dy_BTD = samples_first(dy, ctx.num_samples, ctx.batch_dim)
            ids_BT = samples_first(ids[..., None], ctx.num_samples, ctx.batch_dim)[..., 0]
            last = ctx.padding_idx, ctx.parameter_dtype
            if starts is not None:
                documents.refuse_sharded(dy)
                dw, sqnorm_PB = ops.embedding_wgrad_segments(
                    dy_BTD[0], ids_BT[0], starts, ctx.num_embeddings, *last
                )
            elif ctx.members is not None:
                acc = accumulate_dtype(dy.dtype)
                flags = ctx.num_embeddings, ctx.padding_idx, acc
                [dw], sqnorm_PB, group_PG = by_group(
                    lambda b: ops.embedding_wgrad(dy_BTD[b], ids_BT[b], *flags),
                    *(ctx.members, dy_BTD, (True,)),
                )
                dw = dw.to(ctx.parameter_dtype)
            elif v is not None:
                dw, norms_2B = ops.embedding_wgrad_metric(dy_BTD, ids_BT, v, constants, *last)
                sqnorm_PB, metric_PB = norms_2B.chunk(2)
            elif ctx.sharded is None:
                dw, sqnorm_PB = ops.embedding_wgrad(dy_BTD, ids_BT, ctx.num_embeddings, *last)
            else:
                dw, sqnorm_PB = dtensor.embedding_wgrad(dy_BTD, ids_BT, ctx.sharded, *last)
            tied = any(d is not None for d in dlinks)
            if tied or link_ids:
                taught_BTD = dy_BTD.to(accumulate_dtype(dy.dtype))
                taught_BTD = taught_BTD.masked_fill((ids_BT == ctx.padding_idx)[..., None], 0.0)
            if tied:
                sqnorm_PB = _add_cross_terms(sqnorm_PB, taught_BTD, starts, *dlinks)
                if v is not None:
                    root_BTD = metric.root_metric(
                        F.embedding(ids_BT, v), constants[0], taught_BTD.dtype
                    )
                    weighed_BTD = taught_BTD * root_BTD.square()
                    metric_PB = _add_cross_terms(metric_PB, weighed_BTD, None, *dlinks)
            for ids_BS in link_ids:
                same_BST = (ids_BS[:, :, None] == ids_BT[:, None, :]).to(taught_BTD.dtype)
                if starts is not None:
                    row_N = torch.arange(ids.numel(), dtype=starts.dtype, device=starts.device)
                    of_N = torch.bucketize(row_N, starts[1:-1], right=True)
                    same_BST = same_BST * (of_N[:, None] == of_N)
                link_grads += [None, same_BST @ taught_BTD, dw[ids_BS].to(taught_BTD.dtype)]
            if trusted is not None:
                first_only = (dy_BTD[:1] != 0).any() & ~(dy_BTD[1:] != 0).any()
                # Rows that were added up over samples (e.sum(0)) get one gradient, B times.
                alike = (dy_BTD == dy_BTD[:1]).all() & (dy_BTD[:1] != 0).any()
                trusted = trusted & ~((first_only | alike) & ctx.shared)
                sqnorm_PB[:, -1] = torch.where(trusted, sqnorm_PB[:, -1], torch.nan)
        no = (None,) * 6
        return None, dw, sqnorm_PB, *no, metric_PB, None, None, group_PG, None, *link_grads


def _samples(probe: Tensor, starts: Tensor | None) -> int:
    """As how many samples the rows are laid out: documents stay one list."""
    return num_samples(probe) if starts is None else 1


def _add_cross_terms(
    sqnorm_PB: Tensor,
    dy_BTD: Tensor,
    starts: Tensor | None,
    of_samples: Tensor | None,
    of_sum: Tensor | None,
) -> Tensor:
    """‖a + b‖² = ‖a‖² + ‖b‖² + 2 a·b: the 2 a·b of an embedding and the weight's later uses."""
    assert of_samples is not None and of_sum is not None
    own_BT = (dy_BTD * of_samples).sum(2, dtype=torch.float64)
    own_B = own_BT.sum(1) if starts is None else ops.segment_sums(own_BT.mT, starts)[:, 0]
    cross = torch.cat(
        [
            own_B,
            (dy_BTD * of_sum).sum(dtype=torch.float64)[None],
            sqnorm_PB.new_zeros(1, dtype=torch.float64),
        ]
    )
    return (sqnorm_PB + 2.0 * cross).to(torch.float32)


def embedding(
    ids: Tensor,
    weight: Tensor,
    probe: Tensor,
    *,
    padding_idx: int | None = None,
    batch_dim: int = 0,
    tied: bool = False,
    shared: bool = False,
    bare: bool = False,
    starts: Tensor | None = None,
    links: tuple[Link, ...] = (),
    metric: Metric | None = None,
    groups: Groups | None = None,
) -> tuple[Tensor, Link | None]:
    """``torch.nn.functional.embedding(ids, weight, padding_idx)`` whose backward fills ``probe``.

    Returns the rows and, when ``tied``, the link that later layers of the same weight take as
    ``links``: through it they add their share 2 a·b of ‖a + b‖² to this layer's row. ``shared``
    says that ``ids`` is one row, expanded to all samples: the call counter is NaN where it is
    neither positions nor constant, or where only the first sample's rows were used; ``bare`` that
    it is [B], one id a sample: the counter is NaN where they are consecutive, as positions are.
    ``starts``: samples are documents, as for ``linear``; ``metric`` and ``groups`` are second
    probes, for norms under a metric and for those of groups of samples (not when ``tied``).

    >>> ids, w = torch.tensor([[1, 1], [0, 2]]), torch.zeros(4, 3, requires_grad=True)
    >>> probe = torch.zeros(1, 2 + 2, requires_grad=True)
    >>> gnsfast.functional.embedding(ids, w, probe)[0].sum().backward()
    >>> probe.grad[0, :2]  # the repeated id adds before it is squared
    tensor([12.,  6.])
    """
    flat = [t for link in links for t in link]
    trusted = None
    if shared or bare:
        step = (ids[0] if shared else ids).flatten().diff()
        trusted = ((step == 1) | (step == 0)).all() if shared else (step != 1).any()
    out: tuple[Tensor, ...] = _Embedding.apply(
        *(ids, weight, probe, padding_idx, batch_dim, tied, shared, trusted, starts),
        *metric_inputs(metric, starts, weight),
        *group_inputs(groups, probe, metric, starts is not None, tied, links),
        *flat,
    )
    if not tied:
        return out[0], None
    ids_BT = samples_first(ids[..., None], _samples(probe, starts), batch_dim)[..., 0]
    return out[0], (ids_BT, out[1], out[2])
