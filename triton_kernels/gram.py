# SPDX-License-Identifier: Apache-2.0
"""Every sample's squared norm of a linear layer's weight gradient, without that sample's gradient.
It suits short samples; dW is then one plain matrix product.

‖dy_bᵀ x_b‖² = Σ_{t,s} (dy_t·dy_s)(x_t·x_s). A program takes one sample, and its two T x T products
stay in registers. Where the terms cancel, their rounding exceeds their sum: key projections do
that, with similar tokens and a dy that sums to zero. The program of such a sample computes dy_bᵀ
x_b itself, tile by tile, which cancels before it is squared. For T = 1 the norm is ‖dy_b‖² ‖x_b‖².
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels.finish import clear_tickets
from gnsfast.triton_kernels.tiles import dot, precision

MAX_TOKENS = 128
"""Two products of 128 x 128 fill half of the registers of eight warps."""

CANCELLED = 0.02
"""A sum below this share of the sum of its absolute terms has lost too many digits."""

TILE = 64
"""Rows and columns of the tiles of dy_bᵀ x_b, for a sample whose terms cancel."""


@triton.jit
def self_product(
    rows, mask_t, N, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The products [BLOCK_T, BLOCK_T] of a sample's rows of N numbers with each other."""
    product = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    for k in range(0, N, BLOCK_K):
        columns = (k + tl.arange(0, BLOCK_K))[None, :]
        block = tl.load(rows + columns, mask=mask_t & (columns < N), other=0.0)
        product = dot(block, block.T, product, PRECISION)
    return product


@triton.jit(do_not_specialize=["tickets"])
def gram_kernel(
    x_ptr,
    dy_ptr,
    sqnorm_ptr,  # [B] float32
    tickets_ptr,  # [tickets] int32, which the finishing kernel finds at zero; or None
    tickets,
    T,
    I,
    O,
    x_stride_b,
    x_stride_t,
    dy_stride_b,
    dy_stride_t,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    CANCELLED: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if tickets_ptr is not None:
        clear_tickets(tickets_ptr, tickets)
    offs_t = tl.arange(0, BLOCK_T)
    mask_t = (offs_t < T)[:, None]
    rows_t = offs_t.to(tl.int64)[:, None]

    x_rows = x_ptr + b * x_stride_b + rows_t * x_stride_t
    x_gram = self_product(x_rows, mask_t, I, PRECISION, BLOCK_T, BLOCK_K)
    dy_rows = dy_ptr + b * dy_stride_b + rows_t * dy_stride_t
    dy_gram = self_product(dy_rows, mask_t, O, PRECISION, BLOCK_T, BLOCK_K)

    terms = x_gram * dy_gram
    sqnorm = tl.sum(terms)
    if sqnorm < CANCELLED * tl.sum(tl.abs(terms)):
        sqnorm = 0.0
        for o in range(0, O, TILE):
            offs_o = o + tl.arange(0, TILE)[:, None]
            at = dy_ptr + b * dy_stride_b + offs_t.to(tl.int64)[None, :] * dy_stride_t + offs_o
            dy_OT = tl.load(at, mask=(offs_t < T)[None, :] & (offs_o < O), other=0.0)
            for i in range(0, I, TILE):
                offs_i = i + tl.arange(0, TILE)[None, :]
                x_TI = tl.load(x_rows + offs_i, mask=mask_t & (offs_i < I), other=0.0)
                product = dot(dy_OT, x_TI, tl.zeros((TILE, TILE), tl.float32), PRECISION)
                sqnorm += tl.sum(product * product)
    tl.store(sqnorm_ptr + b, sqnorm)


def gram(
    x_BTI: Tensor, dy_BTO: Tensor, sqnorm_B: Tensor | None = None, tickets: Tensor | None = None
) -> Tensor:
    """[B]: ``torch.bmm(dy.mT, x).square().sum((1, 2))`` for samples of at most ``MAX_TOKENS``, in
    ``sqnorm_B`` if given. Sets ``tickets`` to zero.
    """
    B, T, _ = x_BTI.shape
    block_t = max(16, triton.next_power_of_2(T))
    if block_t == MAX_TOKENS:
        x_BTI, dy_BTO = widened(x_BTI), widened(dy_BTO)
    I, O = x_BTI.shape[2], dy_BTO.shape[2]
    if sqnorm_B is None:
        sqnorm_B = x_BTI.new_empty(B, dtype=torch.float32)
    gram_kernel[(B,)](
        *(x_BTI, dy_BTO, sqnorm_B, tickets, 0 if tickets is None else len(tickets), T, I, O),
        *(x_BTI.stride(0), x_BTI.stride(1), dy_BTO.stride(0), dy_BTO.stride(1)),
        PRECISION=precision(x_BTI.dtype),
        BLOCK_T=block_t,
        TILE=TILE,
        CANCELLED=CANCELLED,
        **config(block_t, x_BTI.dtype),
    )
    return sqnorm_B


def widened(t_BTN: Tensor) -> Tensor:
    """``t_BTN`` padded with zeros to rows that wide loads can read. Loads of single elements of 128
    rows take so many registers that up to 816 bytes spill.
    """
    (B, T, N), strides = t_BTN.shape, t_BTN.stride()[:2]
    if t_BTN.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in (*strides, N)):
        return t_BTN
    rows = t_BTN.new_zeros((B, T, triton.cdiv(N, 16) * 16))
    rows[..., :N] = t_BTN
    return rows


