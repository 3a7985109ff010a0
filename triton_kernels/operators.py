# SPDX-License-Identifier: Apache-2.0
"""The operators of ``gnsfast.ops`` on a GPU: the signatures, shapes and results of ``reference.py``
by the kernels of this folder.

Plain sums (over tokens, over partials) are torch reductions, as they are in the plain backward
pass.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from gnsfast.ops import backends, extension
from gnsfast.reference import Parameters, Pattern, attention, conv
from gnsfast.tensors import set_columns
from gnsfast.triton_kernels import attention_backward as attention_kernels
from gnsfast.triton_kernels import attention_forward as attention_kernel
from gnsfast.triton_kernels import embedding, gram, norms
from gnsfast.triton_kernels import linear_wgrad as fused_kernel
from gnsfast.triton_kernels.configs import NARROW, Config, candidates
from gnsfast.triton_kernels.routes import linear_route
from gnsfast.triton_kernels.segment_operators import (
    embedding_wgrad_segments as embedding_wgrad_segments,
)
from gnsfast.triton_kernels.segment_operators import linear_wgrad_segments as linear_wgrad_segments
from gnsfast.triton_kernels.segment_operators import segment_sums as segment_sums
from gnsfast.triton_kernels.sqnorms import probe_rows, row_sqnorms, with_sum
from gnsfast.triton_kernels.tiles import check_dtypes, unit_inner
from gnsfast.triton_kernels.tuning import choose

Links = tuple[Tensor, Tensor]

PATCHES = 1 << 26
"""Elements of a convolution's patches, and of its samples' gradients, in memory at a time: 128 MiB
in bfloat16."""

SMALL_VOCABULARY = 256
"""Few ids are long runs of tokens, one program each: 10 ms for two ids of 131k tokens (counted). As
one-hot rows they are a linear layer."""


def linear_wgrad(
    x_BTI: Tensor, dy_BTO: Tensor, weight: bool, bias: bool, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    check_dtypes("linear_wgrad", x_BTI, dy_BTO)
    dw = db = x_BTI.new_empty(0, dtype=dtype)
    rows = []
    if weight:
        left, right = (x_BTI, dy_BTO) if transposed else (dy_BTO, x_BTI)
        dw, sqnorm_B1 = outer_wgrad(right, left, dtype)
        rows.append(sqnorm_B1)
    if bias:
        db, sqnorm_B1 = bias_wgrad(dy_BTO, dtype)
        rows.append(sqnorm_B1)
    return dw, db, probe_rows(rows, x_BTI)


def in_projection_wgrad(
    x_BTI: list[Tensor], dy_BTO: list[Tensor], weight: bool, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, heights = x_BTI[0], [dy.shape[2] for dy in dy_BTO]
    dw = x.new_empty((sum(heights), x.shape[2]) if weight else (0,), dtype=dtype)
    db = x.new_empty(sum(heights) if bias else 0, dtype=dtype)
    rows = []
    for x, dy, out in zip(x_BTI, dy_BTO, dw.split(heights) if weight else ()):
        check_dtypes("in_projection_wgrad", x, dy)
        rows.append(outer_wgrad(x, dy, dtype, out=out)[1])
    for dy, out in zip(dy_BTO, db.split(heights) if bias else ()):
        total_O, sqnorm_B1 = bias_wgrad(dy, dtype)
        out.copy_(total_O)
        rows.append(sqnorm_B1)
    return dw, db, probe_rows(rows, x)


def linear_wgrad_tied(
    x_BTI: Tensor, dy_BTO: Tensor, ids_BS: Tensor, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_dtypes("linear_wgrad_tied", x_BTI, dy_BTO)
    links = tied_slots(ids_BS, dy_BTO, x_BTI)
    dw, sqnorm_B1 = outer_wgrad(x_BTI, dy_BTO, dtype, links=links)
    rows_BSI = tied_rows(ids_BS, *links)
    rows = [sqnorm_B1]
    db = dw.new_empty(0)
    if bias:
        db, sqnorm_B1 = bias_wgrad(dy_BTO, dtype)
        rows.append(sqnorm_B1)
    return dw, db, probe_rows(rows, x_BTI), rows_BSI


def tied_slots(ids_BS: Tensor, dy_BTO: Tensor, x_BTI: Tensor) -> Links:
    """Which slot of ``rows`` [B, S, I] row o of a sample's gradient goes to, and these rows."""
    rows_BSI = x_BTI.new_empty((*ids_BS.shape, x_BTI.shape[2]), dtype=torch.float32)
    slots_BO = x_BTI.new_full((len(x_BTI), dy_BTO.shape[2]), -1, dtype=torch.int32)
    # Of ids that repeat one slot is kept, whichever: all of them read their row from it.
    position_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    set_columns(slots_BO, ids_BS.long(), position_BS.expand_as(ids_BS))
    return slots_BO, rows_BSI


