# SPDX-License-Identifier: Apache-2.0
"""Convolutions, by the linear layer's kernels on their patches."""

import math

import torch
from torch import Tensor

from gnsfast.reference import unfold
from gnsfast.signatures import ConvWgrad
from gnsfast.triton_kernels.outer import fused_wgrad
from gnsfast.triton_kernels.sqnorms import probe_rows, row_sqnorms, sums_wgrad, with_sum
from gnsfast.triton_kernels.tiles import check_dtypes

PATCHES = 1 << 26
"""The most elements in memory at a time of a convolution's patches, and of its samples' gradients:
128 MiB in bfloat16."""


def conv_wgrad(a: ConvWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``."""
    x, dy, groups = a.x, a.dy, a.groups
    check_dtypes("conv_wgrad", x, dy)
    (n, C), O = x.shape[:2], dy.shape[1]
    rows_a_sample = n // max(a.samples, 1)
    dw, db = (x.new_empty(0, dtype=a.dtype) for _ in range(2))
    norms = []
    if a.weight:
        K = C // groups * math.prod(a.kernel)
        dw_GOK = x.new_zeros((groups, O // groups, K), dtype=torch.float32)
        positions = dy.shape[2:].numel() * rows_a_sample
        a_sample = groups * K * (positions if groups == 1 else max(positions, O // groups))
        together = max(1, PATCHES // max(1, a_sample))
        parts = []
        for first in range(0, a.samples, together):
            rows = slice(first * rows_a_sample, (first + together) * rows_a_sample)
            cols_nLK = unfold(x[rows], a.kernel, a.stride, a.padding, a.dilation)
            cols_BTGK = cols_nLK.reshape(-1, positions, groups, K)
            dy_BTO = dy[rows].flatten(2).mT.reshape(-1, positions, O)
            parts.append(_add_groups(cols_BTGK, dy_BTO, dw_GOK))
        sqnorm_B = torch.cat(parts) if parts else x.new_zeros(0)
        norms.append(with_sum(sqnorm_B, dw_GOK.flatten(1)))
        dw = dw_GOK.reshape(O, C // groups, *a.kernel).to(a.dtype)
    if a.bias:
        sum_nO = dy.flatten(2).sum(2, dtype=torch.float32)
        sum_BO = sum_nO.reshape(a.samples, rows_a_sample, O).sum(1)
        db, norms_1B = sums_wgrad(sum_BO, a.dtype)
        norms.append(norms_1B)
    return dw, db, probe_rows(norms, a.samples, x)


def _add_groups(cols_BTGK: Tensor, dy_BTO: Tensor, dw_GOK: Tensor) -> Tensor:
    """Add the samples' gradients to ``dw_GOK``. Returns their squared norms [B] over all groups."""
    (B, T, G, K), O = cols_BTGK.shape, dy_BTO.shape[2] // dw_GOK.shape[0]
    if G == 1 and B * T * K * O:
        return fused_wgrad(cols_BTGK[:, :, 0], dy_BTO, dw_GOK[0], add=True)[0, :-1]
    # The products of groups are small: one batched product makes all samples' gradients.
    dy_BGOT = dy_BTO.unflatten(2, (G, O)).permute(0, 2, 3, 1).flatten(0, 1)
    cols_BGTK = cols_BTGK.transpose(1, 2).flatten(0, 1)
    g_BGOK = torch.bmm(dy_BGOT.float(), cols_BGTK.float()).reshape(B, G, O, K)
    dw_GOK += g_BGOK.sum(0)
    return row_sqnorms(g_BGOK.flatten(1))
