# SPDX-License-Identifier: Apache-2.0
"""Σ_b dy_bᵀ x_b and the squared norm of each term, by the route of ``crossovers.py``, and what goes
with it: the bias's gradient, and a tied head's rows.
"""

import torch
import triton
from torch import Tensor

from gnsfast.ops import backends, extension
from gnsfast.tensors import wide_bmm
from gnsfast.triton_kernels import gram
from gnsfast.triton_kernels import linear_wgrad as fused_kernel
from gnsfast.triton_kernels.configs import Config, candidates, multiprocessors
from gnsfast.triton_kernels.crossovers import linear_route
from gnsfast.triton_kernels.linear_plan import (
    Bias,
    Finish,
    Squares,
    bias_strides,
    finish,
    memory,
    plan,
)
from gnsfast.triton_kernels.operands import operand, padded, reading
from gnsfast.triton_kernels.tiles import tf32_allowed, unit_inner
from gnsfast.triton_kernels.tuning import choose


def outer_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor | None,
    rows: Tensor,
    bias: Bias | None = None,
    route: str | None = None,
) -> None:
    """Fill dW, db and the probe ``rows`` [P, B + 2] of weight and bias. The ``bias`` sums
    ``dy_BTO``; that of a weight that is stored transposed sums ``x_BTI``. Without ``dw_OI`` no dW
    is in memory on any route.

    ``route`` is that of ``linear_route``, or another one for a comparison.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    transposed = bias is not None and bias.dy_BTN is not dy_BTO
    dy_BTO = unit_inner(dy_BTO)
    if bias:
        bias = bias._replace(dy_BTN=unit_inner(bias.dy_BTN) if transposed else dy_BTO)
    if B * T * I * O == 0:
        if dw_OI is not None:
            dw_OI.zero_()
        _no_rows(rows)
        if bias:
            bias_wgrad(bias, rows[1:])
        return
    route = route or linear_route(B, T, I, O, x_BTI)
    if route == "fused":
        fused_wgrad(x_BTI, dy_BTO, dw_OI, rows, bias=bias)
        return
    product, weight = None, None
    if dw_OI is not None:
        product, weight = dense_wgrad(x_BTI, dy_BTO, dw_OI), Squares(O, I)
    else:
        # The sum is the gradient of one sample that has all tokens. Its own number has the place of
        # the last sample's, which is written after it.
        x_1NI, dy_1NO = (t.flatten(0, 1)[None] for t in (x_BTI, dy_BTO))
        fused_wgrad(x_1NI, dy_1NO, None, rows[:1, B - 1 :])
    one_token = route == "closed"
    ending, work, tickets = _finish(x_BTI, weight, bias, one_token)
    if route == "gram":
        gram.gram(unit_inner(x_BTI), dy_BTO, rows[0], tickets)
    else:
        x_BI, dy_BO = x_BTI[:, 0], dy_BTO[:, 0]
        if transposed:
            x_BI, dy_BO = dy_BO, x_BI
        token_sqnorms(x_BI, dy_BO, rows[0], rows[1] if bias and one_token else None, tickets)
    if weight is not None or bias is not None:
        finish(ending, work, tickets, rows if weight else rows[1:], dw_OI, bias, product)


def _finish(
    x_BTI: Tensor, weight: Squares | None, bias: Bias | None, one_token: bool
) -> tuple[Finish, Tensor, Tensor]:
    """What the finishing kernel does where norms do not come from tiles, its memory and tickets."""
    B, T, _ = x_BTI.shape
    ending = plan(
        (B, T),
        weight,
        bias_strides(bias),
        one_token=one_token and bias is not None,
        processors=multiprocessors(x_BTI.device),
    )
    return ending, *memory(x_BTI, ending)


def bias_wgrad(bias: Bias, rows: Tensor) -> None:
    """Fill db and its probe ``rows`` [1, B + 2]."""
    bias = bias._replace(dy_BTN=unit_inner(bias.dy_BTN))
    dy_BTN = bias.dy_BTN
    if dy_BTN.numel() == 0:
        if bias.db_N is not None:
            bias.db_N.zero_()
        _no_rows(rows)
        return
    one_token = dy_BTN.shape[1] == 1
    ending, work, tickets = _finish(dy_BTN, None, bias, one_token)
    if one_token:
        token_sqnorms(None, dy_BTN[:, 0], None, rows[0], tickets)
    else:
        tickets.zero_()
    finish(ending, work, tickets, rows, None, bias)


def _no_rows(rows: Tensor) -> None:
    """The rows of gradients that are zero."""
    rows[:, :-1] = 0.0
    rows[:, -1] = 1.0


def fused_wgrad(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor | None,
    rows: Tensor,
    *,
    bias: Bias | None = None,
    add: bool = False,
    config: Config | None = None,
) -> None:
    """``outer_wgrad`` by tiles. With ``add`` the gradient is added to ``dw_OI``, and the rows are
    those of what is added.
    """
    x, dy = unit_inner(x_BTI), unit_inner(dy_BTO)
    extended = config is None and backends.backend("cuda") == "cuda"
    if extended and extension.takes(x, dy, dw_OI, add):
        own = bias is not None and bias.dy_BTN is dy  # not of a weight that is stored transposed
        db_O = bias.db_N if bias and own else None
        extension.linear_wgrad(x, dy, dw_OI, db_O, rows if own else rows[:1], add)
        if bias and not own:
            bias_wgrad(bias, rows[1:])
        return
    tf32 = x.dtype == torch.float32 and tf32_allowed()
    how = reading(operand(x), operand(dy), tf32)
    if how.pad_x or how.pad_dy:
        x, dy = padded(x) if how.pad_x else x, padded(dy) if how.pad_dy else dy
        how = reading(operand(x), operand(dy), tf32)
    if config is None:
        (B, T, I), O = x.shape, dy.shape[2]
        configs = candidates(x.dtype, how.aligned)
        lengths = (triton.next_power_of_2(n) for n in (B, T))
        written = None if dw_OI is None else dw_OI.dtype
        key = ("linear_wgrad", *lengths, I, O, x.dtype, written, how.tma)
        # Tuning must not add to dW.
        like = lambda t: None if t is None else torch.empty_like(t)
        scratch = lambda: (like(dw_OI), torch.empty_like(rows))
        config = choose(key, configs, lambda c: fused_kernel.fused(x, dy, *scratch(), c))
    fused_kernel.fused(x, dy, dw_OI, rows, config, bias=bias, add=add)


def token_sqnorms(
    x_BI: Tensor | None,
    dy_BO: Tensor,
    product_B: Tensor | None,
    dy_sqnorm_B: Tensor | None,
    tickets: Tensor,
) -> None:
    """``gram.token_sqnorms``, or the extension's."""
    x, dy = x_BI if x_BI is None else unit_inner(x_BI), unit_inner(dy_BO)
    if backends.backend("cuda") == "cuda" and x is not None and extension.takes_tokens(x, dy):
        for out_B, found_B in zip((product_B, dy_sqnorm_B), extension.token_sqnorms(x, dy)):
            if out_B is not None:
                out_B[: len(found_B)] = found_B
        tickets.zero_()
    else:
        gram.token_sqnorms(x, dy, product_B, dy_sqnorm_B, tickets)


