# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm: the backward pass with every sample's squared norms."""

from collections.abc import Callable

import torch
from torch import Tensor

from gnsfast.reference.rows import Norms, probe_rows, sum_tokens, sum_wgrad
from gnsfast.reference.segments import segment_sums
from gnsfast.signatures import NormBackward
from gnsfast.tensors import accumulate_dtype

# With fewer elements in a sample, torch's layer-norm backward is not called sample by sample.
ROWWISE = 1 << 15


def norm_backward(a: NormBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``NormBackward``."""
    if a.mean_BT1 is None or a.rstd_BT1 is None or a.starts is not None:
        return norm_backward_aten(a)
    if a.x_BTF.numel() > a.samples * ROWWISE:
        return _layer_norm_by_sample(a, a.mean_BT1, a.rstd_BT1)
    acc = accumulate_dtype(a.x_BTF.dtype)
    dw_BF = None
    if a.weight:  # the product with rstd also sums over the tokens, which saves a pass
        products_BTF = torch.sub(a.x_BTF.to(acc), a.mean_BT1).mul_(a.dy_BTF)
        dw_BF = torch.bmm(a.rstd_BT1.to(acc).mT, products_BTF)[:, 0]
    return _input_grad(a), *affine_wgrad(a, dw_BF, sum_tokens(a.dy_BTF) if a.bias else None)


def _layer_norm_by_sample(
    a: NormBackward, mean_BT1: Tensor, rstd_BT1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call torch's own kernel once for each sample. Its gradients of gain and bias are then those
    of the sample, and the rows are read once.
    """
    x, acc = a.x_BTF, accumulate_dtype(a.x_BTF.dtype)
    dx = x.new_empty(x.shape)
    dw_BF, db_BF = (x.new_zeros((a.samples, x.shape[2]), dtype=acc) for _ in range(2))
    last = a.w_F, a.b_F, [True, a.weight, a.bias]
    for b in range(a.samples):
        dx[b], dw_F, db_F = torch.ops.aten.native_layer_norm_backward(
            a.dy_BTF[b], x[b], [x.shape[2]], mean_BT1[b], rstd_BT1[b], *last
        )
        if a.weight:
            dw_BF[b] = dw_F
        if a.bias:
            db_BF[b] = db_F
    return dx, *affine_wgrad(a, dw_BF if a.weight else None, db_BF if a.bias else None)


def _input_grad(a: NormBackward) -> Tensor:
    """dx of a layer norm."""
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(
        *(a.dy_BTF, a.x_BTF, [a.x_BTF.shape[-1]], a.mean_BT1, a.rstd_BT1, a.w_F, a.b_F),
        [True, False, False],
    )[0]
    return dx.contiguous()


def norm_backward_aten(
    a: NormBackward, sums_of_segments: Callable[[Tensor, Tensor], Tensor] = segment_sums
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``norm_backward`` in plain aten without a loop over samples, which Inductor can fuse."""
    x, acc = a.x_BTF, accumulate_dtype(a.x_BTF.dtype)
    normed, rstd = _normed_input(a)
    if a.mean_BT1 is None:
        assert a.w_F is not None
        dnormed = a.dy_BTF * (a.w_F.to(acc) + a.offset)
        dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd
        dx = dx.to(x.dtype).contiguous()
    else:
        dx = _input_grad(a)

    def of_samples(t: Tensor) -> Tensor:
        return t.sum(1, dtype=acc) if a.starts is None else sums_of_segments(t, a.starts)

    dw_BF = of_samples(normed * a.dy_BTF) if a.weight else None
    db_BF = of_samples(a.dy_BTF) if a.bias else None
    return dx, *affine_wgrad(a, dw_BF, db_BF)


def _normed_input(a: NormBackward) -> tuple[Tensor, Tensor]:
    """The normalised input before gain and bias [B, T, F], and what it was multiplied by."""
    wide = a.x_BTF.to(accumulate_dtype(a.x_BTF.dtype))
    if a.mean_BT1 is None or a.rstd_BT1 is None:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + a.eps)
        return wide * rstd, rstd
    return (wide - a.mean_BT1) * a.rstd_BT1, a.rstd_BT1


def affine_wgrad(
    a: NormBackward, dw_BF: Tensor | None, db_BF: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, db and the probe rows, from the samples' gradients. None marks those not wanted."""
    acc = accumulate_dtype(a.x_BTF.dtype)
    grads = [a.x_BTF.new_empty(0, dtype=acc) for _ in range(2)]
    norms: list[Norms] = []
    for i, (g_BF, parameter) in enumerate(((dw_BF, a.w_F), (db_BF, a.b_F))):
        if g_BF is not None and parameter is not None:
            grads[i], found = sum_wgrad(g_BF, parameter.dtype)
            norms.append(found)
    return grads[0], grads[1], probe_rows(norms, a.samples, a.x_BTF)
