# SPDX-License-Identifier: Apache-2.0
"""The operators of ``gnsfast.ops`` whose samples are segments of one list of rows, on a GPU."""

import torch
from torch import Tensor

from gnsfast.triton_kernels import embedding, segments
from gnsfast.triton_kernels.sqnorms import probe_rows, row_sqnorms, with_sum
from gnsfast.triton_kernels.tiles import check_dtypes


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
    check_dtypes("linear_wgrad_segments", x_NI, dy_NO)
    B = (len(starts) - 1) // experts
    dw = db = x_NI.new_empty(0, dtype=dtype)
    rows = []
    if weight:
        left, right = (x_NI, dy_NO) if transposed else (dy_NO, x_NI)
        dw, sqnorm_B1 = segments.outer_wgrad(right, left, starts, experts, dtype)
        rows.append(sqnorm_B1)
    if bias:
        sums_SO = segments.segment_sums(dy_NO, starts)
        db_EO = sums_SO.unflatten(0, (experts, B)).sum(1)
        sqnorm_B = row_sqnorms(sums_SO).view(experts, B).sum(0)
        db = db_EO.to(dtype)
        rows.append(with_sum(sqnorm_B, db_EO))
    return dw, db, probe_rows(rows, x_NI.new_empty((B, 0)))


def segment_sums(t_NF: Tensor, starts: Tensor) -> Tensor:
    return segments.segment_sums(t_NF, starts)


def embedding_wgrad_segments(
    dy_ND: Tensor,
    ids_N: Tensor,
    starts: Tensor,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_dtypes("embedding_wgrad_segments", dy_ND)
    row_N = torch.arange(len(ids_N), device=ids_N.device, dtype=starts.dtype)
    sample_N = torch.searchsorted(starts[1:-1].contiguous(), row_N, right=True)
    B = len(starts) - 1
    dw, sqnorm_1N, total_1 = embedding.rows_wgrad(
        dy_ND, ids_N, sample_N, B, num_embeddings, padding_idx, dtype
    )
    sqnorm_B = segments.segment_sums(sqnorm_1N.mT, starts)[:, 0].double()
    row = torch.cat([sqnorm_B, total_1])
    return dw, probe_rows([row], dy_ND.new_empty((B, 0)))
