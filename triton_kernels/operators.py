# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU: the kernels of this folder behind the signatures of ``signatures.py``."""

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.signatures import (
    AttentionBackward,
    AttentionForward,
    EmbeddingWgrad,
    InProjectionWgrad,
    LinearWgrad,
    NormBackward,
    Parameters,
    Pattern,
    metric_of,
    refuse_with_segments,
)
from gnsfast.triton_kernels import attention_backward as attention_kernels
from gnsfast.triton_kernels import attention_forward as attention_kernel
from gnsfast.triton_kernels import embedding, norms, segments
from gnsfast.triton_kernels.conv import conv_wgrad as conv_wgrad
from gnsfast.triton_kernels.outer import bias_wgrad, outer_wgrad, tied_rows, tied_slots
from gnsfast.triton_kernels.sqnorms import probe_rows
from gnsfast.triton_kernels.tiles import check_dtypes, unit_inner

SMALL_VOCABULARY = 256
"""At most so many ids are one-hot rows of a linear layer. With few ids the runs of tokens are long,
and each is one program: 10 ms for two ids of 131k tokens (counted)."""


def linear_wgrad(a: LinearWgrad) -> tuple[Tensor, ...]:
    """See ``LinearWgrad``."""
    check_dtypes("linear_wgrad", a.x_BTI, a.dy_BTO)
    if a.starts is not None:
        refuse_with_segments("linear_wgrad", constants_P2=a.constants_P2, ids_BS=a.ids_BS)
        return segments.linear_wgrad(a)
    x, dy = a.x_BTI, a.dy_BTO
    dw, db = (x.new_empty(0, dtype=a.dtype) for _ in range(2))
    linked = x.new_empty(0, dtype=torch.float32)
    found = []
    if a.weight:
        left, right = (x, dy) if a.transposed else (dy, x)
        metric = metric_of(a.moments, a.constants_P2, 0)
        if metric is not None:
            metric = metric[0].contiguous(), metric[1]
        slots = None if a.ids_BS is None else tied_slots(a.ids_BS, dy, x)
        dw, norms_MB = outer_wgrad(right, left, a.dtype, metric, slots)
        found.append(norms_MB)
        if a.ids_BS is not None and slots is not None:
            linked = tied_rows(a.ids_BS, *slots)
    if a.bias:
        db, norms_MB = bias_wgrad(dy, a.dtype, metric_of(a.moments, a.constants_P2, -1))
        found.append(norms_MB)
    return dw, db, probe_rows(found, a.samples, x), linked


def in_projection_wgrad(a: InProjectionWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``InProjectionWgrad``."""
    x, heights = a.x_BTI[0], [dy.shape[2] for dy in a.dy_BTO]
    dw = x.new_empty((sum(heights), x.shape[2]) if a.weight else (0,), dtype=a.dtype)
    db = x.new_empty(sum(heights) if a.bias else 0, dtype=a.dtype)
    found = []
    for x, dy, out in zip(a.x_BTI, a.dy_BTO, dw.split(heights) if a.weight else ()):
        check_dtypes("in_projection_wgrad", x, dy)
        found.append(outer_wgrad(x, dy, a.dtype, out=out)[1])
    for dy, out in zip(a.dy_BTO, db.split(heights) if a.bias else ()):
        total_O, norms_1B = bias_wgrad(dy, a.dtype)
        out.copy_(total_O)
        found.append(norms_1B)
    return dw, db, probe_rows(found, len(x), x)


def embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    """See ``EmbeddingWgrad``."""
    check_dtypes("embedding_wgrad", a.dy_BTD)
    if a.starts is not None:
        refuse_with_segments("embedding_wgrad", constants_P2=a.constants_P2)
    elif a.num_embeddings <= SMALL_VOCABULARY:
        return _small_embedding_wgrad(a)
    return embedding.embedding_wgrad(a)


def _small_embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    metric = metric_of(a.moments, a.constants_P2, 0)
    if metric is not None:
        metric = metric[0].contiguous(), metric[1]
    ids_V = torch.arange(a.num_embeddings, device=a.ids_BT.device)
    onehot_BTV = (a.ids_BT[..., None] == ids_V) & (ids_V != a.padding_idx)
    dw, norms_MB = outer_wgrad(a.dy_BTD, onehot_BTV.to(a.dy_BTD.dtype), a.dtype, metric)
    return dw, probe_rows([norms_MB.view(-1, a.samples + 1)], a.samples, a.dy_BTD)


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
