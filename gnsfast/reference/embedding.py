# SPDX-License-Identifier: Apache-2.0
"""Embeddings: the weight's gradient, with every sample's squared norm."""

import torch
from torch import Tensor

from gnsfast.reference.metric import root_metric
from gnsfast.reference.rows import Norms, metric_sqnorm, norm, norm_rows, probe_rows
from gnsfast.reference.segments import samples_of_rows
from gnsfast.signatures import EmbeddingWgrad, metric_of
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

    def by_sample(t_SD: Tensor) -> Tensor:
        sqnorm_B = t_SD.new_zeros(a.samples, dtype=torch.float64)
        squares_S = norm_rows(t_SD).double().square_()
        return sqnorm_B.index_add_(0, sample_S, squares_S).sqrt_()

    norms: Norms = [(by_sample(sum_SD), norm(dw_VD))]
    metric = metric_of(a.moments, a.constants_P2, 0)
    if metric is not None:
        v_VD, constants_2 = metric
        weighed_SD = sum_SD.mul_(root_metric(v_VD[id_S], constants_2, sum_SD.dtype))
        total = metric_sqnorm(dw_VD, v_VD, constants_2).sqrt_()
        norms.append((by_sample(weighed_SD), total[None]))
    return dw_VD.to(a.dtype), probe_rows([norms], a.samples, sum_SD)
