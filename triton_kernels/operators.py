# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU: the kernels of this folder behind the signatures of ``signatures.py``."""

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.reference import linear_grams as linear_grams
from gnsfast.signatures import (
    AttentionBackward,
    AttentionForward,
    EmbeddingWgrad,
    InProjectionWgrad,
    LinearSquares,
    LinearWgrad,
    Metric,
    NormBackward,
    Parameters,
    Pattern,
    metric_of,
    refuse_with_segments,
)
from gnsfast.triton_kernels import attention_backward as attention_kernels
from gnsfast.triton_kernels import attention_forward as attention_kernel
from gnsfast.triton_kernels import embedding, norms, segments
from gnsfast.triton_kernels import linear_squares as squares_kernel
from gnsfast.triton_kernels.conv import conv_wgrad as conv_wgrad
from gnsfast.triton_kernels.linear_plan import Bias
from gnsfast.triton_kernels.outer import bias_wgrad, outer_wgrad, tied_rows
from gnsfast.triton_kernels.tiles import check_dtypes, unit_inner

SMALL_VOCABULARY = 256
"""At most so many ids are one-hot rows of a linear layer: a product, without a sort."""


def linear_wgrad(a: LinearWgrad) -> tuple[Tensor, ...]:
    """See ``LinearWgrad``."""
    check_dtypes("linear_wgrad", a.x_BTI, a.dy_BTO)
    if a.starts is not None:
        refuse_with_segments("linear_wgrad", constants_P2=a.constants_P2, ids_BS=a.ids_BS)
        return segments.linear_wgrad(a)
    x, dy = unit_inner(a.x_BTI), unit_inner(a.dy_BTO)  # one copy for weight and bias
    dw, db, rows, linked = a.results()
    bias = Bias(dy, db, _contiguous(metric_of(a.moments, a.constants_P2, -1))) if a.bias else None
    if a.weight:
        left, right = (x, dy) if a.transposed else (dy, x)
        metric = _contiguous(metric_of(a.moments, a.constants_P2, 0))
        outer_wgrad(right, left, dw, rows, bias, metric)
        if a.ids_BS is not None:
            linked = tied_rows(a.ids_BS, dy, x)
    elif bias is not None:
        bias_wgrad(bias, rows)
    return dw, db, rows, linked


def linear_squares(a: LinearSquares) -> Tensor:
    """See ``LinearSquares``."""
    check_dtypes("linear_squares", a.x_BTI, a.dy_BTO)
    if a.x_BTI.shape[1] == 1:  # a product of squares
        return reference.linear_squares(a)
    left, right = (a.x_BTI, a.dy_BTO) if a.transposed else (a.dy_BTO, a.x_BTI)
    return squares_kernel.linear_squares(right, left)


def _contiguous(metric: Metric | None) -> Metric | None:
    return metric and (metric[0].contiguous(), metric[1])


def in_projection_wgrad(a: InProjectionWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``InProjectionWgrad``."""
    dw, db, rows = a.results()
    heights, parts = [dy.shape[2] for dy in a.dy_BTO], len(a.dy_BTO)
    dws = dw.split(heights) if a.weight else ()
    dbs = db.split(heights) if a.bias else ()
    for i, (x, dy) in enumerate(zip(a.x_BTI, a.dy_BTO)):
        check_dtypes("in_projection_wgrad", x, dy)
        dy = unit_inner(dy)
        bias = Bias(dy, dbs[i]) if a.bias else None
        if a.weight:
            outer_wgrad(x, dy, dws[i], rows[i::parts], bias)
        elif bias is not None:
            bias_wgrad(bias, rows[i::parts])
    return dw, db, rows


def embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    """See ``EmbeddingWgrad``."""
    check_dtypes("embedding_wgrad", a.dy_BTD)
    if a.starts is not None:
        refuse_with_segments("embedding_wgrad", constants_P2=a.constants_P2)
    elif a.num_embeddings <= SMALL_VOCABULARY:
        return _small_embedding_wgrad(a)
    return embedding.embedding_wgrad(a)


def _small_embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    ids_V = torch.arange(a.num_embeddings, device=a.ids_BT.device)
    onehot_BTV = (a.ids_BT[..., None] == ids_V) & (ids_V != a.padding_idx)
    dw, rows = a.results()
    metric = _contiguous(metric_of(a.moments, a.constants_P2, 0))
    outer_wgrad(a.dy_BTD, onehot_BTV.to(a.dy_BTD.dtype), dw, rows, metric=metric)
    return dw, rows


def norm_backward(a: NormBackward) -> tuple[Tensor, ...]:
    """See ``NormBackward``. For documents plain torch, since the kernel sums whole samples only."""
    check_dtypes("norm_backward", a.dy_BTF, a.x_BTF, one=False)
    if a.starts is not None:
        return reference.norm_backward_aten(a, segments.segment_sums)
    return norms.norm_backward(a)


def attention_forward(a: AttentionForward) -> tuple[Tensor, Tensor, Tensor]:
    """See ``AttentionForward``."""
    if nothing_to_do(a):
        return reference.attention_forward(a)
    q, k, v = (unit_inner(t) for t in (a.q_BHTD, a.k_BKSD, a.v_BKSD))
    return attention_kernel.attention_forward(q, k, v, *attention_arguments(a, q, k))


def attention_backward(a: AttentionBackward) -> tuple[Tensor, ...]:
    """See ``AttentionBackward``."""
    if nothing_to_do(a):
        return reference.attention_backward(a)
    q, k = unit_inner(a.q_BHTD), unit_inner(a.k_BKSD)
    return attention_kernels.attention_backward(a, q, k, *attention_arguments(a, q, k))


def nothing_to_do(a: AttentionForward | AttentionBackward) -> bool:
    """Whether there is no query, no key or no document: a kernel would have no program."""
    no_document = a.pattern.programs(len(a.q_BHTD)) == 0
    return a.q_BHTD.numel() * a.k_BKSD.numel() == 0 or no_document


def attention_arguments(
    a: AttentionForward | AttentionBackward, q: Tensor, k: Tensor
) -> tuple[Parameters, Pattern]:
    """The arguments as kernels take them: unit strides, and a float mask [B, H, T, S]."""
    p = Parameters(*(t if t is None else unit_inner(t) for t in a.parameters))
    pattern = a.pattern
    if pattern.cu_seqlens is not None:
        pattern = pattern._replace(cu_seqlens=pattern.cu_seqlens.contiguous())
    if pattern.mask is not None:
        mask = pattern.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        pattern = pattern._replace(mask=mask.expand(*q.shape[:3], k.shape[2]))
    return p, pattern
