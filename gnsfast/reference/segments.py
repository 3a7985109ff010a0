# SPDX-License-Identifier: Apache-2.0
"""The formula of linear layers whose samples are segments of one list of rows, in plain PyTorch:
experts of a mixture, whose rows are sorted by expert and then by sample; with one expert, documents
of a packed row.

Legend: N rows, B samples, E experts, I in_features, O out_features. Segment s = e B + b is rows
``starts[s]`` to ``starts[s + 1]``: those of sample b that expert e was given.
"""

import torch
from torch import Tensor

from gnsfast.reference.embedding import embedding_rows
from gnsfast.reference.linear import gram_sqnorms, linear_route
from gnsfast.reference.rows import probe_row, sqnorm, sqnorm_rows
from gnsfast.tensors import accumulate_dtype

PADDED = 1 << 22
"""Elements of short segments, padded to one length, in memory at a time."""


def linear_wgrad_segments(
    x_NI: Tensor,
    dy_NO: Tensor,
    starts: Tensor,
    experts: int,
    weight: bool,
    bias: bool,
    transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dW [E, O, I], db [E, O] and ``sqnorm_PB`` of y = x W_eᵀ + b_e; an unwanted gradient comes
    back empty.

    Sample b's squared norm is Σ_e ‖dy_ebᵀ x_eb‖², that of the sum Σ_e ‖dW_e‖². ``starts`` is
    [E B + 1], not decreasing; rows after its last number are nobody's. With ``transposed`` the
    weight is stored as [E, I, O].
    """
    B = (len(starts) - 1) // experts
    bounds = starts.tolist()
    dw = db = x_NI.new_empty(0, dtype=dtype)
    rows = []
    if weight:
        left, right = (x_NI, dy_NO) if transposed else (dy_NO, x_NI)
        dw, sqnorm_B1 = _outer_wgrad(right, left, bounds, experts, B)
        dw = dw.to(dtype)
        rows.append(probe_row(sqnorm_B1))
    if bias:
        sums_SO = segment_sums(dy_NO, starts)
        sqnorm_S = sqnorm_rows(sums_SO)
        total_EO = sums_SO.unflatten(0, (experts, B)).sum(1)
        sqnorm_B1 = torch.cat([sqnorm_S.view(experts, B).sum(0), sqnorm(total_EO)[None]])
        db = total_EO.to(dtype)
        rows.append(probe_row(sqnorm_B1))
    empty = x_NI.new_empty((0, B + 2), dtype=torch.float32)
    return dw, db, torch.stack(rows) if rows else empty


def segment_sums(t_NF: Tensor, starts: Tensor) -> Tensor:
    """[S, F]: the sum over each segment's rows."""
    segment_N = samples_of_rows(starts)
    acc, S = accumulate_dtype(t_NF.dtype), len(starts) - 1
    inside = t_NF[starts[-1] - len(segment_N) : starts[-1]]
    return t_NF.new_zeros((S, t_NF.shape[1]), dtype=acc).index_add_(0, segment_N, inside.to(acc))


def samples_of_rows(starts: Tensor) -> Tensor:
    """The segment of each row from the first segment's beginning to the last one's end."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())


def embedding_wgrad_segments(
    dy_ND: Tensor,
    ids_N: Tensor,
    starts: Tensor,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and ``sqnorm_PB`` of an embedding; ``starts`` cover all rows."""
    dw_VD, sqnorm_B1 = embedding_rows(
        dy_ND, ids_N, samples_of_rows(starts), len(starts) - 1, num_embeddings, padding_idx
    )
    return dw_VD.to(dtype), probe_row(sqnorm_B1)[None]


def _outer_wgrad(
    x_NI: Tensor, dy_NO: Tensor, bounds: list[int], experts: int, B: int
) -> tuple[Tensor, Tensor]:
    """dW [E, O, I] and the squared norms [B + 1]: long segments by their own product, the short
    ones of experts that have no long one by Gram products, many at a time.
    """
    I, O = x_NI.shape[1], dy_NO.shape[1]
    acc = accumulate_dtype(x_NI.dtype)
    dw_EOI = x_NI.new_zeros((experts, O, I), dtype=acc)
    sqnorm_S = x_NI.new_zeros(experts * B, dtype=torch.float64)
    segments = [(s, *span) for s, span in enumerate(zip(bounds, bounds[1:]))]
    short = []
    for e in range(experts):
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
    sqnorm_B = sqnorm_S.view(experts, B).sum(0)
    return dw_EOI, torch.cat([sqnorm_B, sqnorm(dw_EOI)[None]])


def _short_sqnorms(
    x_NI: Tensor, dy_NO: Tensor, short: list[tuple[int, int, int]], sqnorm_S: Tensor
) -> None:
    """Fill in the squared norms of short segments, padded with zeros to the longest of a group."""
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
