# SPDX-License-Identifier: Apache-2.0
"""Squared norms under a diagonal metric P beside the Euclidean ones, in plain PyTorch.

P is that of Adam, 1 / (√v s + eps) with s = 1 / √(1 - beta2^t): v lies as the parameter does, and
``constants`` holds s and eps, [2] for a parameter, [P, 2] for those of a module. Every sample's
gradient is weighed by √P and squared, so a product of weights and squares never underflows first.
Rows of norms [2P, B + 2] are the Euclidean ones of ``reference.py``, then those under the metric.
"""

import torch
from torch import Tensor

from gnsfast.reference import linear
from gnsfast.reference.embedding import sums_by_id
from gnsfast.reference.linear import tied_rows
from gnsfast.reference.rows import probe_row, sqnorm, sqnorm_rows, sum_tokens
from gnsfast.reference.rows import sum_wgrad as _plain_sum_wgrad
from gnsfast.tensors import accumulate_dtype

WEIGHED = 1 << 17
"""Elements of a gradient that are weighed at a time on the CPU, in one scratch: fresh memory costs
more than its square root.
"""

WEIGHED_CUDA = 1 << 25
"""The same on a GPU, where each piece is a few launches: 128 MiB beside the gradient."""


def root_metric(
    v: Tensor, constants_2: Tensor, acc: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """√P, shaped as ``v``."""
    s, eps = constants_2.to(acc).unbind()
    return torch.sqrt(v.to(acc), out=out).mul_(s).add_(eps).rsqrt_()


def metric_sqnorm(g: Tensor, v: Tensor, constants_2: Tensor) -> Tensor:
    """Σ P g², a float64 scalar; a copy of a part of ``g`` is made at a time."""
    acc = accumulate_dtype(g.dtype)
    g_RN, v_RN = (t.flatten(0, -2) if t.ndim > 1 else t.reshape(1, -1) for t in (g, v))
    rows = max(1, (WEIGHED_CUDA if g.is_cuda else WEIGHED) // max(1, g_RN.shape[1]))
    scratch = torch.empty_like(g_RN[:rows], dtype=acc)
    found = [
        sqnorm(root_metric(v, constants_2, acc, out=scratch[: len(v)]).mul_(g))
        for g, v in zip(g_RN.split(rows), v_RN.split(rows))
    ]
    return torch.stack(found).sum()


def sum_wgrad(
    g_BN: Tensor, v_N: Tensor, constants_2: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a parameter, its probe row and that under the metric, from its samples'
    gradients ``g_BN``.
    """
    grad, row = _plain_sum_wgrad(g_BN, dtype)
    root_N = root_metric(v_N.flatten(), constants_2, accumulate_dtype(g_BN.dtype))
    return grad, row, _plain_sum_wgrad(g_BN * root_N, dtype)[1]


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
    """dW, db and norms [2P, B + 2] of ``y = x Wᵀ + b`` for those whose v is given, and rows
    ``ids_BS`` of every sample's weight gradient for tied embeddings.
    """
    T = x_BTI.shape[1]
    dw = db = rows_BSI = x_BTI.new_empty(0, dtype=dtype)
    plain, weighed = [], []
    if v is not None:
        left, right = (x_BTI, dy_BTO) if transposed else (dy_BTO, x_BTI)
        dw, norms_2B1 = _outer_wgrad(right, left, v, constants_P2[0], dtype)
        plain.append(probe_row(norms_2B1[0]))
        weighed.append(probe_row(norms_2B1[1]))
    if v_O is not None:
        sums_BO = sum_tokens(dy_BTO) if T != 1 else dy_BTO[:, 0]
        db, *found = sum_wgrad(sums_BO, v_O, constants_P2[-1], dtype)
        plain.append(found[0])
        weighed.append(found[1])
    if ids_BS is not None:
        rows_BSI = tied_rows(x_BTI, dy_BTO, ids_BS)
    return dw, db, torch.stack(plain + weighed), rows_BSI


def _outer_wgrad(
    x_BTI: Tensor, dy_BTO: Tensor, v_OI: Tensor, constants_2: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dW [O, I] and norms [2, B + 1]: in closed form for one token, else sample by sample."""
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    acc = accumulate_dtype(x_BTI.dtype)
    if B * T * I * O == 0:
        return x_BTI.new_zeros((O, I), dtype=dtype), x_BTI.new_zeros((2, B + 1))
    if T > 1:
        dw_OI, norms_2B1 = _fused(x_BTI, dy_BTO, v_OI, constants_2, acc)
        return dw_OI.to(dtype), norms_2B1
    x_BI, dy_BO = x_BTI[:, 0].to(acc), dy_BTO[:, 0].to(acc)
    dw_OI = dy_BO.T @ x_BI
    root_OI = root_metric(v_OI, constants_2, acc)
    plain_B = sqnorm_rows(x_BI) * sqnorm_rows(dy_BO)
    norms_B = torch.stack([plain_B, one_token_metric(x_BI, dy_BO, root_OI)])
    sums = torch.stack([sqnorm(dw_OI), sqnorm(root_OI.mul_(dw_OI))])
    return dw_OI.to(dtype), torch.cat([norms_B, sums[:, None]], 1)


def one_token_metric(x_BI: Tensor, dy_BO: Tensor, root_OI: Tensor) -> Tensor:
    """Σ_oi P_oi dy_o² x_i² of each sample, float64: a product with P instead of B tiles."""
    weighed_BI = dy_BO.square() @ root_OI.square()
    return weighed_BI.mul_(x_BI.square()).sum(1, dtype=torch.float64)


def _fused(
    x_BTI: Tensor, dy_BTO: Tensor, v_OI: Tensor, constants_2: Tensor, acc: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dW and norms [2, B + 1]: ``reference._fused``, a tile being weighed once it is added."""
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    height = min(O, max(1, linear.TILE // I))
    together = max(1, min(B, max(linear.SMALL, linear.GROUP // (height * I))))
    dw_OI = x_BTI.new_zeros((O, I), dtype=acc)
    scratch = x_BTI.new_empty((together, height, I), dtype=acc)
    norms_2B1 = x_BTI.new_zeros((2, B + 1), dtype=torch.float64)
    for start in range(0, O, height):
        rows = slice(start, start + height)
        total = dw_OI[rows]
        root = root_metric(v_OI[rows], constants_2, acc)
        for first, x_GTI in zip(range(0, B, together), x_BTI.split(together)):
            some = slice(first, first + len(x_GTI))
            tiles = scratch[: len(x_GTI), : len(total)]
            torch.bmm(dy_BTO[some, :, rows].mT.to(acc), x_GTI.to(acc), out=tiles)
            norms_2B1[0, some] += _sample_sqnorms(tiles)
            for tile in tiles if together <= linear.SMALL else tiles.sum(0, keepdim=True):
                total += tile
            norms_2B1[1, some] += _sample_sqnorms(tiles.mul_(root))
        norms_2B1[0, B] += sqnorm(total)
        norms_2B1[1, B] += sqnorm(root.mul_(total))
    return dw_OI, norms_2B1


def _sample_sqnorms(tiles_GOI: Tensor) -> Tensor:
    return sqnorm_rows(tiles_GOI.flatten(0, 1)).view(len(tiles_GOI), -1).sum(1)


def embedding_wgrad_metric(
    dy_BTD: Tensor,
    ids_BT: Tensor,
    v_VD: Tensor,
    constants_12: Tensor,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and norms [2, B + 2] of an embedding."""
    (B, T), V = ids_BT.shape, len(v_VD)
    sample_N = torch.arange(B, device=ids_BT.device).repeat_interleave(T)
    key_S, sum_SD = sums_by_id(dy_BTD.flatten(0, 1), ids_BT.flatten(), sample_N, V, padding_idx)
    sample_S, id_S = key_S // max(V, 1), key_S % max(V, 1)
    dw_VD = sum_SD.new_zeros((V, dy_BTD.shape[2])).index_add_(0, id_S, sum_SD)
    root_SD = root_metric(v_VD[id_S], constants_12[0], sum_SD.dtype)
    norms_2B1 = sum_SD.new_zeros((2, B + 1), dtype=torch.float64)
    for norms_B1, t_SD in zip(norms_2B1, (sum_SD, sum_SD * root_SD)):
        norms_B1[:B].index_add_(0, sample_S, sqnorm_rows(t_SD))
    norms_2B1[0, B] = sqnorm(dw_VD)
    norms_2B1[1, B] = metric_sqnorm(dw_VD, v_VD, constants_12[0])
    return dw_VD.to(dtype), torch.stack([probe_row(norms_B1) for norms_B1 in norms_2B1])


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
    """dx, dW, db and norms [2P, B + 2] of ``layer_norm_backward``, or without a mean of
    ``rms_norm_backward``, for the parameters whose v is given.
    """
    acc = accumulate_dtype(x_BTN.dtype)
    x = x_BTN.to(acc)
    if mean_BT1 is None or rstd_BT1 is None:
        assert w_N is not None
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normed = x * rstd
        dnormed = dy_BTN * (w_N.to(acc) + offset)
        dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd
        dx = dx.to(x_BTN.dtype)
    else:
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            *(dy_BTN, x_BTN, [x_BTN.shape[2]], mean_BT1, rstd_BT1, w_N, b_N, [True, False, False])
        )
        normed = (x - mean_BT1) * rstd_BT1
    dw_BN = None if v_w is None else (normed * dy_BTN).sum(1)
    db_BN = None if v_b is None else dy_BTN.sum(1, dtype=acc)
    return dx.contiguous(), *affine_wgrad([dw_BN, db_BN], [w_N, b_N], [v_w, v_b], constants_P2)


def affine_wgrad(
    grads_BN: list[Tensor | None],
    parameters: list[Tensor | None],
    moments: list[Tensor | None],
    constants_P2: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, db and norms [2P, B + 2] from the samples' own; None for what is not wanted."""
    grads: list[Tensor] = []
    plain: list[Tensor] = []
    weighed: list[Tensor] = []
    for g_BN, p, v in zip(grads_BN, parameters, moments):
        if g_BN is None or p is None or v is None:
            grads.append(constants_P2.new_empty(0, dtype=torch.float32))
        else:
            grad, *rows = sum_wgrad(g_BN, v, constants_P2[len(plain)], p.dtype)
            grads.append(grad)
            plain.append(rows[0])
            weighed.append(rows[1])
    return grads[0], grads[1], torch.stack(plain + weighed)
