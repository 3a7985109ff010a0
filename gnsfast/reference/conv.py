# SPDX-License-Identifier: Apache-2.0
"""Convolutions: the gradients of weight and bias, with every sample's squared norms.

Legend: n rows of B samples, C channels, O output channels, L positions of an output, K elements of
a patch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.reference.linear import linear_wgrad
from gnsfast.reference.rows import norm, norm_rows, probe_rows, sum_wgrad
from gnsfast.signatures import ConvWgrad, LinearWgrad
from gnsfast.tensors import accumulate_dtype

CACHED = 1 << 20
"""The most numbers of patches, and of samples' gradients, that are made at a time: 4 MiB."""

PASSES = 4
"""How often ``by_sample`` reads and writes a gradient of each sample beside its products: torch
makes it in blocks and copies it, then it is stacked, squared and added. Measured crossovers agree.
"""


def conv_wgrad(
    a: ConvWgrad, linear: Callable[[LinearWgrad], tuple[Tensor, ...]] = linear_wgrad
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``. ``linear`` multiplies patches."""
    x, dy, B = a.x, a.dy, a.samples
    dw, db = (x.new_empty(0, dtype=a.dtype) for _ in range(2))
    rows = []
    if a.weight and not x.numel() * dy.numel():
        dw = a.results()[0].zero_()
        rows.append(probe_rows([(x.new_zeros(B + 1),)], B, x))
    elif a.weight:
        dw, row = by_patches(a, linear) if takes_patches(a) else by_sample(a)
        rows.append(row)
    if a.bias:
        sum_nO = dy.flatten(2).sum(2, dtype=accumulate_dtype(x.dtype))
        db, norms = sum_wgrad(sum_nO.unflatten(0, (B, len(x) // max(B, 1))).sum(1), a.dtype)
        rows.append(probe_rows([norms], B, x))
    return dw, db, torch.cat(rows)


def takes_patches(a: ConvWgrad) -> bool:
    """Whether the copies of x and dy in ``by_patches`` have fewer numbers than the gradients of
    samples that ``by_sample`` moves.
    """
    unfolded = math.prod(max(1.0, k / s) for k, s in zip(a.kernel[1:], a.stride[1:]))
    copies = (unfolded * a.x.numel() + a.dy.numel()) / a.samples
    own = a.dy.shape[1] * a.x.shape[1] * math.prod(a.kernel)
    return a.groups == 1 and copies < PASSES * own


def by_sample(a: ConvWgrad) -> tuple[Tensor, Tensor]:
    """dW and its probe row [1, B + 2], from torch's own gradient of one sample after the other."""
    x, dy, B = a.x, a.dy, a.samples
    w = x.new_empty(a.dy.shape[1], x.shape[1] // a.groups, *a.kernel)
    dw, norms = torch.zeros_like(w, dtype=accumulate_dtype(x.dtype)), []
    geometry: Any = a.stride, a.padding, a.dilation, False, [0] * len(a.kernel), a.groups
    samples = list(zip(x.split(len(x) // B), dy.split(len(x) // B)))
    together = max(1, CACHED // w.numel())
    for first in range(0, B, together):
        own = [
            torch.ops.aten.convolution_backward(dy_b, x_b, w, None, *geometry, [False, True, False])
            for x_b, dy_b in samples[first : first + together]
        ]
        own_BOK = torch.stack([g[1] for g in own]).to(dw.dtype).flatten(2)
        norms.append(norm_rows(norm_rows(own_BOK.flatten(0, 1)).view(len(own), -1)))
        dw += own_BOK.sum(0).view_as(dw)
    return dw.to(a.dtype), probe_rows([(*norms, norm(dw))], B, x)


def by_patches(
    a: ConvWgrad, linear: Callable[[LinearWgrad], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor]:
    """dW and its probe row [1, B + 2], from the products of a linear layer. Each row of the kernel
    has one, with patches that are one kernel row high, so that only the other dimensions are
    unfolded. Kernel rows that do not overlap have one together.
    """
    x, dy, B, kernel = a.x, a.dy, a.samples, a.kernel
    n, C, O, acc = len(x), x.shape[1], dy.shape[1], accumulate_dtype(x.dtype)
    overlap = kernel[0] > a.stride[0]
    high = kernel[0] if overlap else 1
    across = dy.shape[3:].numel()
    T = dy.shape[2:].numel()
    parts = x.new_zeros((high, O, C * math.prod(kernel) // high), dtype=acc)
    row = x.new_ones((1, B + 2), dtype=torch.float64)
    rows_a_sample = n // B
    a_sample = max(rows_a_sample * T * parts.shape[2], 1)
    together = max(1, CACHED // a_sample) * rows_a_sample
    for first in range(0, n, together):
        some = slice(first, first + together)
        patches_nRK = patches(x[some], kernel, a.stride, a.padding, a.dilation, overlap)
        dy_BTO = channels_last(dy[some]).reshape(-1, rows_a_sample * T, O)
        of = slice(first // rows_a_sample, first // rows_a_sample + len(dy_BTO))
        row[0, of] = 0.0
        for i, part in enumerate(parts):
            down, phase = divmod(i * a.dilation[0], a.stride[0])
            at = (phase * (patches_nRK.shape[1] // (across * a.stride[0])) + down) * across
            x_BTK = patches_nRK[:, at : at + T].reshape(-1, rows_a_sample * T, part.shape[1])
            own, _, own_row, _ = linear(LinearWgrad(x_BTK, dy_BTO, True, False, False, acc))
            part += own
            row[0, of] += own_row[0, :-2]
    row[0, B] = norm(parts).double().square_()[0]
    dw = parts.view(high, O, *kernel[1 if overlap else 0 :], C)
    dw = dw.transpose(0, 1) if overlap else dw[0]
    return dw.movedim(-1, 1).to(a.dtype).contiguous(), row.to(torch.float32)


def patches(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    overlap: bool,
) -> Tensor:
    """[n, rows, K]: the patches that a convolution multiplies, with the channels last. If kernel
    rows ``overlap``, they are one row high, at all rows of the padded x: first those at a multiple
    of the stride, then those one below.
    """
    padded = [p for each in reversed(padding) for p in (each, each)]
    if overlap:
        padded[-1] += -(x.shape[2] + 2 * padding[0]) % stride[0]
    x = channels_last(F.pad(x, padded) if any(padded) else x)
    for d in range(overlap, len(kernel)):
        x = x.unfold(1 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])[..., :: dilation[d]]
    x = x.movedim(1 + len(kernel), -1)
    K = x.shape[1 + len(kernel) :].numel()
    if overlap:
        x = x.unflatten(1, (-1, stride[0])).transpose(1, 2)
    return x.reshape(len(x), -1, K)


def channels_last(t: Tensor) -> Tensor:
    """[n, *size, C], contiguous, from [n, C, *size]. Torch transposes a matrix two to four times
    as fast as a batch of them.
    """
    moved = t.movedim(1, -1)
    if moved.is_contiguous():
        return moved
    t_nCL = t.flatten(2)
    t_nLC = t_nCL.new_empty(len(t), t_nCL.shape[2], t.shape[1])
    for to, each in zip(t_nLC, t_nCL):
        to.copy_(each.T)
    return t_nLC.view(moved.shape)
