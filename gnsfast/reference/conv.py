# SPDX-License-Identifier: Apache-2.0
"""Convolutions: the gradients of weight and bias, with every sample's squared norms.

Legend: n rows of B samples, C channels, O output channels, L positions, G groups, K elements of a
patch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.reference.rows import Norms, norm, probe_rows, sum_wgrad
from gnsfast.signatures import ConvWgrad
from gnsfast.tensors import accumulate_dtype


def unfold(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The patches [n, L, C·K] that a convolution multiplies with its kernel."""
    if len(kernel) == 3:
        return _unfold_views(x, kernel, stride, padding, dilation)
    if len(kernel) == 1:
        x = x[:, :, None]
        kernel, stride, padding, dilation = (
            [1, *kernel],
            [1, *stride],
            [0, *padding],
            [1, *dilation],
        )
    if stride != kernel or any(padding) or any(d > 1 for d in dilation):
        return F.unfold(x, *map(tuple, (kernel, dilation, padding, stride))).mT
    (n, C, H, W), (h, w) = x.shape, kernel  # patches that do not overlap: one permutation
    x = x[:, :, : H // h * h, : W // w * w].reshape(n, C, H // h, h, W // w, w)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(n, (H // h) * (W // w), C * h * w)


def _unfold_views(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """``unfold`` for any dimensions, with one copy of rows of positions. ``F.unfold`` takes two."""
    D = len(kernel)
    if any(padding):
        x = F.pad(x, [p for each in reversed(padding) for p in (each, each)])
    for d in range(D):
        x = x.unfold(2 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])[..., :: dilation[d]]
    kernel_first = x.movedim(tuple(range(2, 2 + D)), tuple(range(2 + D, 2 + 2 * D)))
    L = x.shape[2 : 2 + D].numel()
    return kernel_first.reshape(len(x), x.shape[1] * math.prod(kernel), L).mT


def conv_wgrad(a: ConvWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``."""
    x, dy, groups = a.x, a.dy, a.groups
    n, C, O = *x.shape[:2], dy.shape[1]
    rows_a_sample = n // max(a.samples, 1)
    acc = accumulate_dtype(x.dtype)
    dw_GOK = x.new_zeros((groups, O // groups, C // groups * math.prod(a.kernel)), dtype=acc)
    dw, db = (x.new_empty(0, dtype=a.dtype) for _ in range(2))
    parts: list[Tensor] = []
    norms: list[Norms] = []
    if a.weight:
        for b in range(a.samples):
            x_b, dy_b = (t.narrow(0, b * rows_a_sample, rows_a_sample) for t in (x, dy))
            cols_nLK = unfold(x_b.to(acc), a.kernel, a.stride, a.padding, a.dilation)
            cols_GLK = cols_nLK.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)
            dy_GOL = dy_b.to(acc).flatten(2).transpose(0, 1).unflatten(0, (groups, -1)).flatten(2)
            g_GOK = torch.bmm(dy_GOL, cols_GLK)
            parts.append(norm(g_GOK))
            dw_GOK += g_GOK
        norms.append((*parts, norm(dw_GOK)))
        dw = dw_GOK.reshape(O, C // groups, *a.kernel).to(a.dtype)
    if a.bias:
        sum_nO = dy.flatten(2).sum(2, dtype=acc)
        sum_BO = sum_nO.reshape(a.samples, rows_a_sample, O).sum(1)
        db, found = sum_wgrad(sum_BO, a.dtype)
        norms.append(found)
    return dw, db, probe_rows(norms, a.samples, x)