def tied_rows(ids_BS: Tensor, slots_BO: Tensor, rows_BSI: Tensor) -> Tensor:
    """Each id's own row of the sample's gradient."""
    kept_BS = slots_BO.gather(1, ids_BS.long()).long()
    return rows_BSI.gather(1, kept_BS[..., None].expand_as(rows_BSI))


def outer_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dtype: torch.dtype,
    links: Links | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dW [O, I], in ``out`` if given, and the squared norms [B + 1] of dy_bᵀ x_b and of their sum,
    by the route of ``routes.py``; with ``links`` always fused.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    dw_OI = x_BTI.new_empty((O, I), dtype=dtype) if out is None else out
    if B * T * I * O == 0:
        if links is not None:
            links[1].zero_()
        return dw_OI.zero_(), x_BTI.new_zeros(B + 1)
    route = "fused" if links is not None else linear_route(B, T, I, O, x_BTI)
    if route == "fused":
        return dw_OI, fused_wgrad(x_BTI, dy_BTO, dw_OI, links=links)
    dense_wgrad(x_BTI, dy_BTO, dw_OI)
    if route == "closed":
        sqnorm_B, _ = token_sqnorms(x_BTI[:, 0], dy_BTO[:, 0])
    else:
        sqnorm_B = gram.gram(unit_inner(x_BTI), unit_inner(dy_BTO))
    return dw_OI, with_sum(sqnorm_B, dw_OI)


def fused_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor,
    *,
    add: bool = False,
    links: Links | None = None,
    metric: Links | None = None,
    config: Config | None = None,
) -> Tensor:
    """Fill (or, with ``add``, add to) ``dw_OI``; the squared norms [B + 1] of what each sample gave
    and of their sum, float64; with a ``metric`` [2, B + 1].
    """
    x, dy = unit_inner(x_BTI), unit_inner(dy_BTO)
    plain = links is None and metric is None
    extended = config is None and plain and backends.backend("cuda") == "cuda"
    if extended and extension.takes(x, dy, dw_OI, add):
        return extension.linear_wgrad(x, dy, dw_OI, add).sum(0, dtype=torch.float64)
    (_, T, I), O = x.shape, dy.shape[2]
    tile = NARROW[0]  # of unaligned rows: each block of the other operand's features loads them
    x, dy = fused_kernel.padded(x, O / tile.block_o), fused_kernel.padded(dy, I / tile.block_i)
    if config is None:
        # Rows of dW that no wide store takes need registers as unaligned loads do.
        aligned = fused_kernel.aligned(x) and fused_kernel.aligned(dy) and I % 16 == 0
        configs = candidates(x.dtype, aligned, metric is not None, links is not None)
        tma = fused_kernel.fits_tma(x) and fused_kernel.fits_tma(dy)
        key = ("linear_wgrad", I, O, triton.next_power_of_2(T), x.dtype, dw_OI.dtype, tma)
        key = key if metric is None else (*key, "metric", metric[0].dtype)
        key = key if links is None else (*key, "links")
        scratch = functools.cache(lambda: torch.empty_like(dw_OI))  # dw itself may be added to
        measured = functools.partial(fused_kernel.fused, x, dy, links=links, metric=metric)
        config = choose(key, configs, lambda c: measured(scratch(), c))
    partial = fused_kernel.fused(x, dy, dw_OI, config, add=add, links=links, metric=metric)
    return partial.sum(-2, dtype=torch.float64)


def token_sqnorms(x_BI: Tensor, dy_BO: Tensor) -> tuple[Tensor, Tensor]:
    """‖x_b‖² ‖dy_b‖² and ‖dy_b‖² of samples of one token, both [B] float32."""
    x, dy = unit_inner(x_BI), unit_inner(dy_BO)
    if backends.backend("cuda") == "cuda" and extension.takes_tokens(x, dy):
        return extension.token_sqnorms(x, dy)
    return gram.token_sqnorms(x, dy)


def dense_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dw_OI: Tensor) -> None:
    """Fill ``dw_OI`` with ``dy.flatten(0, 1).T @ x.flatten(0, 1)``, accumulated and kept in float32
    where its dtype is wider.
    """
    x_NI, dy_NO = x_BTI.flatten(0, 1), dy_BTO.flatten(0, 1)
    if x_NI.dtype == dw_OI.dtype:
        torch.mm(dy_NO.T, x_NI, out=dw_OI)
    elif x_NI.dtype != torch.float32 and x_NI.is_cuda and not torch.version.hip:
        dw_OI.copy_(torch.mm(dy_NO.T, x_NI, out_dtype=torch.float32))
    else:
        dw_OI.copy_(dy_NO.float().T @ x_NI.float())


