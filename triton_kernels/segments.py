# SPDX-License-Identifier: Apache-2.0
"""The gradients of linear layers whose samples are segments, of unequal length, of one list of
rows: the documents of a packed sequence (``cu_seqlens``), or the rows of a mixture's experts,
sorted by expert and then by sample. The kernel is that of ``linear_wgrad.py``, but reads the bounds
from memory. They stay on the device, so nothing waits for it. A bias takes one more launch; a last
one makes the probe rows of both.

Legend: N rows, B samples, E experts, I in_features, O out_features. Segment e B + b holds the rows
of sample b that expert e was given.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast import reference
from gnsfast.signatures import LinearWgrad, empty_rows
from gnsfast.tensors import accumulate_dtype
from gnsfast.triton_kernels import sums
from gnsfast.triton_kernels.configs import SMALL, TF32, Config, candidates
from gnsfast.triton_kernels.finish import arrives_last, clear_tickets, column_sums
from gnsfast.triton_kernels.launch import known
from gnsfast.triton_kernels.sums import finish_parameter
from gnsfast.triton_kernels.tiles import dot, precision, tf32_allowed, tile_position, unit_inner


@triton.jit(do_not_specialize=["B"])
def linear_wgrad_segments_kernel(
    x_ptr,
    dy_ptr,
    dw_ptr,  # [E, O, I], or None
    partial_ptr,  # [E, tiles, B + 1] float32
    starts_ptr,  # [E B + 1]: the first row of each segment, and the end of the last
    ticket_ptr,  # set to zero, unless segment_sums_kernel does
    B,
    I,
    O,
    x_stride,
    dy_stride,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_o = tl.cdiv(O, BLOCK_O)
    tiles_i = tl.cdiv(I, BLOCK_I)
    item = tl.program_id(0)
    expert = (item // (tiles_o * tiles_i)).to(tl.int64)
    tile_o, tile_i = tile_position(item % (tiles_o * tiles_i), tiles_o, tiles_i, GROUP)
    offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_o = (offs_o < O)[:, None]
    mask_i = (offs_i < I)[None, :]
    row = partial_ptr + item.to(tl.int64) * (B + 1)
    bounds_ptr = starts_ptr + expert * B
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for b in range(B):
        start = tl.load(bounds_ptr + b).to(tl.int64)
        end = tl.load(bounds_ptr + b + 1).to(tl.int64)
        acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for first in range(start, end, BLOCK_T):
            offs_t = first + tl.arange(0, BLOCK_T)  # int64; those of the next sample are masked
            dy_OT = tl.load(
                dy_ptr + offs_t[None, :] * dy_stride + offs_o[:, None],
                mask=(offs_t < end)[None, :] & mask_o,
                other=0.0,
            )
            x_TI = tl.load(
                x_ptr + offs_t[:, None] * x_stride + offs_i[None, :],
                mask=(offs_t < end)[:, None] & mask_i,
                other=0.0,
            )
            acc = dot(dy_OT, x_TI, acc, PRECISION)
        tl.store(row + b, tl.sum(acc * acc))
        total += acc
    tl.store(row + B, tl.sum(total * total))
    if dw_ptr is not None:
        at = dw_ptr + (expert * O + offs_o[:, None]) * I + offs_i[None, :]
        tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask_o & mask_i)
    if ticket_ptr is not None:
        tl.store(ticket_ptr, 0)


@triton.jit(do_not_specialize=["tickets"])
def segment_sums_kernel(
    dy_ptr,
    sums_ptr,  # [B, E, O] in the accumulation dtype
    starts_ptr,  # [E B + 1]
    tickets_ptr,
    tickets,
    B,
    O,
    dy_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    if tickets_ptr is not None:
        clear_tickets(tickets_ptr, tickets)
    segment = tl.program_id(0).to(tl.int64)
    offs_o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    start = tl.load(starts_ptr + segment).to(tl.int64)
    end = tl.load(starts_ptr + segment + 1).to(tl.int64)
    total = tl.zeros((BLOCK_O,), sums_ptr.dtype.element_ty)
    for first in range(start, end, BLOCK_R):
        offs_r = first + tl.arange(0, BLOCK_R)
        dy_RO = tl.load(
            dy_ptr + offs_r[:, None] * dy_stride + offs_o[None, :],
            mask=(offs_r < end)[:, None] & (offs_o < O)[None, :],
            other=0.0,
        )
        total += tl.sum(dy_RO.to(sums_ptr.dtype.element_ty), 0)
    row = segment % B * (tl.num_programs(0) // B) + segment // B
    tl.store(sums_ptr + row * O + offs_o, total, mask=offs_o < O)


@triton.jit(do_not_specialize=["B", "pieces", "splits"])
def segments_finish_kernel(
    rows_ptr,  # [P, B + 2]
    partial_ptr,  # [pieces, B + 1] float32, where there is a weight
    sums_ptr,  # [B, 1, N] float32, where there is a bias
    db_ptr,  # [N]
    scratch_ptr,  # [splits, B + 1] float32, and what ``finish_parameter`` takes
    tickets_ptr,  # zeros, the weight's first
    B,
    pieces,
    splits,  # programs that share the pieces
    N,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = B + 1
    if WEIGHT:
        split = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if (tl.program_id(2) == 0) & (split < splits):
            share = tl.cdiv(pieces, splits)
            first = split * share
            last = min(pieces, first + share)
            own = partial_ptr + first.to(tl.int64) * row
            for b in range(0, row, BLOCK_W):
                offs = b + tl.arange(0, BLOCK_W)
                found = column_sums(own, last - first, row, offs, offs < row, PIECES // BLOCK_W)
                tl.store(scratch_ptr + split * row + offs, found.to(tl.float32), mask=offs < row)
            if arrives_last(tickets_ptr, splits):
                for b in range(0, row, BLOCK_W):
                    offs = b + tl.arange(0, BLOCK_W)
                    norms = column_sums(scratch_ptr, splits, row, offs, offs < row, 64)
                    tl.store(rows_ptr + offs, norms.to(tl.float32), mask=offs < row)
                tl.store(rows_ptr + row, 1.0)
    if BIAS:
        if tl.program_id(2) == WEIGHT:
            finish_parameter(
                rows_ptr + WEIGHT * (B + 2),
                sums_ptr,
                db_ptr,
                scratch_ptr + splits * row,
                tickets_ptr + 1,
                B,
                1,
                N,
                BLOCK_B,
                BLOCK_C,
                BLOCK_N,
                BLOCK_P,
            )


PIECES: tl.constexpr = tl.constexpr(2048)
"""Partial norms that a program of the last kernel loads at a time."""

SHARE = 256
"""Rows of them that one program adds: 28k tiles of 64 experts are 112 programs."""

SUMS = {"BLOCK_R": 32, "BLOCK_O": 128, "num_warps": 4}


def fixed_config(dtype: torch.dtype, aligned: bool) -> Config:
    """The linear kernel's fixed tile, except where it would spill here: 24 bytes in float32 without
    tf32 (sm_90, Triton 3.6), 8 bytes for unaligned rows in tf32 (sm_100).
    """
    if dtype == torch.float32 and not tf32_allowed():
        return SMALL[0]
    if dtype == torch.float32 and not aligned:
        return TF32[-1]
    return candidates(dtype, aligned)[0]


def most_registers_of(config: Config) -> int | None:
    """Without a limit ptxas spills 16 bytes of the smallest tile, so that a third program fits."""
    return config.registers() if config.resident > 1 else None


def aligned(t_NI: Tensor) -> bool:
    """Whether Triton knows that wide loads can read the rows."""
    return t_NI.data_ptr() % 16 == 0 and t_NI.shape[1] % 16 == t_NI.stride(0) % 16 == 0


def linear_wgrad(a: LinearWgrad, config: Config | None = None) -> tuple[Tensor, ...]:
    """See ``LinearWgrad``, with ``starts``."""
    if _is_empty(a):
        return reference.linear_wgrad(a)
    dw, db, rows, linked = a.results()
    _fill(a, dw, db, rows, config)
    return dw, db, rows, linked


def linear_norms(a: LinearWgrad) -> Tensor:
    """The probe rows of ``linear_wgrad``. No dW is in memory."""
    if _is_empty(a):
        return reference.linear_norms(a)
    _, db, _, _ = a._replace(weight=False).results()
    rows = empty_rows(a.x_BTI, a.weight + a.bias, a.samples)
    _fill(a, None, db, rows)
    return rows


def _is_empty(a: LinearWgrad) -> bool:
    return 0 in (a.samples, a.x_BTI.shape[1], a.dy_BTO.shape[1])


def _fill(
    a: LinearWgrad, dw: Tensor | None, db: Tensor, rows: Tensor, config: Config | None = None
) -> None:
    x, dy = (unit_inner(t) for t in (a.x_BTI, a.dy_BTO))
    B, E, starts = a.samples, max(a.experts, 1), a.starts
    assert starts is not None
    left, right = (x, dy) if a.transposed else (dy, x)
    I, O, N, starts = right.shape[1], left.shape[1], E * dy.shape[1], starts.contiguous()
    plan = sums.plan(B, (1,), (N if a.bias else 1,))
    tickets = x.new_empty(1 + plan.tickets, dtype=torch.int32)
    partial = sums_BEO = None
    pieces = 0
    if a.weight:
        config = config or fixed_config(x.dtype, aligned(x) and aligned(dy))
        pieces = E * triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
        partial = x.new_empty((pieces, B + 1), dtype=torch.float32)
        linear_wgrad_segments_kernel[(pieces,)](
            *(right, left, dw, partial, starts, None if a.bias else tickets),
            *(B, I, O, right.stride(0), left.stride(0)),
            PRECISION=precision(x.dtype),
            **known(config.options() | {"maxnreg": most_registers_of(config)}),
        )
    if a.bias:
        sums_BEO = segment_sums(dy, starts, E, tickets)
    splits = min(triton.cdiv(pieces, SHARE), plan.grid[0] * plan.grid[1] if a.bias else pieces)
    grid = (*plan.grid[:2], a.weight + a.bias) if a.bias else (splits, 1, 1)
    if a.weight or a.bias:
        segments_finish_kernel[grid](
            *(rows, partial, sums_BEO, db, rows.new_empty(splits * (B + 1) + plan.scratch_stride)),
            *(tickets, B, pieces, splits, N),
            WEIGHT=a.weight,
            BIAS=a.bias,
            BLOCK_W=min(64, triton.next_power_of_2(B + 1)),
            **known(plan.options),
        )


def segment_sums(
    dy_NO: Tensor, starts: Tensor, experts: int = 1, tickets: Tensor | None = None
) -> Tensor:
    """[S, O]: the sum of each segment's rows, without atomics, sample by sample where there are
    several experts. float64 rows, which the cross terms of tied weights have, are summed in
    float64. Sets ``tickets`` to zero.
    """
    dy, S = unit_inner(dy_NO), len(starts) - 1
    sums = dy.new_empty((S, dy.shape[1]), dtype=accumulate_dtype(dy.dtype))
    count = 0 if tickets is None else len(tickets)
    if sums.numel():
        segment_sums_kernel[(S, triton.cdiv(dy.shape[1], SUMS["BLOCK_O"]))](
            *(dy, sums, starts.contiguous(), tickets, count, S // experts),
            *(dy.shape[1], dy.stride(0)),
            **SUMS,
        )
    return sums
