# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose samples are segments of one list of rows: the experts of a mixture, with rows
sorted by expert and then by sample, or the documents of packed rows, with one weight for all.

Legend: N rows, B samples, E experts, S = E B segments, I in_features, O out_features. Segment
s = e B + b is rows ``starts[s]`` to ``starts[s + 1]``, those of sample b that expert e was given.
"""

import torch
from torch import Tensor

from gnsfast.reference.outer import gram_sqnorms, linear_route
from gnsfast.reference.rows import Norms, norm, norm_rows, sqnorm
from gnsfast.tensors import accumulate_dtype

PADDED = 1 << 22
"""The number of elements in memory at a time, of short segments padded to one length."""


def outer_wgrad(
    x_NI: Tensor, dy_NO: Tensor, starts: Tensor, experts: int, dtype: torch.dtype
) -> tuple[Tensor, Norms]:
    """dW [E, O, I], or [O, I] without ``experts``, and its norms. Their squares are
    Σ_e ‖dy_ebᵀ x_eb‖² for each sample, and Σ_e ‖dW_e‖².

    An expert whose segments are all short takes the Gram route, with many segments at a time. For
    other experts, each segment has its own product.
    """
    I, O, E = x_NI.shape[1], dy_NO.shape[1], max(experts, 1)
    B = (len(starts) - 1) // E
    acc, bounds = accumulate_dtype(x_NI.dtype), starts.tolist()
    dw_EOI = x_NI.new_zeros((E, O, I), dtype=acc)
    sqnorm_S = x_NI.new_zeros(E * B, dtype=torch.float64)
    segments = [(s, *span) for s, span in enumerate(zip(bounds, bounds[1:]))]
    short = []
    for e in range(E):
        own = [(s, start, end) for s, start, end in segments[e * B : (e + 1) * B] if start < end]
        longest = max((end - start for _, start, end in own), default=0)
        if not own or I * O == 0:
            continue
        if linear_route(longest, I, O) != "fused":
            rows = slice(own[0][1], own[-1][2])
            torch.mm(dy_NO[rows].to(acc).T, x_NI[rows].to(acc), out=dw_EOI[e])
            short += own
            continue
        for s, start, end in own:
            g_OI = dy_NO[start:end].to(acc).T @ x_NI[start:end].to(acc)
            sqnorm_S[s] = sqnorm(g_OI)
            dw_EOI[e] += g_OI
    _short_sqnorms(x_NI, dy_NO, short, sqnorm_S)
    dw = (dw_EOI if experts else dw_EOI[0]).to(dtype)
    return dw, (sqnorm_S.view(E, B).sum(0).sqrt_(), norm(dw_EOI))


def bias_wgrad(
    dy_NO: Tensor, starts: Tensor, experts: int, dtype: torch.dtype
) -> tuple[Tensor, Norms]:
    """db [E, O], or [O] without ``experts``, and its norms."""
    E = max(experts, 1)
    B = (len(starts) - 1) // E
    sums_SO = segment_sums(dy_NO, starts)
    total_EO = sums_SO.unflatten(0, (E, B)).sum(1)
    db = (total_EO if experts else total_EO[0]).to(dtype)
    norms_B = torch.linalg.vector_norm(norm_rows(sums_SO).view(E, B), dim=0)
    return db, (norms_B, norm(total_EO))


def tied_rows(x_NI: Tensor, dy_NO: Tensor, ids_1S: Tensor, starts: Tensor) -> Tensor:
    """[1, S, I]: row ``id`` of dy_bᵀ x_b for each id, where b is the document of the id's own row.
    S is a multiple of N, with the ids of several embeddings one after the other.
    """
    acc, ids_KN = accumulate_dtype(x_NI.dtype), ids_1S.view(-1, len(x_NI))
    rows_KNI = x_NI.new_zeros((*ids_KN.shape, x_NI.shape[1]), dtype=acc)
    bounds = starts.tolist()
    for start, end in zip(bounds, bounds[1:]):
        of_document = slice(start, end)
        ids_KT = ids_KN[:, of_document]
        dy_TS = dy_NO[of_document].index_select(1, ids_KT.flatten()).to(acc)
        rows_SI = dy_TS.T @ x_NI[of_document].to(acc)
        rows_KNI[:, of_document] = rows_SI.view(*ids_KT.shape, x_NI.shape[1])
    return rows_KNI.flatten(0, 1)[None]


def segment_sums(t_NF: Tensor, starts: Tensor) -> Tensor:
    """[S, F]: the sum over each segment's rows."""
    segment_N = samples_of_rows(starts)
    acc, S = accumulate_dtype(t_NF.dtype), len(starts) - 1
    inside = t_NF[starts[-1] - len(segment_N) : starts[-1]]
    return t_NF.new_zeros((S, t_NF.shape[1]), dtype=acc).index_add_(0, segment_N, inside.to(acc))


def samples_of_rows(starts: Tensor) -> Tensor:
    """The segment of each row, from the start of the first segment to the end of the last."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())


def _short_sqnorms(
    x_NI: Tensor, dy_NO: Tensor, short: list[tuple[int, int, int]], sqnorm_S: Tensor
) -> None:
    """Fill in the squared norms of short segments, many at a time, padded with zeros to the longest
    of them.
    """
    short = sorted(short, key=lambda segment: segment[2] - segment[1])
    acc, width = accumulate_dtype(x_NI.dtype), x_NI.shape[1] + dy_NO.shape[1]
    while short:
        longest = short[-1][2] - short[-1][1]
        group = short[-max(1, PADDED // (longest * width)) :]
        del short[-len(group) :]
        index, start, end = torch.tensor(group, device=x_NI.device).unbind(1)
        row_ST = start[:, None] + torch.arange(longest, device=x_NI.device)
        outside = (row_ST >= end[:, None])[..., None]
        row_ST = row_ST.minimum(end[:, None] - 1)
        x_STI, dy_STO = (t[row_ST].to(acc).masked_fill_(outside, 0.0) for t in (x_NI, dy_NO))
        sqnorm_S[index] = gram_sqnorms(x_STI, dy_STO)
