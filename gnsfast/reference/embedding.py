# SPDX-License-Identifier: Apache-2.0
"""Embeddings: the weight's gradient, with every sample's squared norm."""

import torch
from torch import Tensor

from gnsfast.reference.rows import Norms, norm, norm_rows, probe_rows
from gnsfast.reference.segments import samples_of_rows
from gnsfast.signatures import EmbeddingWgrad
from gnsfast.tensors import accumulate_dtype


def sample_sums(a: EmbeddingWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """The S rows of all samples' gradients that are not zero [S, D], one for each pair of sample
    and id, and the sample and id of each row. Rows of the same id are added within a sample.
    """
    dy_ND, ids_N, V = a.dy_BTD.flatten(0, -2), a.ids_BT.flatten(), a.num_embeddings
    if a.starts is None:
        sample_B = torch.arange(a.samples, device=ids_N.device)
        sample_N = sample_B.repeat_interleave(a.ids_BT.shape[1])
    else:
        sample_N = samples_of_rows(a.starts)
    keep = slice(None) if a.padding_idx < 0 else ids_N != a.padding_idx
    dy_ND = dy_ND[keep].to(accumulate_dtype(dy_ND.dtype))
    key_S, of_N = torch.unique((sample_N * V + ids_N)[keep], return_inverse=True)
    sum_SD = dy_ND.new_zeros((len(key_S), dy_ND.shape[1])).index_add_(0, of_N, dy_ND)
    return sum_SD, key_S // max(V, 1), key_S % max(V, 1)


def embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    """See ``EmbeddingWgrad``."""
    sum_SD, sample_S, id_S = sample_sums(a)
    dw_VD = sum_SD.new_zeros((a.num_embeddings, sum_SD.shape[1])).index_add_(0, id_S, sum_SD)
    sqnorm_B = sum_SD.new_zeros(a.samples, dtype=torch.float64)
    sqnorm_B.index_add_(0, sample_S, norm_rows(sum_SD).double().square_())
    norms: Norms = (sqnorm_B.sqrt_(), norm(dw_VD))
    return dw_VD.to(a.dtype), probe_rows([norms], a.samples, sum_SD)


def embedding_norms(a: EmbeddingWgrad) -> Tensor:
    """The probe row of ``embedding_wgrad``, which makes dW."""
    return embedding_wgrad(a)[1]