def bias_wgrad(dy_BTO: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """db and the squared norms [B + 1] of the samples' own and of their sum."""
    B, T, O = dy_BTO.shape
    if T == 1 and B * O:
        _, sqnorm_B = token_sqnorms(dy_BTO[:, 0], dy_BTO[:, 0])
        db_O = dy_BTO[:, 0].sum(0, dtype=torch.float32)
        return db_O.to(dtype), with_sum(sqnorm_B, db_O[None])
    return sums_wgrad(dy_BTO.sum(1, dtype=torch.float32), dtype)


def sums_wgrad(g_BN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of a parameter, and its squared norms [B + 1], from its samples' gradients."""
    total_N = g_BN.sum(0)
    return total_N.to(dtype), with_sum(row_sqnorms(g_BN), total_N[None])


def parameter_grads(
    g_BN: list[Tensor | None], parameters: Sequence[Tensor | None], none: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters' gradients, ``none`` where there is none, and the squared norms [B + 1] of the
    others.
    """
    grads, rows = [], []
    for g, parameter in zip(g_BN, parameters):
        if g is None or parameter is None:
            grads.append(none.clone())  # no result of an operator is another one
        else:
            grad, sqnorm_B1 = sums_wgrad(g, parameter.dtype)
            grads.append(grad)
            rows.append(sqnorm_B1)
    return grads, rows


def embedding_wgrad(
    dy_BTD: Tensor, ids_BT: Tensor, num_embeddings: int, padding_idx: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check_dtypes("embedding_wgrad", dy_BTD)
    if num_embeddings <= SMALL_VOCABULARY:
        onehot_BTV = one_hot(ids_BT, num_embeddings, padding_idx)
        dw, sqnorm_B1 = outer_wgrad(dy_BTD, onehot_BTV.to(dy_BTD.dtype), dtype)
        return dw, probe_rows([sqnorm_B1], dy_BTD)
    dw, sqnorm_B1 = embedding.embedding_wgrad(dy_BTD, ids_BT, num_embeddings, padding_idx, dtype)
    return dw, probe_rows([sqnorm_B1], dy_BTD)


def one_hot(ids_BT: Tensor, num_embeddings: int, padding_idx: int) -> Tensor:
    ids_V = torch.arange(num_embeddings, device=ids_BT.device)
    return (ids_BT[..., None] == ids_V) & (ids_V != padding_idx)


def layer_norm_backward(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    w_N: Tensor | None,
    b_N: Tensor | None,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_dtypes("layer_norm_backward", dy_BTN, x_BTN, one=False)
    dx, dw_BN, db_BN = norms.norm_backward(
        *(unit_inner(dy_BTN), unit_inner(x_BTN), (mean_BT1, rstd_BT1)),
        *(w_N if w_N is None else unit_inner(w_N), weight, bias),
    )
    none = dx.new_empty(0, dtype=torch.float32)
    (dw, db), rows = parameter_grads([dw_BN, db_BN], [w_N, b_N], none)
    return dx, dw, db, probe_rows(rows, x_BTN)


def rms_norm_backward(
    dy_BTN: Tensor, x_BTN: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_dtypes("rms_norm_backward", dy_BTN, x_BTN, one=False)
    dx, dw_BN, _ = norms.norm_backward(
        *(unit_inner(dy_BTN), unit_inner(x_BTN), None, unit_inner(w_N), True, False, eps, offset)
    )
    assert dw_BN is not None
    dw, sqnorm_B1 = sums_wgrad(dw_BN, w_N.dtype)
    return dx, dw, probe_rows([sqnorm_B1], x_BTN)


def conv_wgrad(
    x: Tensor,
    dy: Tensor,
    samples: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    weight: bool,
    bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    check_dtypes("conv_wgrad", x, dy)
    (n, C), O = x.shape[:2], dy.shape[1]
    rows_a_sample = n // max(samples, 1)
    dw = db = x.new_empty(0, dtype=dtype)
    sqnorms = []
    if weight:
        K = C // groups * math.prod(kernel)
        dw_GOK = x.new_zeros((groups, O // groups, K), dtype=torch.float32)
        positions = dy.shape[2:].numel() * rows_a_sample
        a_sample = groups * K * (positions if groups == 1 else max(positions, O // groups))
        together = max(1, PATCHES // max(1, a_sample))
        parts = []
        for first in range(0, samples, together):
            rows = slice(first * rows_a_sample, (first + together) * rows_a_sample)
            cols_nLK = conv.unfold(x[rows], kernel, stride, padding, dilation)
            cols_BTGK = cols_nLK.reshape(-1, positions, groups, K)
            dy_BTO = dy[rows].flatten(2).mT.reshape(-1, positions, O)
            parts.append(_add_groups(cols_BTGK, dy_BTO, dw_GOK))
        sqnorm_B = torch.cat(parts) if parts else x.new_zeros(0)
        sqnorms.append(with_sum(sqnorm_B, dw_GOK.flatten(1)))
        dw = dw_GOK.reshape(O, C // groups, *kernel).to(dtype)
    if bias:
        sum_nO = dy.flatten(2).sum(2, dtype=torch.float32)
        db, sqnorm_B1 = sums_wgrad(sum_nO.reshape(samples, rows_a_sample, O).sum(1), dtype)
        sqnorms.append(sqnorm_B1)
    return dw, db, probe_rows(sqnorms, x.new_empty((samples, 0)))


def _add_groups(cols_BTGK: Tensor, dy_BTO: Tensor, dw_GOK: Tensor) -> Tensor:
    """Add the samples' gradients into ``dw_GOK``; their squared norms [B], over all groups."""
    (B, T, G, K), O = cols_BTGK.shape, dy_BTO.shape[2] // dw_GOK.shape[0]
    if G == 1 and B * T * K * O:
        return fused_wgrad(cols_BTGK[:, :, 0], dy_BTO, dw_GOK[0], add=True)[:-1]
    # Small products, one for each group: all samples' gradients by one batched product.
    dy_BGOT = dy_BTO.unflatten(2, (G, O)).permute(0, 2, 3, 1).flatten(0, 1)
    cols_BGTK = cols_BTGK.transpose(1, 2).flatten(0, 1)
    g_BGOK = torch.bmm(dy_BGOT.float(), cols_BGTK.float()).reshape(B, G, O, K)
    dw_GOK += g_BGOK.sum(0)
    return row_sqnorms(g_BGOK.flatten(1))


def attention_forward(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if nothing_to_do(q_BHTD, k_BKSD, *arguments):
        return attention.attention_forward(q_BHTD, k_BKSD, v_BKSD, *arguments)
    q, k, v = (unit_inner(t) for t in (q_BHTD, k_BKSD, v_BKSD))
    return attention_kernel.attention_forward(q, k, v, *attention_arguments(q, k, arguments))


def attention_backward(
    do_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    o_BHTD: Tensor,
    highest_BHT: Tensor,
    inverse_BHT: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    if nothing_to_do(q_BHTD, k_BKSD, *arguments):
        return attention.attention_backward(
            do_BHTD, q_BHTD, k_BKSD, v_BKSD, o_BHTD, highest_BHT, inverse_BHT, *arguments
        )
    *flat, samples, wanted = arguments
    do, q, k, v = (unit_inner(t) for t in (do_BHTD, q_BHTD, k_BKSD, v_BKSD))
    p, pattern = attention_arguments(q, k, flat)
    dq, dk, dv, g = attention_kernels.attention_backward(
        do, q, k, v, o_BHTD, highest_BHT, inverse_BHT, p, pattern, wanted
    )
    of_samples = [t if t is None else t.unflatten(0, (samples, -1)).sum(1) for t in g]
    grads, rows = parameter_grads(of_samples, p, q.new_empty(0))
    return dq, dk, dv, *grads, probe_rows(rows, q.new_empty((samples, 0)))


def nothing_to_do(q: Tensor, k: Tensor, *arguments: Any) -> bool:
    """No query, no key or no document: a kernel would have no program."""
    return q.numel() * k.numel() == 0 or Pattern(*arguments[4:10]).programs(len(q)) == 0


def attention_arguments(q: Tensor, k: Tensor, flat: Any) -> tuple[Parameters, Pattern]:
    """The operators' flat arguments; a mask is float32, and broadcast to every head."""
    p = Parameters(*(t if t is None else unit_inner(t) for t in flat[:4]))
    pattern = Pattern(*flat[4:])
    if pattern.cu_seqlens is not None:
        pattern = pattern._replace(cu_seqlens=pattern.cu_seqlens.contiguous())
    if pattern.mask is not None:
        mask = pattern.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        pattern = pattern._replace(mask=mask.expand(*q.shape[:3], k.shape[2]))
    return p, pattern
