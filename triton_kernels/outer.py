# SPDX-License-Identifier: Apache-2.0
"""Σ_b dy_bᵀ x_b and the squared norm of each term, by the route of ``crossovers.py``."""

import functools

import torch
import triton
from torch import Tensor

from gnsfast.ops import backends, extension
from gnsfast.reference import one_token_metric, root_metric
from gnsfast.signatures import Metric
from gnsfast.tensors import set_columns
from gnsfast.triton_kernels import gram
from gnsfast.triton_kernels import linear_wgrad as fused_kernel
from gnsfast.triton_kernels.configs import NARROW, Config, candidates
from gnsfast.triton_kernels.crossovers import linear_route
from gnsfast.triton_kernels.sqnorms import sums_wgrad, with_sum
from gnsfast.triton_kernels.tiles import unit_inner
from gnsfast.triton_kernels.tuning import choose

Links = tuple[Tensor, Tensor]


def outer_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dtype: torch.dtype,
    metric: Metric | None = None,
    links: Links | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dW [O, I], in ``out`` if given, and the squared norms [M, B + 1] of dy_bᵀ x_b and their sum.

    The route is always fused with ``links``, and with a ``metric`` unless samples have one token.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    dw_OI = x_BTI.new_empty((O, I), dtype=dtype) if out is None else out
    if B * T * I * O == 0:
        if links is not None:
            links[1].zero_()
        return dw_OI.zero_(), x_BTI.new_zeros((1 + (metric is not None), B + 1))
    if links is not None or (metric is not None and T > 1):
        route = "fused"
    else:
        route = linear_route(B, T, I, O, x_BTI)
    if route == "fused":
        return dw_OI, fused_wgrad(x_BTI, dy_BTO, dw_OI, links=links, metric=metric)
    dense_wgrad(x_BTI, dy_BTO, dw_OI)
    if route == "gram":
        return dw_OI, with_sum(gram.gram(unit_inner(x_BTI), unit_inner(dy_BTO)), dw_OI)
    x_BI, dy_BO = x_BTI[:, 0], dy_BTO[:, 0]
    norms = with_sum(token_sqnorms(x_BI, dy_BO)[0], dw_OI)
    if metric is not None:
        root_OI = root_metric(*metric, torch.float32)
        weighed_B = one_token_metric(x_BI.float(), dy_BO.float(), root_OI)
        norms = torch.cat([norms, with_sum(weighed_B, root_OI.mul_(dw_OI))])
    return dw_OI, norms


def fused_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor,
    *,
    add: bool = False,
    links: Links | None = None,
    metric: Metric | None = None,
    config: Config | None = None,
) -> Tensor:
    """Fill ``dw_OI``, or add to it with ``add``. Returns the squared norms of each sample's dy_bᵀ
    x_b and of their sum, float64 [M, B + 1].
    """
    x, dy = unit_inner(x_BTI), unit_inner(dy_BTO)
    plain = links is None and metric is None
    extended = config is None and plain and backends.backend("cuda") == "cuda"
    if extended and extension.takes(x, dy, dw_OI, add):
        rows = x.new_empty((1, len(x) + 2), dtype=torch.float32)
        extension.linear_wgrad(x, dy, dw_OI, None, rows, add)
        return rows[:, :-1].double()
    (_, T, I), O = x.shape, dy.shape[2]
    tile = NARROW[0]  # for unaligned rows, loaded once for each block of the other operand
    x, dy = fused_kernel.padded(x, O / tile.block_o), fused_kernel.padded(dy, I / tile.block_i)
    if config is None:
        # Rows of dW that no wide store can write need as many registers as unaligned loads.
        aligned = fused_kernel.aligned(x) and fused_kernel.aligned(dy) and I % 16 == 0
        configs = candidates(x.dtype, aligned, metric is not None, links is not None)
        tma = fused_kernel.fits_tma(x) and fused_kernel.fits_tma(dy)
        key = ("linear_wgrad", I, O, triton.next_power_of_2(T), x.dtype, dw_OI.dtype, tma)
        key = key if metric is None else (*key, "metric", metric[0].dtype)
        key = key if links is None else (*key, "links")
        scratch = functools.cache(lambda: torch.empty_like(dw_OI))  # tuning must not add to dW
        measured = functools.partial(fused_kernel.fused, x, dy, links=links, metric=metric)
        config = choose(key, configs, lambda c: measured(scratch(), c))
    partial = fused_kernel.fused(x, dy, dw_OI, config, add=add, links=links, metric=metric)
    norms = partial.sum(-2, dtype=torch.float64)
    return norms[None] if metric is None else norms


def token_sqnorms(x_BI: Tensor, dy_BO: Tensor) -> tuple[Tensor, Tensor]:
    """‖x_b‖² ‖dy_b‖² and ‖dy_b‖² of samples of one token, both [B] float32."""
    x, dy = unit_inner(x_BI), unit_inner(dy_BO)
    if backends.backend("cuda") == "cuda" and extension.takes_tokens(x, dy):
        return extension.token_sqnorms(x, dy)
    return gram.token_sqnorms(x, dy)


def dense_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dw_OI: Tensor) -> None:
    """Fill ``dw_OI`` with ``dy.flatten(0, 1).T @ x.flatten(0, 1)``. If it has another dtype than
    ``x``, the product is float32 until it is copied.
    """
    x_NI, dy_NO = x_BTI.flatten(0, 1), dy_BTO.flatten(0, 1)
    if x_NI.dtype == dw_OI.dtype:
        torch.mm(dy_NO.T, x_NI, out=dw_OI)
    elif x_NI.dtype != torch.float32 and x_NI.is_cuda and not torch.version.hip:
        dw_OI.copy_(torch.mm(dy_NO.T, x_NI, out_dtype=torch.float32))
    else:
        dw_OI.copy_(dy_NO.float().T @ x_NI.float())


def bias_wgrad(
    dy_BTO: Tensor, dtype: torch.dtype, metric: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """db and the squared norms of the samples' gradients and of their sum."""
    B, T, O = dy_BTO.shape
    if T == 1 and B * O and metric is None:
        _, sqnorm_B = token_sqnorms(dy_BTO[:, 0], dy_BTO[:, 0])
        db_O = dy_BTO[:, 0].sum(0, dtype=torch.float32)
        return db_O.to(dtype), with_sum(sqnorm_B, db_O[None])
    return sums_wgrad(dy_BTO.sum(1, dtype=torch.float32), dtype, metric)


def tied_slots(ids_BS: Tensor, dy_BTO: Tensor, x_BTI: Tensor) -> Links:
    """The slot of ``rows`` [B, S, I] for each row o of a sample's gradient, and ``rows`` itself."""
    rows_BSI = x_BTI.new_empty((*ids_BS.shape, x_BTI.shape[2]), dtype=torch.float32)
    slots_BO = x_BTI.new_full((len(x_BTI), dy_BTO.shape[2]), -1, dtype=torch.int32)
    # For a repeated id any one slot is kept: all of its uses read their row from that slot.
    position_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    set_columns(slots_BO, ids_BS.long(), position_BS.expand_as(ids_BS))
    return slots_BO, rows_BSI


def tied_rows(ids_BS: Tensor, slots_BO: Tensor, rows_BSI: Tensor) -> Tensor:
    """[B, S, I]: each id's row of its sample's gradient."""
    kept_BS = slots_BO.gather(1, ids_BS.long()).long()
    return rows_BSI.gather(1, kept_BS[..., None].expand_as(rows_BSI))
