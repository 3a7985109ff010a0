# SPDX-License-Identifier: Apache-2.0
"""Linear layers: the gradients of weight and bias, with every sample's squared norms."""

import torch
from torch import Tensor

from gnsfast.reference import segments
from gnsfast.reference.outer import outer_norms, outer_wgrad
from gnsfast.reference.rows import Norms, probe_rows, sum_tokens, sum_wgrad
from gnsfast.signatures import LinearWgrad
from gnsfast.tensors import accumulate_dtype


def linear_wgrad(a: LinearWgrad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``LinearWgrad``."""
    x, dy = a.x_BTI, a.dy_BTO
    norms: list[Norms] = []
    # An unwanted result is an empty tensor of its own, as results must not share memory.
    if a.weight:
        left, right = (x, dy) if a.transposed else (dy, x)
        if a.starts is None:
            dw, found = outer_wgrad(right, left, a.dtype)
        else:
            dw, found = segments.outer_wgrad(right, left, a.starts, a.experts, a.dtype)
        norms.append(found)
    else:
        dw = x.new_empty(0, dtype=a.dtype)
    if a.bias:
        if a.starts is None:
            sums_BO = sum_tokens(dy) if dy.shape[1] != 1 else dy[:, 0]
            db, found = sum_wgrad(sums_BO, a.dtype)
        else:
            db, found = segments.bias_wgrad(dy, a.starts, a.experts, a.dtype)
        norms.append(found)
    else:
        db = x.new_empty(0, dtype=a.dtype)
    return dw, db, probe_rows(norms, a.samples, x), linked_rows(a)


def linear_norms(a: LinearWgrad) -> Tensor:
    """The probe rows of ``linear_wgrad``. Of plain samples one tile of dW is made at a time."""
    if a.starts is not None:
        return linear_wgrad(a)[2]
    found = [outer_norms(a.x_BTI, a.dy_BTO)] if a.weight else []
    if a.bias:
        found.append(sum_wgrad(sum_tokens(a.dy_BTO), a.dtype)[1])
    return probe_rows(found, a.samples, a.x_BTI)


def linked_rows(a: LinearWgrad) -> Tensor:
    """Rows ``ids_BS`` of every sample's dy_bᵀ x_b, for the embedding that shares the weight."""
    if a.ids_BS is None or not a.weight:
        return a.x_BTI.new_empty(0, dtype=accumulate_dtype(a.x_BTI.dtype))
    if a.starts is None:
        return tied_rows(a.x_BTI, a.dy_BTO, a.ids_BS)
    return segments.tied_rows(a.x_BTI, a.dy_BTO, a.ids_BS, a.starts)


def tied_rows(x_BTI: Tensor, dy_BTO: Tensor, ids_BS: Tensor) -> Tensor:
    """[B, S, I]: rows ``ids_BS`` of every sample's dy_bᵀ x_b."""
    acc = accumulate_dtype(x_BTI.dtype)
    rows = x_BTI.new_empty((*ids_BS.shape, x_BTI.shape[2]), dtype=acc)
    for b, ids_S in enumerate(ids_BS.unbind()):
        torch.mm(dy_BTO[b].index_select(1, ids_S).to(acc).T, x_BTI[b].to(acc), out=rows[b])
    return rows
