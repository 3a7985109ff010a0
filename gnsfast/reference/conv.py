# SPDX-License-Identifier: Apache-2.0
"""Convolutions: the gradients of weight and bias, with every sample's squared norms.

Legend: n rows of B samples, C channels, O output channels, L positions of an output, K elements of
a patch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnsfast.reference.linear import linear_wgrad
from gnsfast.reference.rows import norm, norm_rows, probe_rows, sum_wgrad
from gnsfast.signatures import ConvWgrad, LinearWgrad
from gnsfast.tensors import accumulate_dtype

CACHED = 1 << 19
"""The most numbers of patches, and of samples' gradients, that are made at a time: 2 MiB."""

CALL = 1 << 16
"""The numbers that patches copy in the time that one call of torch takes beside its products."""


Linear = Callable[[LinearWgrad], tuple[Tensor, ...]]
Copy = Callable[[Tensor, Tensor], None]


def copy_channels_last(to: Tensor, t: Tensor) -> None:
    """Copy ``t`` [n, C, *size] to [n, *size, C]."""
    to.copy_(t.movedim(1, -1))


def conv_wgrad(
    a: ConvWgrad, linear: Linear = linear_wgrad, copy: Copy = copy_channels_last
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``. ``linear`` multiplies patches, which ``copy`` makes."""
    x, dy, B = a.x, a.dy, a.samples
    dw, db = (x.new_empty(0, dtype=a.dtype) for _ in range(2))
    rows = []
    if a.weight and not x.numel() * dy.numel():
        dw = a.results()[0].zero_()
        rows.append(probe_rows([(x.new_zeros(B + 1),)], B, x))
    elif a.weight:
        dw, row = by_patches(a, linear, copy) if takes_patches(a) else by_sample(a)
        rows.append(row)
    if a.bias:
        sum_nO = dy.flatten(2).sum(2, dtype=accumulate_dtype(x.dtype))
        db, norms = sum_wgrad(sum_nO.unflatten(0, (B, len(x) // max(B, 1))).sum(1), a.dtype)
        rows.append(probe_rows([norms], B, x))
    return dw, db, torch.cat(rows)


def conv_norms(a: ConvWgrad) -> Tensor:
    """The probe rows of ``conv_wgrad``, which makes dW."""
    return conv_wgrad(a)[2]


def takes_patches(a: ConvWgrad) -> bool:
    """Whether ``by_patches`` moves fewer numbers beside its products than ``by_sample``: for each
    sample its patches and its dy, not a call and a gradient. Groups have no patches.
    """
    unfolded = math.prod(max(1.0, k / s) for k, s in zip(a.kernel[1:], a.stride[1:]))
    copies = (unfolded * a.x.numel() + a.dy.numel()) / a.samples
    return a.groups == 1 and copies < CALL + a.dy.shape[1] * a.x.shape[1] * math.prod(a.kernel)


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


def by_patches(a: ConvWgrad, linear: Linear, copy: Copy) -> tuple[Tensor, Tensor]:
    """dW and its probe row [1, B + 2], from the products of a linear layer. Each row of the kernel
    has one, with patches that are one kernel row high, so that only the other dimensions are
    unfolded. Kernel rows that do not overlap have one together, and so have those of few patches.
    """
    x, dy, B, kernel = a.x, a.dy, a.samples, a.kernel
    rows_a_sample, C, O = len(x) // B, x.shape[1], dy.shape[1]
    many = dy[:, 0].numel() * C * math.prod(kernel) > CACHED
    overlap = many and kernel[0] > a.stride[0]
    high = kernel[0] if overlap else 1
    across, T = dy.shape[3:].numel(), dy.shape[2:].numel()
    K, acc = C * math.prod(kernel) // high, accumulate_dtype(x.dtype)
    parts_HOK = x.new_zeros((high, O, K), dtype=acc)
    rows_HB = x.new_zeros((high, B), dtype=torch.float64)
    together = max(1, CACHED // (rows_a_sample * T * K))
    for first in range(0, B, together):
        some = slice(first * rows_a_sample, (first + together) * rows_a_sample)
        patches_nRK = patches(x[some], a, overlap, copy)
        dy_BTO = channels_last(dy[some], [0] * len(kernel), 0, copy).view(-1, rows_a_sample * T, O)
        for i, part_OK in enumerate(parts_HOK):
            down, phase = divmod(i * a.dilation[0], a.stride[0])
            at = phase * patches_nRK.shape[1] // a.stride[0] + down * across
            x_BTK = patches_nRK[:, at : at + T].reshape(len(dy_BTO), -1, K)
            own_OK, _, row, _ = linear(LinearWgrad(x_BTK, dy_BTO, True, False, False, acc))
            part_OK += own_OK
            rows_HB[i, first : first + together] = row[0, :-2]
    row = torch.cat([rows_HB.sum(0), norm(parts_HOK).double().square_(), rows_HB.new_ones(1)])
    dw = x.new_empty((O, C, *kernel), dtype=acc)
    copy(
        dw.view(O, C, high, -1).transpose(1, 2), parts_HOK.view(high, O, -1, C).permute(1, 2, 0, 3)
    )
    return dw.to(a.dtype), row.to(torch.float32)[None]


def patches(x: Tensor, a: ConvWgrad, overlap: bool, copy: Copy) -> Tensor:
    """[n, rows, K]: the patches that a convolution multiplies, with the channels last. If kernel
    rows ``overlap``, they are one row high, at all rows of the padded x: first those at a multiple
    of the stride, then those one below.
    """
    D, down = len(a.kernel), a.stride[0]
    below = -(x.shape[2] + 2 * a.padding[0]) % down if overlap else 0
    x = channels_last(x, a.padding, below, copy)
    for d in range(overlap, D):
        span = a.dilation[d] * (a.kernel[d] - 1) + 1
        x = x.unfold(1 + d, span, a.stride[d])[..., :: a.dilation[d]]
    x = x.movedim(1 + D, -1)
    K = x.shape[1 + D :].numel()
    if overlap:
        x = x.unflatten(1, (-1, down)).transpose(1, 2)
    return x.reshape(len(x), -1, K)


def channels_last(t: Tensor, padding: list[int], below: int, copy: Copy) -> Tensor:
    """[n, *size, C] from [n, C, *size], with zeros around it, and some more rows ``below``."""
    if not any(padding) and not below:
        last = t.movedim(1, -1)
        if not last.is_contiguous():
            last = t.new_empty(last.shape)
            copy(last.flatten(1, -2), t.flatten(2))
        return last
    sizes = [size + 2 * p for size, p in zip(t.shape[2:], padding)]
    sizes[0] += below
    padded = inner = t.new_zeros((len(t), *sizes, t.shape[1]))
    for d, p in enumerate(padding):
        inner = inner.narrow(1 + d, p, t.shape[2 + d])
    copy(inner, t)
    return padded
