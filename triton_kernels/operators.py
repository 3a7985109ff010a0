# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU: the kernels of this folder behind the signatures of ``signatures.py``."""

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.signatures import (
    AttentionBackward,
    AttentionForward,
    EmbeddingWgrad,
    LinearWgrad,
    NormBackward,
    Parameters,
    Pattern,
    empty_rows,
)
from gnsfast.triton_kernels import attention_backward as attention_kernels
from gnsfast.triton_kernels import attention_forward as attention_kernel
from gnsfast.triton_kernels import embedding, norms, segments
from gnsfast.triton_kernels.conv import conv_norms as conv_norms
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
        if a.ids_BS is not None:
            raise NotImplementedError("linear_wgrad takes no ids_BS where samples are segments")
        return segments.linear_wgrad(a)
    x, dy = unit_inner(a.x_BTI), unit_inner(a.dy_BTO)  # one copy for weight and bias
    dw, db, rows, linked = a.results()
    _fill_linear(a, x, dy, dw, db, rows)
    if a.weight and a.ids_BS is not None:
        linked = tied_rows(a.ids_BS, dy, x)
    return dw, db, rows, linked


def linear_norms(a: LinearWgrad) -> Tensor:
    """The probe rows of ``linear_wgrad``. No dW is in memory."""
    check_dtypes("linear_wgrad", a.x_BTI, a.dy_BTO)
    if a.starts is not None:
        return segments.linear_norms(a)
    rows = empty_rows(a.x_BTI, a.weight + a.bias, a.samples)
    _fill_linear(a, unit_inner(a.x_BTI), unit_inner(a.dy_BTO), None, None, rows)
    return rows


def _fill_linear(
    a: LinearWgrad, x: Tensor, dy: Tensor, dw: Tensor | None, db: Tensor | None, rows: Tensor
) -> None:
    bias = Bias(dy, db) if a.bias else None
    if a.weight:
        left, right = (x, dy) if a.transposed else (dy, x)
        outer_wgrad(right, left, dw, rows, bias)
    elif bias is not None:
        bias_wgrad(bias, rows)


def embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    """See ``EmbeddingWgrad``."""
    check_dtypes("embedding_wgrad", a.dy_BTD)
    dw, rows = a.results()
    _fill_embedding(a, dw, rows)
    return dw, rows


def embedding_norms(a: EmbeddingWgrad) -> Tensor:
    """The probe row of ``embedding_wgrad``. No dW is in memory."""
    check_dtypes("embedding_wgrad", a.dy_BTD)
    rows = empty_rows(a.dy_BTD, 1, a.samples)
    _fill_embedding(a, None, rows)
    return rows


def _fill_embedding(a: EmbeddingWgrad, dw: Tensor | None, rows: Tensor) -> None:
    if a.starts is not None or a.num_embeddings > SMALL_VOCABULARY:
        embedding.embedding_wgrad(a, dw, rows)
        return
    ids_V = torch.arange(a.num_embeddings, device=a.ids_BT.device)
    onehot_BTV = (a.ids_BT[..., None] == ids_V) & (ids_V != a.padding_idx)
    outer_wgrad(a.dy_BTD, onehot_BTV.to(a.dy_BTD.dtype), dw, rows)


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
