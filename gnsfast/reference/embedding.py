# SPDX-License-Identifier: Apache-2.0
"""Embeddings: the weight's gradient and every sample's squared norm."""

import torch
from torch import Tensor

from gnsfast.reference.rows import probe_row, sqnorm_rows, with_sum
from gnsfast.tensors import accumulate_dtype


def embedding_wgrad(
    dy_BTD: Tensor, ids_BT: Tensor, num_embeddings: int, padding_idx: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and ``sqnorm_PB`` of an embedding: rows of one id are added within a sample before
    they are squared.

    ``padding_idx`` (-1: none) takes no gradient.
    """
    B, T, _ = dy_BTD.shape
    sample_N = torch.arange(B, device=ids_BT.device).repeat_interleave(T)
    dw_VD, sqnorm_B1 = embedding_rows(
        dy_BTD.flatten(0, 1), ids_BT.flatten(), sample_N, B, num_embeddings, padding_idx
    )
    return dw_VD.to(dtype), probe_row(sqnorm_B1)[None]


def embedding_rows(
    dy_ND: Tensor, ids_N: Tensor, sample_N: Tensor, B: int, num_embeddings: int, padding_idx: int
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and [B + 1] squared norms, from rows of which ``sample_N`` says whose they are."""
    V = max(num_embeddings, 1)
    key_S, sum_SD = sums_by_id(dy_ND, ids_N, sample_N, num_embeddings, padding_idx)
    sqnorm_B = sum_SD.new_zeros(B, dtype=torch.float64)
    sqnorm_B.index_add_(0, key_S // V, sqnorm_rows(sum_SD))
    dw_VD = sum_SD.new_zeros((num_embeddings, dy_ND.shape[1])).index_add_(0, key_S % V, sum_SD)
    return dw_VD, with_sum(sqnorm_B, dw_VD)


def sums_by_id(
    dy_ND: Tensor, ids_N: Tensor, sample_N: Tensor, num_embeddings: int, padding_idx: int
) -> tuple[Tensor, Tensor]:
    """Each sample's rows of one id added: sample · ``num_embeddings`` + id [S], and the sums."""
    key_N = sample_N * num_embeddings + ids_N
    keep = slice(None) if padding_idx < 0 else ids_N != padding_idx
    dy_ND = dy_ND[keep].to(accumulate_dtype(dy_ND.dtype))
    key_S, segment_N = torch.unique(key_N[keep], return_inverse=True)
    return key_S, dy_ND.new_zeros((len(key_S), dy_ND.shape[1])).index_add_(0, segment_N, dy_ND)
