# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm: the backward pass with every sample's squared norms."""

import torch
from torch import Tensor

from gnsfast.reference.rows import sum_tokens, sum_wgrad
from gnsfast.tensors import accumulate_dtype


def layer_norm_backward(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    w_N: Tensor | None,
    b_N: Tensor | None,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dW, db and ``sqnorm_PB`` of ``y = w (x - mean) rstd + b``; an unwanted gradient comes
    back empty.

    torch's own kernel runs once a sample: its gain and bias gradients are then that sample's, and
    the rows are read once.
    """
    B, _, N = x_BTN.shape
    acc = accumulate_dtype(x_BTN.dtype)
    dx = x_BTN.new_empty(x_BTN.shape)
    dw_BN, db_BN = x_BTN.new_zeros((B, N), dtype=acc), x_BTN.new_zeros((B, N), dtype=acc)
    if (
        x_BTN.numel() <= B * ROWWISE
    ):  # short samples: a call of torch's kernel costs more than these passes
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy_BTN, x_BTN, [N], mean_BT1, rstd_BT1, w_N, b_N, [True, False, False]
        )
        dx = dx.contiguous()
        if weight:
            products_BTN = torch.sub(x_BTN.to(acc), mean_BT1).mul_(dy_BTN)
            dw_BN = torch.bmm(rstd_BT1.to(acc).mT, products_BTN)[:, 0]
        if bias:
            db_BN = sum_tokens(dy_BTN)
    else:
        for b in range(B):
            dx[b], dw_N, db_N = torch.ops.aten.native_layer_norm_backward(
                dy_BTN[b], x_BTN[b], [N], mean_BT1[b], rstd_BT1[b], w_N, b_N, [True, weight, bias]
            )
            if weight:
                dw_BN[b] = dw_N
            if bias:
                db_BN[b] = db_N
    dw, db, sqnorm_PB = affine_wgrad(dw_BN if weight else None, db_BN if bias else None, w_N, b_N)
    return dx, dw, db, sqnorm_PB


# Elements of one sample below which torch's layer-norm backward is not called sample by sample.
ROWWISE = 1 << 15


def affine_wgrad(
    dw_BN: Tensor | None, db_BN: Tensor | None, w_N: Tensor | None, b_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, db and ``sqnorm_PB`` from the per-sample gains' and biases' gradients; None for an
    unwanted one.
    """
    like = dw_BN if dw_BN is not None else db_BN
    assert like is not None
    grads, rows = [like.new_empty(0), like.new_empty(0)], []
    for i, (g_BN, parameter) in enumerate(((dw_BN, w_N), (db_BN, b_N))):
        if g_BN is not None and parameter is not None:
            grads[i], row = sum_wgrad(g_BN, parameter.dtype)
            rows.append(row)
    return grads[0], grads[1], torch.stack(rows)


def rms_norm_backward(
    dy_BTN: Tensor, x_BTN: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW and ``sqnorm_PB`` of ``y = (offset + w) x rsqrt(mean(x²) + eps)``."""
    dx, products_BTN = rms_norm_products(dy_BTN, x_BTN, w_N, eps, offset)
    dw, row = sum_wgrad(products_BTN.sum(1), w_N.dtype)
    return dx, dw, row[None]


def rms_norm_products(
    dy: Tensor, x: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """dx, and what each row [..., N] adds to dW."""
    acc = accumulate_dtype(x.dtype)
    wide = x.to(acc)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    dnormed = dy * (w_N.to(acc) + offset)
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype).contiguous(), normed * dy
