# SPDX-License-Identifier: Apache-2.0
"""The operators of ``metric.py`` on a GPU: those of ``operators.py`` with norms under a
metric beside the Euclidean ones, from the same tiles. The CUDA extension has none.
"""

import torch
from torch import Tensor

from gnsfast.reference import metric, probe_row
from gnsfast.triton_kernels import embedding, norms, operators
from gnsfast.triton_kernels.tiles import check_dtypes, unit_inner

Metric = tuple[Tensor, Tensor]


def linear_wgrad_metric(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    v: Tensor | None,
    v_O: Tensor | None,
    constants_P2: Tensor,
    ids_BS: Tensor | None,
    transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_dtypes("linear_wgrad_metric", x_BTI, dy_BTO)
    dw = db = rows_BSI = x_BTI.new_empty(0, dtype=dtype)
    plain, weighed = [], []
    if v is not None:
        left, right = (x_BTI, dy_BTO) if transposed else (dy_BTO, x_BTI)
        slots = None if ids_BS is None else operators.tied_slots(ids_BS, dy_BTO, x_BTI)
        dw, norms_2B1 = outer_wgrad(right, left, (v.contiguous(), constants_P2[0]), dtype, slots)
        plain.append(probe_row(norms_2B1[0]))
        weighed.append(probe_row(norms_2B1[1]))
        if slots is not None and ids_BS is not None:
            rows_BSI = operators.tied_rows(ids_BS, *slots)
    if v_O is not None:
        sums_BO = dy_BTO.sum(1, dtype=torch.float32)
        db, row, row_of_metric = metric.sum_wgrad(sums_BO, v_O, constants_P2[-1], dtype)
        plain.append(row)
        weighed.append(row_of_metric)
    return dw, db, torch.stack(plain + weighed), rows_BSI


def outer_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    metric: Metric,
    dtype: torch.dtype,
    links: operators.Links | None = None,
) -> tuple[Tensor, Tensor]:
    """dW [O, I] and the squared norms [2, B + 1] of dy_bᵀ x_b and of their sum: in closed form for
    one token, else by the fused kernel.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    dw_OI = x_BTI.new_empty((O, I), dtype=dtype)
    if B * T * I * O == 0:
        if links is not None:
            links[1].zero_()
        return dw_OI.zero_(), x_BTI.new_zeros((2, B + 1))
    if T > 1 or links is not None:
        return dw_OI, operators.fused_wgrad(x_BTI, dy_BTO, dw_OI, links=links, metric=metric)
    operators.dense_wgrad(x_BTI, dy_BTO, dw_OI)
    root_OI = metric.root_metric(*metric, torch.float32)
    x_BI, dy_BO = x_BTI[:, 0], dy_BTO[:, 0]
    weighed_B = metric.one_token_metric(x_BI.float(), dy_BO.float(), root_OI)
    plain_B1 = operators.with_sum(operators.token_sqnorms(x_BI, dy_BO)[0], dw_OI)
    return dw_OI, torch.stack([plain_B1, operators.with_sum(weighed_B, root_OI.mul_(dw_OI))])


def embedding_wgrad_metric(
    dy_BTD: Tensor,
    ids_BT: Tensor,
    v_VD: Tensor,
    constants_12: Tensor,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_dtypes("embedding_wgrad_metric", dy_BTD)
    V, metric = len(v_VD), (v_VD.contiguous(), constants_12[0])
    if V <= operators.SMALL_VOCABULARY:
        onehot_BTV = operators.one_hot(ids_BT, V, padding_idx).to(dy_BTD.dtype)
        dw, norms_2B1 = outer_wgrad(dy_BTD, onehot_BTV, metric, dtype)
    else:
        last = V, padding_idx, dtype, metric
        dw, norms_2B1 = embedding.embedding_wgrad(dy_BTD, ids_BT, *last)
    return dw, torch.stack([probe_row(norms_B1) for norms_B1 in norms_2B1])


def norm_backward_metric(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor | None,
    rstd_BT1: Tensor | None,
    w_N: Tensor | None,
    b_N: Tensor | None,
    v_w: Tensor | None,
    v_b: Tensor | None,
    constants_P2: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_dtypes("norm_backward_metric", dy_BTN, x_BTN, one=False)
    stats = None if mean_BT1 is None or rstd_BT1 is None else (mean_BT1, rstd_BT1)
    dx, dw_BN, db_BN = norms.norm_backward(
        *(unit_inner(dy_BTN), unit_inner(x_BTN), stats),
        *(w_N if w_N is None else unit_inner(w_N), v_w is not None, v_b is not None, eps, offset),
    )
    grads: list[Tensor | None] = [dw_BN, db_BN]
    return dx, *metric.affine_wgrad(grads, [w_N, b_N], [v_w, v_b], constants_P2)