def dense_wgrad(x_BTI: Tensor, dy_BTO: Tensor, dw_OI: Tensor) -> Tensor | None:
    """``dy.flatten(0, 1).T @ x.flatten(0, 1)``: in ``dw_OI``, or in a float32 tensor, which it
    returns, where that is to be rounded to another dtype than that of ``x`` or to float16. Squares
    of what float16 has lost would be too small.
    """
    x_NI, dy_NO = x_BTI.flatten(0, 1), dy_BTO.flatten(0, 1)
    wide = dw_OI.dtype == torch.float32
    if x_NI.dtype == dw_OI.dtype != torch.float16:
        torch.mm(dy_NO.T, x_NI, out=dw_OI)
        return None
    product = dw_OI if wide else torch.empty_like(dw_OI, dtype=torch.float32)
    if x_NI.dtype != torch.float32 and x_NI.is_cuda and not torch.version.hip:
        torch.mm(dy_NO.T, x_NI, out_dtype=torch.float32, out=product)
    else:
        torch.mm(dy_NO.float().T, x_NI.float(), out=product)
    return None if wide else product


def tied_rows(ids_BS: Tensor, dy_BTO: Tensor, x_BTI: Tensor) -> Tensor:
    """[B, S, I] float32: rows ``ids_BS`` of every sample's dy_bᵀ x_b, by a gather of columns of dy
    and one batched product.

    Counted on an H200 for 16k tokens, 50257 words and width 768: 0.2 ms beside the 1.8 ms of the
    head's weight gradient with as many ids as there are tokens in samples of 1024; 0.7 ms at 8192.
    """
    index = ids_BS.long()[:, None, :].expand(-1, dy_BTO.shape[1], -1)
    columns_BST = dy_BTO.gather(2, index).mT
    return wide_bmm(columns_BST, x_BTI, torch.float32)
