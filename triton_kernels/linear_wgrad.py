# SPDX-License-Identifier: Apache-2.0
"""The weight gradient of a linear layer with every sample's squared norm, in one kernel.

Legend: B samples, T tokens of a sample, I in_features, O out_features.

A program owns a tile [BLOCK_O, BLOCK_I] of dW and walks over the samples:

                 x_b [T, BLOCK_I]
                ┌───────────────┐
                │ BLOCK_T rows  │ one step: two loads, one product of blocks
                └───────────────┘
    dy_bᵀ ┌──┐  ┌───────────────┐   after the last block of sample b:
    [     │  │  │  acc = dy_bᵀx_b│     partial[b, tile] = ‖acc‖²,  total += acc,  acc = 0
    BLOCK_O, │  │               │   after the last sample:
    T]    └──┘  └───────────────┘     sums[tile] = ‖total‖²,  dW[tile] = total

No sample's gradient reaches memory. The steps of all samples and tiles of a program are one loop,
so the next sample is being loaded while the last one is squared. Tiles that do not fill a wave of
programs are shared by whole samples (``configs.balance``): their sums go to a scratch tensor, and
the kernel that finishes the operator (``linear_finish.py``) adds them. All is added in a fixed
order, so two runs give the same bits.

Where nobody wants dW (``gradients="torch"``), ``dw_ptr`` is None and no tile reaches memory either.
The rows have the same bits. With whole tiles this kernel then stores 4 (B + 1) tiles bytes beside
its tickets, ``partial`` and ``sums``, and the finishing kernel 4 (B + 2). With dW they store I O
numbers more. Parts of shared tiles are added before they are squared, so the scratch stays: 4
BLOCK_O BLOCK_I bytes for each of ``Balance.unfinished``.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels import configs
from gnsfast.triton_kernels.configs import Config, multiprocessors
from gnsfast.triton_kernels.finish import clear_tickets
from gnsfast.triton_kernels.launch import Launch
from gnsfast.triton_kernels.linear_plan import (
    Bias,
    Finish,
    Squares,
    bias_strides,
    finish,
    memory,
    plan,
)
from gnsfast.triton_kernels.operands import Operand, descriptor, fits_tma, operand
from gnsfast.triton_kernels.tiles import dot, precision, tile_position

SIZES = ("B", "T", "waves", "remaining", "own", "partial_at", "sums_at", "tickets")
"""Arguments whose values the compiler is not to specialise on: they vary with the batch."""


@triton.jit(do_not_specialize=SIZES)
def linear_wgrad_kernel(
    x,  # pointer, or a descriptor of [1, BLOCK_T, BLOCK_I] where TMA
    dy,
    dw_ptr,  # or None: norms alone
    work_ptr,  # float32: parts of tiles [parts, BLOCK_O, BLOCK_I], then what begins at the offsets
    tickets_ptr,  # [tickets] int32, which the finishing kernel finds at zero
    B,
    T,
    I,
    O,
    waves,
    remaining,
    own,
    partial_at,  # [B, tiles]
    sums_at,  # [sums], of which the first are those of whole tiles
    tickets,
    x_stride_b,
    x_stride_t,
    dy_stride_b,
    dy_stride_t,
    TMA: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,  # whether any tile is one program's
    SHARED: tl.constexpr,  # whether any is not
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    clear_tickets(tickets_ptr, tickets)
    blocks = tl.cdiv(T, BLOCK_T)
    tiles_o = tl.cdiv(O, BLOCK_O)
    tiles_i = tl.cdiv(I, BLOCK_I)
    tiles = tiles_o * tiles_i
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

    # The last run of samples, after the whole tiles: the first of a remaining tile, or, for
    # programs beyond those, a run of what is left of all of them.
    remainder = program
    first = 0
    count = tl.where(program < remaining, own, 0)
    if SHARED:
        rest = B - own
        if program >= remaining:
            start = (program - remaining) * own
            remainder = start // rest
            first = own + start % rest
            count = max(0, min(own, remaining * rest - start))

    # Counters replace divisions of the step: seven divisions would take half of a step's issue
    # slots.
    wave = -1
    block = -1
    b = B - 1
    last = B - 1
    tile = 0
    tile_o = 0
    tile_i = 0
    slot = 0
    for _ in range((waves * B + count) * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            b += 1
            if b > last:
                wave += 1
                tile = wave * programs + program
                b = 0
                if SHARED:
                    last = B - 1
                    if wave >= waves:
                        tile = waves * programs + remainder
                        slot = remainder + tl.where(program < remaining, 0, program)
                        b = first
                        last = min(B, first + count) - 1
                        count -= last + 1 - first
                        first = own
                        remainder += 1
                tile_o, tile_i = tile_position(tile, tiles_o, tiles_i, GROUP)

        offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
        offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
        if TMA:  # reads zeros outside [B, T, features]
            dy_OT = dy.load([b, block * BLOCK_T, tile_o * BLOCK_O]).reshape(BLOCK_T, BLOCK_O).T
            x_TI = x.load([b, block * BLOCK_T, tile_i * BLOCK_I]).reshape(BLOCK_T, BLOCK_I)
        else:  # dy is read as [O, T]: read as [T, O] and transposed it would not be pipelined
            offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
            mask_t = offs_t < T
            rows_t = offs_t.to(tl.int64)
            dy_OT = tl.load(
                dy + b.to(tl.int64) * dy_stride_b + rows_t[None, :] * dy_stride_t + offs_o[:, None],
                mask=mask_t[None, :] & (offs_o < O)[:, None],
                other=0.0,
            )
            x_TI = tl.load(
                x + b.to(tl.int64) * x_stride_b + rows_t[:, None] * x_stride_t + offs_i[None, :],
                mask=mask_t[:, None] & (offs_i < I)[None, :],
                other=0.0,
            )
        acc = dot(dy_OT, x_TI, acc, PRECISION)

        if block == blocks - 1:
            square = work_ptr + partial_at + b.to(tl.int64) * tiles + tile
            tl.store(square, tl.sum(acc * acc))
            total += acc
            acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            if b == last:
                whole = WHOLE
                if WHOLE and SHARED:
                    whole = wave < waves
                if whole:
                    tl.store(work_ptr + sums_at + tile, tl.sum(total * total))
                    if dw_ptr is not None:
                        at = dw_ptr + offs_o[:, None].to(tl.int64) * I + offs_i[None, :]
                        mask = (offs_o < O)[:, None] & (offs_i < I)[None, :]
                        if ADD:
                            total += tl.load(at, mask=mask, other=0.0)
                        tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask)
                else:
                    within = tl.arange(0, BLOCK_O)[:, None] * BLOCK_I + tl.arange(0, BLOCK_I)
                    tl.store(work_ptr + slot.to(tl.int64) * (BLOCK_O * BLOCK_I) + within, total)
                total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)


def fused(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor | None,
    rows: Tensor,
    config: Config,
    *,
    bias: Bias | None = None,
    add: bool = False,
    programs: int | None = None,
) -> None:
    """Fill ``dw_OI`` with ``dy.flatten(0, 1).T @ x.flatten(0, 1)``, the bias's gradient, and the
    probe rows of both.

    Args:
        x_BTI, dy_BTO: not empty, of one dtype, with a unit inner stride.
        dw_OI: contiguous, or None for the rows alone. With ``add`` it is float32 and added to; the
            norms are those of what is added.
        rows: [P, B + 2] float32.
        bias: its dy has as many samples and tokens, and a unit inner stride.
        programs: how many run at the same time; by default what the device holds.
    """
    x, dy = operand(x_BTI), operand(dy_BTO)
    roomy = add or (dw_OI is not None and dw_OI.dtype.itemsize > 4)
    how = launches(x, dy, config, programs, bias_strides(bias), add, roomy, precision(x.dtype))
    work, tickets = memory(x_BTI, how.ending)
    if how.tma:
        x_blocks = descriptor(x_BTI, config.block_t, config.block_i)
        dy_blocks = descriptor(dy_BTO, config.block_t, config.block_o)
        how.product(x_blocks, dy_blocks, dw_OI, work, tickets)
    else:
        how.product(x_BTI, dy_BTO, dw_OI, work, tickets)
    finish(how.ending, work, tickets, rows, dw_OI, bias)


class Launches(NamedTuple):
    """The two launches of ``fused``."""

    product: Launch
    ending: Finish
    tma: bool


@functools.lru_cache(maxsize=4096)
def launches(
    x: Operand,
    dy: Operand,
    config: Config,
    programs: int | None,
    bias: tuple[int, int, int] | None,
    add: bool,
    roomy: bool,
    multiplied: str,
) -> Launches:
    """All that can be known before the addresses of tensors."""
    (B, T, I), O = x.shape, dy.shape[2]
    processors = multiprocessors(x.device)
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    programs = programs or processors * config.resident
    blocks = triton.cdiv(T, config.block_t)
    balance = configs.balance(tiles, B, programs, blocks)
    ending = plan(
        (B, T),
        Squares(O, I, config, balance),
        bias,
        add=add,
        processors=processors,
    )
    tma = fits_tma(x) and fits_tma(dy)
    values = ending.values
    whole, shared = balance.waves > 0 or not balance.unfinished, balance.unfinished > 0
    options = config.options()
    product = Launch(
        linear_wgrad_kernel,
        (balance.programs,),
        (
            *(B, T, I, O, balance.waves, balance.remaining, balance.own),
            *(values["partial_at"], values["sums_at"], ending.tickets),
            *(*x.strides[:2], *dy.strides[:2], tma, add, whole, shared, multiplied),
            *(config.block_o, config.block_i, config.block_t, options["GROUP"]),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.registers(roomy or (whole and shared and not tma)),
    )
    return Launches(product, ending, tma)
