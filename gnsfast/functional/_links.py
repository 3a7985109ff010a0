# SPDX-License-Identifier: Apache-2.0
"""The links between the uses of one weight: an embedding and later embeddings or a linear head.

‖a + b‖² = ‖a‖² + ‖b‖² + 2 a·b. Each use adds its own squared norm to its own probe row. An
embedding also adds the cross terms 2 a·b with all later uses. For this it has two more outputs, the
link, which later uses take as inputs. The gradient that a later use returns for the link holds the
rows of its own gradient at the embedding's ids, once for each sample and once for the sum. With
groups of samples the link of the sum has two parts: one for the sum, one for each sample's group.

The ids of links stay on ``ctx``: where a checkpoint runs a use again, it saves the same tensors
with and without links, and those of its first run count.

Legend: B samples, T tokens, S ids of links, V vocabulary, D width.
"""

import torch
from torch import Tensor

from gnsfast.functional.plan import Plan
from gnsfast.functional.ragged import documents_of_rows

Link = tuple[Tensor, Tensor, Tensor]
"""An earlier use of a shared weight: its ids [B, S] and its two link outputs, both [B, S, D]. With
groups the second is [2, B, S, D]."""


def link_grads(
    link_ids: tuple[Tensor, ...],
    linked_BSD: Tensor,
    dw_VD: Tensor,
    of_groups_BSD: Tensor | None = None,
) -> list[Tensor | None]:
    """The gradients of each link's three tensors, from ``linked_BSD``, the rows of every sample's
    gradient at the ids of all links, the whole gradient ``dw_VD``, and the rows of the gradients of
    the samples' groups.
    """
    grads: list[Tensor | None] = []
    if not link_ids:
        return grads
    sizes = [ids_BS.shape[1] for ids_BS in link_ids]
    groups_of_links = () if of_groups_BSD is None else of_groups_BSD.split(sizes, 1)
    for k, (ids_BS, rows_BSD) in enumerate(zip(link_ids, linked_BSD.split(sizes, 1))):
        of_sum = dw_VD[ids_BS].to(rows_BSD.dtype)
        grads += [
            None,
            rows_BSD,
            torch.stack([of_sum, groups_of_links[k]]) if groups_of_links else of_sum,
        ]
    return grads


def embedding_rows(
    link_ids: tuple[Tensor, ...], ids_BT: Tensor, dy_BTD: Tensor, plan: Plan
) -> Tensor:
    """[B, S, D]: rows of every sample's gradient of an embedding, at the ids of earlier embeddings.
    Documents are one list of rows [1, N], where an id counts only within its own document.
    """
    same_BST = torch.cat(link_ids, 1)[:, :, None] == ids_BT[:, None, :]
    if plan.starts is not None:
        of_N = documents_of_rows(plan.starts, ids_BT.shape[1])
        same_BST = same_BST & (of_N.repeat(len(link_ids))[:, None] == of_N)
    return same_BST.to(dy_BTD.dtype) @ dy_BTD


def add_cross_terms(
    row_1B: Tensor,
    dy_BTD: Tensor,
    plan: Plan,
    of_samples: Tensor,
    of_sum: Tensor,
) -> None:
    """Add 2 a·b to an embedding's probe row, in place, for each sample, for the sum and for
    groups.
    """
    if plan.groups is not None:
        of_sum, of_groups = of_sum.unbind()
        own_B = (dy_BTD * of_groups).sum((1, 2), dtype=torch.float64)
        row_1B[0, len(own_B) + 2 :].add_(plan.groups.sums(own_B), alpha=2.0)
    if plan.starts is None:
        own_B = (dy_BTD * of_samples).sum((1, 2), dtype=torch.float64)
    else:
        own_1N = (dy_BTD * of_samples).sum(2, dtype=torch.float64)
        own_B = own_1N.new_zeros(plan.samples(row_1B))
        own_B.index_add_(0, documents_of_rows(plan.starts, own_1N.shape[1]), own_1N[0])
    own_1 = (dy_BTD * of_sum).sum(dtype=torch.float64)[None]
    row_1B[0, : len(own_B) + 1].add_(torch.cat([own_B, own_1]), alpha=2.0)
