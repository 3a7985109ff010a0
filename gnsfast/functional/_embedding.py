# SPDX-License-Identifier: Apache-2.0
"""Embeddings, and their links to later uses of the same weight."""

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding as torch_embedding

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass
from gnsfast.functional._beside import stand_in
from gnsfast.functional._links import Link, add_cross_terms, embedding_rows, link_grads
from gnsfast.functional.plan import PLAIN, Plan, samples_first
from gnsfast.signatures import EmbeddingWgrad
from gnsfast.tensors import accumulate_dtype, is_dtensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        w: Tensor,
        probe: Tensor,
        plan: Plan,
        padding_idx: int | None,
        tied: bool,
        *links: Tensor,
    ) -> tuple[Tensor, ...]:
        plan.check("embedding", probe, 1, w, tied or bool(links))
        ctx.set_materialize_grads(False)
        wgrad = partial(ops.sharded_embedding_wgrad, w) if is_dtensor(w) else ops.embedding_wgrad
        ctx.save_for_backward(ids, *plan.tensors())
        padding = -1 if padding_idx is None else padding_idx % max(w.shape[0], 1)
        B, table = _samples(probe, plan), (w.shape[0], padding, w.dtype)
        ctx.plan, ctx.kept = plan.without_tensors(), (B, table, wgrad, links[::3])
        if plan.norms_alone:
            y = stand_in(w, *ids.shape, w.shape[1])
        else:
            y = torch_embedding(ids, w, padding_idx)
        if not tied:
            return (y,)
        B, T, D = samples_first(y, B, plan.batch_dim).shape
        zero = w.new_zeros((), dtype=accumulate_dtype(w.dtype))
        sums = (B, T, D) if plan.groups is None else (2, B, T, D)
        return y, zero.expand(B, T, D), zero.clone().expand(sums)

    @staticmethod
    @backward_pass
    def backward(
        ctx: Any, tensors: Any, dy: Tensor | None, *dlinks: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ids, *saved = tensors
        plan, (B, (V, padding_idx, dtype), wgrad, link_ids) = ctx.plan, ctx.kept
        plan = plan.restored(saved)
        if dy is None:  # the loss does not depend on the output, so it has no cross terms either
            return (None,) * (6 + 3 * len(link_ids))
        to_links: list[Tensor | None] = []
        dy_BTD = samples_first(dy, B, plan.batch_dim)
        ids_BT = _ids_first(ids, B, plan)
        a = EmbeddingWgrad(dy_BTD, ids_BT, V, padding_idx, dtype, plan.starts)
        at_BS = torch.cat(link_ids, 1) if link_ids else None
        dw, rows, *of_groups = plan.run(wgrad, a, [True], at_BS)
        of_samples, of_sum = dlinks or (None, None)
        if link_ids or of_samples is not None or of_sum is not None:
            taught_BTD = dy_BTD.to(accumulate_dtype(dy.dtype))
            if padding_idx >= 0:
                padding_BT1 = (ids_BT == padding_idx)[..., None]
                taught_BTD = taught_BTD.masked_fill(padding_BT1, 0.0)
            joined = plan.uses is not None and plan.uses.is_joined
            if of_samples is not None and of_sum is not None and not joined:
                add_cross_terms(rows, taught_BTD, plan, of_samples, of_sum)
            if link_ids:
                linked = embedding_rows(link_ids, ids_BT, taught_BTD, plan)
                to_links = link_grads(link_ids, linked, dw, *of_groups)
        dw = None if plan.norms_alone else dw
        return None, dw, rows, *(None,) * 3, *to_links


def _samples(probe: Tensor, plan: Plan) -> int:
    """The samples that rows are laid out in; documents stay one list."""
    return plan.samples(probe) if plan.starts is None else 1


def _ids_first(ids: Tensor, B: int, plan: Plan) -> Tensor:
    """``ids`` as [B, T]."""
    return samples_first(ids.unsqueeze(-1), B, plan.batch_dim).squeeze(-1)


def embedding(
    ids: Tensor,
    weight: Tensor,
    probe: Tensor,
    plan: Plan = PLAIN,
    links: tuple[Link, ...] = (),
    *,
    padding_idx: int | None = None,
    tied: bool = False,
) -> tuple[Tensor, Link | None]:
    """``torch.nn.functional.embedding(ids, weight, padding_idx)`` whose backward fills ``probe``.

    It returns the rows, and if ``tied`` a link. Later layers with the same weight take the link
    among their ``links``. Through it the probe row of this layer gets the cross term 2 a·b of
    ‖a + b‖², where a and b are the gradients of the two uses.

    Args:
        ids: integers [B, ...], or in another layout that ``plan`` describes.
        weight: [num_embeddings, embedding_dim].
        probe, plan, links: as in ``linear``.
        padding_idx: the id that gets no gradient.
        tied: whether later layers share ``weight``.

    >>> ids, w = torch.tensor([[1, 1], [0, 2]]), torch.zeros(4, 3, requires_grad=True)
    >>> probe = torch.zeros(1, 2 + 2, requires_grad=True)
    >>> gnsfast.functional.embedding(ids, w, probe)[0].sum().backward()
    >>> probe.grad[0, :2]  # gradients of a repeated id are added, then squared
    tensor([12.,  6.])
    """
    out: tuple[Tensor, ...] = _Embedding.apply(
        ids, weight, probe, plan, padding_idx, tied, *chain(*links)
    )
    if not tied:
        return out[0], None
    return out[0], (_ids_first(ids, _samples(probe, plan), plan), out[1], out[2])