def config(block_t: int, dtype: torch.dtype) -> dict[str, int]:
    """Wide loads for few rows. The two products of 128 rows take eight warps; so do those of 64
    rows in tf32, which with four warps spill 16 bytes on sm_80.
    """
    block_k = 32 if dtype == torch.float32 else 128 if block_t == 16 else 64
    many = MAX_TOKENS // 2 if dtype == torch.float32 else MAX_TOKENS
    return {"BLOCK_K": block_k, "num_warps": 8 if block_t >= many else 4, "num_stages": 3}


@triton.jit
def row_sqnorm(row_ptr, N, BLOCK: tl.constexpr):
    """The squared norm of a row of ``N`` numbers."""
    offs = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, N, BLOCK):
        t = tl.load(row_ptr + k + offs, mask=k + offs < N, other=0.0).to(tl.float32)
        squares += t * t
    return tl.sum(squares)


@triton.jit(do_not_specialize=["tickets"])
def token_sqnorms_kernel(
    x_ptr,  # None: of the bias alone
    dy_ptr,
    product_ptr,  # [B] float32, or None
    dy_sqnorm_ptr,  # [B] float32, or None
    tickets_ptr,  # [tickets] int32, which the finishing kernel finds at zero; or None
    tickets,
    I,
    O,
    x_stride,
    dy_stride,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    if tickets_ptr is not None:
        clear_tickets(tickets_ptr, tickets)
    dy_sqnorm = row_sqnorm(dy_ptr + b * dy_stride, O, BLOCK)
    if product_ptr is not None:
        tl.store(product_ptr + b, row_sqnorm(x_ptr + b * x_stride, I, BLOCK) * dy_sqnorm)
    if dy_sqnorm_ptr is not None:
        tl.store(dy_sqnorm_ptr + b, dy_sqnorm)


ROW_BLOCK = 2048


def token_sqnorms(
    x_BI: Tensor | None,
    dy_BO: Tensor,
    product_B: Tensor | None,
    dy_sqnorm_B: Tensor | None,
    tickets: Tensor | None = None,
) -> None:
    """‖x_b‖² ‖dy_b‖² and ‖dy_b‖², those of the weight and of the bias of one-token samples, each
    where a [B] float32 is given. Sets ``tickets`` to zero.
    """
    x = dy_BO if x_BI is None else x_BI
    token_sqnorms_kernel[(len(dy_BO),)](
        *(x_BI, dy_BO, product_B, dy_sqnorm_B, tickets, 0 if tickets is None else len(tickets)),
        *(x.shape[1], dy_BO.shape[1], x.stride(0), dy_BO.stride(0)),
        BLOCK=ROW_BLOCK,
        num_warps=4,
    )
