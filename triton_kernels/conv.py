# SPDX-License-Identifier: Apache-2.0
"""Convolutions, by the linear layer's kernels on their patches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast import reference
from gnsfast.signatures import ConvWgrad, empty_rows
from gnsfast.triton_kernels.outer import fused_wgrad
from gnsfast.triton_kernels.sums import finish_sums
from gnsfast.triton_kernels.tiles import check_dtypes

PATCHES = 1 << 26
"""The most elements in memory at a time of a convolution's patches, and of its samples' gradients:
128 MiB in bfloat16."""


def conv_wgrad(a: ConvWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``."""
    check_dtypes("conv_wgrad", a.x, a.dy)
    if not (a.x.numel() and a.dy.numel()):
        return reference.conv_wgrad(a)
    dw, db, rows = a.results()
    if a.weight:
        dw_GOK = _zeros(a)
        _weight_wgrad(a, dw_GOK, rows[:1])
        dw.copy_(dw_GOK.view_as(dw))
    _bias_wgrad(a, db, rows)
    return dw, db, rows


def conv_norms(a: ConvWgrad) -> Tensor:
    """The probe rows of ``conv_wgrad``. dW is in memory only where the patches are too many to be
    there at a time: the sums of several products are added before they are squared.
    """
    check_dtypes("conv_wgrad", a.x, a.dy)
    if not (a.x.numel() and a.dy.numel()):
        return reference.conv_norms(a)
    _, db, rows = a._replace(weight=False).results()
    if a.weight:
        rows = empty_rows(a.x, 1 + a.bias, a.samples)
        _weight_wgrad(a, _zeros(a) if a.samples > _together(a) else None, rows[:1])
    _bias_wgrad(a, db, rows)
    return rows


def _bias_wgrad(a: ConvWgrad, db: Tensor, rows: Tensor) -> None:
    if a.bias:
        sum_nO = a.dy.flatten(2).sum(2, dtype=torch.float32)
        finish_sums(sum_nO.unflatten(0, (a.samples, -1)), db, rows[-1:])


def _patch(a: ConvWgrad) -> int:
    """K: the numbers of a patch in one group."""
    return a.x.shape[1] // a.groups * math.prod(a.kernel)


def _zeros(a: ConvWgrad) -> Tensor:
    """[G, O, K] float32, to which gradients are added."""
    shape = a.groups, a.dy.shape[1] // a.groups, _patch(a)
    return a.x.new_zeros(shape, dtype=torch.float32)


def _together(a: ConvWgrad) -> int:
    """How many samples have their patches in memory at a time."""
    O = a.dy.shape[1]
    positions = a.dy.shape[2:].numel() * (len(a.x) // a.samples)
    wide = positions if a.groups == 1 else max(positions, O // a.groups)
    return max(1, PATCHES // max(1, a.groups * _patch(a) * wide))


def _weight_wgrad(a: ConvWgrad, dw_GOK: Tensor | None, row: Tensor) -> None:
    """Add the groups' gradients to ``dw_GOK``, and fill the probe ``row`` [1, B + 2]."""
    x, dy, groups, samples = a.x, a.dy, a.groups, a.samples
    rows_a_sample, together = len(x) // samples, _together(a)
    positions = dy.shape[2:].numel() * rows_a_sample
    for first in range(0, samples, together):
        rows = slice(first * rows_a_sample, (first + together) * rows_a_sample)
        cols_nLK = unfold(x[rows], a.kernel, a.stride, a.padding, a.dilation)
        cols_BTGK = cols_nLK.reshape(-1, positions, groups, _patch(a))
        dy_BTO = dy[rows].flatten(2).mT.reshape(-1, positions, dy.shape[1])
        # What follows these samples' numbers is overwritten by the next ones'.
        _add_samples(cols_BTGK, dy_BTO, dw_GOK, row[:, first : first + len(dy_BTO) + 2])
    if samples > together:
        assert dw_GOK is not None
        row[0, samples] = torch.linalg.vector_norm(dw_GOK, dtype=torch.float64).square()


def _add_samples(cols_BTGK: Tensor, dy_BTO: Tensor, dw_GOK: Tensor | None, row: Tensor) -> None:
    """Add the samples' gradients to ``dw_GOK``. Fills their ``row`` [1, B + 2]."""
    B, _, G, K = cols_BTGK.shape
    O = dy_BTO.shape[2] // G
    if G == 1:
        dw_OK = None if dw_GOK is None else dw_GOK[0]
        fused_wgrad(cols_BTGK[:, :, 0], dy_BTO, dw_OK, row, add=dw_OK is not None)
        return
    # The products of groups are small: one batched product makes all samples' gradients.
    dy_BGOT = dy_BTO.unflatten(2, (G, O)).permute(0, 2, 3, 1).flatten(0, 1)
    cols_BGTK = cols_BTGK.transpose(1, 2).flatten(0, 1)
    g_BGOK = torch.bmm(dy_BGOT.float(), cols_BGTK.float())
    sum_GOK = g_BGOK.new_empty((G, O, K))
    finish_sums(g_BGOK.view(B, 1, G * O * K), sum_GOK.flatten(), row)
    if dw_GOK is not None:
        dw_GOK += sum_GOK


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
