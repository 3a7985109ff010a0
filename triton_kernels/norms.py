# SPDX-License-Identifier: Apache-2.0
"""The backward pass of layer norm and RMS norm with every sample's gain and bias gradients.

Legend: B samples, T tokens of a sample, N gains.

With n = (x - mean) rstd and g = dy·w:  dx = rstd (g - n mean(g·n) - mean(g)), for RMS norm without
mean and mean(g); the gain's gradient is Σ_t dy·n, the bias's Σ_t dy.

A program takes a chunk of one sample's tokens, reads x and dy once, writes dx, and keeps the
chunk's sums in registers. ``sums.py`` adds them. Rows wider than ``ROW`` do not fit into the
registers: then a first kernel computes the two means of every row, and a second one goes through
the columns block by block.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.signatures import NormBackward
from gnsfast.triton_kernels import sums
from gnsfast.triton_kernels.configs import multiprocessors
from gnsfast.triton_kernels.finish import clear_tickets
from gnsfast.triton_kernels.launch import Launch
from gnsfast.triton_kernels.tiles import most_registers, unit_inner

ROW = 1 << 13
"""The widest row held in registers if its length is a multiple of 16; else half of this."""

COLUMN_BLOCK = 512
"""Columns of a program for wider rows."""

WARPS = 16
"""How many warps of this kernel a multiprocessor holds, by their registers."""

CHUNK = 3
"""A chunk's sums are written and read once more: 16 bytes for each column, as much as three tokens
of bfloat16 x, dy and dx."""


@triton.jit(do_not_specialize=["tickets"])
def norm_backward_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,  # [B, T]; not with RMS
    rstd_ptr,  # [B, T]; not with RMS unless MEANS
    mean_gn_ptr,  # [B, T]: mean(g·n) and mean(g), where MEANS
    mean_g_ptr,
    w_ptr,  # [N], where WEIGHT
    dx_ptr,  # [B, T, N]
    dw_ptr,  # [B, chunks, N] float32, where GAIN
    db_ptr,  # [B, chunks, N] float32, where BIAS
    tickets_ptr,  # zeroed for the finishing kernel, where GAIN or BIAS
    T,
    N,
    chunk,  # tokens of a program
    tickets,
    eps,
    offset,
    dy_stride_b,
    dy_stride_t,
    x_stride_b,
    x_stride_t,
    MEANS: tl.constexpr,  # the rows' means are given: a program takes a block of columns
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    GAIN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    if GAIN or BIAS:
        clear_tickets(tickets_ptr, tickets)
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    offs_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    gain = tl.full((BLOCK_N,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(w_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    last = min(T, (c + 1) * chunk)
    for t in tl.range(c * chunk, last, BLOCK_T, num_stages=NUM_STAGES):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < last
        mask = mask_t[:, None] & mask_n[None, :]
        rows = offs_t.to(tl.int64)[:, None]
        x_at = x_ptr + b * x_stride_b + rows * x_stride_t + offs_n[None, :]
        dy_at = dy_ptr + b * dy_stride_b + rows * dy_stride_t + offs_n[None, :]
        normed = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        if RMS and not MEANS:
            rstd = tl.rsqrt(tl.sum(normed * normed, 1) / N + eps)
            rstd = tl.where(mask_t, rstd, 0.0)[:, None]  # infinite for a missing row without eps
        else:
            rstd = tl.load(rstd_ptr + b * T + offs_t, mask=mask_t, other=0.0)[:, None]
        if not RMS:
            mean = tl.load(mean_ptr + b * T + offs_t, mask=mask_t, other=0.0)[:, None]
            normed -= mean  # also beyond N, where dy is zero
        normed *= rstd
        dx = dy * gain[None, :]
        if MEANS:
            mean_gn = tl.load(mean_gn_ptr + b * T + offs_t, mask=mask_t, other=0.0)[:, None]
            mean_g = tl.load(mean_g_ptr + b * T + offs_t, mask=mask_t, other=0.0)[:, None]
        else:
            mean_gn = (tl.sum(dx * normed, 1) / N)[:, None]
            mean_g = (tl.sum(dx, 1) / N)[:, None]
        dx -= normed * mean_gn
        if not RMS:
            dx -= mean_g
        at = dx_ptr + (b * T + rows) * N + offs_n[None, :]
        tl.store(at, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        if GAIN:
            dw += tl.sum(dy * normed, 0)
        if BIAS:
            db += tl.sum(dy, 0)
    at = (b * tl.num_programs(1) + c) * N + offs_n
    if GAIN:
        tl.store(dw_ptr + at, dw, mask=mask_n)
    if BIAS:
        tl.store(db_ptr + at, db, mask=mask_n)


@triton.jit
def norm_means_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,  # [B, T]; not with RMS
    rstd_ptr,  # [B, T]; written with RMS
    mean_gn_ptr,  # [B, T]
    mean_g_ptr,  # [B, T]
    w_ptr,
    T,
    N,
    eps,
    offset,
    dy_stride_b,
    dy_stride_t,
    x_stride_b,
    x_stride_t,
    RMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A row's mean(g·n) and mean(g), and for RMS norm its rstd."""
    b = tl.program_id(0).to(tl.int64) // T
    t = tl.program_id(0).to(tl.int64) % T
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + b * T + t)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    gx = tl.zeros((BLOCK_N,), tl.float32)
    g = tl.zeros((BLOCK_N,), tl.float32)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        x_at = x_ptr + b * x_stride_b + t * x_stride_t + offs_n
        dy_at = dy_ptr + b * dy_stride_b + t * dy_stride_t + offs_n
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32) - mean  # beyond N dy is zero
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT:
            dy *= tl.load(w_ptr + offs_n, mask=mask, other=0.0).to(tl.float32) + offset
        squares += x * x
        gx += dy * x
        g += dy
    if RMS:
        rstd = tl.rsqrt(tl.sum(squares) / N + eps)
        tl.store(rstd_ptr + b * T + t, rstd)
    else:
        rstd = tl.load(rstd_ptr + b * T + t)
    tl.store(mean_gn_ptr + b * T + t, tl.sum(gx) / N * rstd)
    tl.store(mean_g_ptr + b * T + t, tl.sum(g) / N)


def config(N: int) -> dict[str, Any]:
    """Several short rows at a time, or a long one over more warps: a thread holds 16 numbers of
    each of seven arrays.
    """
    in_registers = N <= (ROW if N % 16 == 0 else ROW // 2)
    block_n = max(16, triton.next_power_of_2(N)) if in_registers else COLUMN_BLOCK
    block_t = min(16, max(1, 2048 // block_n))
    num_warps = max(4, block_t * block_n // 512)
    return {
        "BLOCK_T": block_t,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "NUM_STAGES": 2,
        # Only for widths that spilled: the others would lose a block or two per multiprocessor.
        "maxnreg": most_registers(num_warps) if N % 16 else None,
    }


MEANS_CONFIG = {"BLOCK_N": 2048, "num_warps": 4}


@dataclass(frozen=True, eq=False)
class Plan:
    """How one call runs: what depends on sizes alone."""

    grid: tuple[int, int, int]  # samples, chunks, blocks of columns
    chunk: int
    blocks: dict[str, Any]
    finish: sums.Plan | None  # None where no parameter is wanted


@functools.lru_cache(4096)
def plan(B: int, T: int, N: int, parameters: int, processors: int) -> Plan:
    """For inputs that are not empty."""
    blocks = config(N)
    columns = triton.cdiv(N, blocks["BLOCK_N"])
    slots = processors * max(1, WARPS // blocks["num_warps"])

    def tokens(chunks: int) -> int:
        return triton.cdiv(triton.cdiv(T, chunks), blocks["BLOCK_T"]) * blocks["BLOCK_T"]

    def steps(chunks: int) -> int:
        """The counted time, in tokens: full waves of programs."""
        return triton.cdiv(B * columns * chunks, slots) * (tokens(chunks) + CHUNK)

    most = min(T, triton.cdiv(4 * slots, B * columns))
    chunk = tokens(min(range(1, most + 1), key=steps))
    chunks = triton.cdiv(T, chunk)
    finish = None
    if parameters:
        finish = sums.plan(B, (chunks,) * parameters, (N,) * parameters)
    return Plan((B, chunks, columns), chunk, blocks, finish)


@functools.lru_cache(4096)
def backward(p: Plan, T: int, N: int, *fixed: Any) -> Launch:
    """The launch; ``fixed`` are eps, offset, four strides, then RMS, WEIGHT, GAIN and BIAS."""
    count = 0 if p.finish is None else p.finish.tickets
    blocks = dict(p.blocks)
    registers = {name: blocks.pop(name) for name in ("num_warps", "maxnreg")}
    shapes = (blocks[name] for name in ("BLOCK_T", "BLOCK_N", "NUM_STAGES"))
    values = T, N, p.chunk, count, *fixed[:6], p.grid[2] > 1, *fixed[6:], *shapes
    return Launch(norm_backward_kernel, p.grid, values, **registers)


def norm_backward(a: NormBackward) -> tuple[Tensor, ...]:
    """See ``NormBackward``; samples are rows of the batch."""
    dx, *_, rows = results = a.results()
    gain, bias = a.weight, a.bias
    if not a.x_BTF.numel():
        for t in results[1:]:
            t.zero_()
        rows[:, -1] = 1.0
        return results
    x, dy = unit_inner(a.x_BTF), unit_inner(a.dy_BTF)
    w = a.w_F if a.w_F is None else unit_inner(a.w_F)
    rms = a.mean_BT1 is None
    B, T, N = x.shape
    p = plan(B, T, N, gain + bias, multiprocessors(x.device))
    partials = [dx.new_empty((*p.grid[:2], N), dtype=torch.float32) for _ in range(gain + bias)]
    tickets = p.finish and dx.new_empty(p.finish.tickets, dtype=torch.int32)
    mean, rstd, means = a.mean_BT1, a.rstd_BT1, (None, None)
    wide = p.grid[2] > 1
    strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
    if wide:
        means = x.new_empty((2, B, T), dtype=torch.float32).unbind()
        rstd = x.new_empty((B, T), dtype=torch.float32) if rms else rstd
        norm_means_kernel[(B * T,)](
            *(dy, x, mean, rstd, *means, w, T, N, a.eps, a.offset, *strides),
            RMS=rms,
            WEIGHT=w is not None,
            **MEANS_CONFIG,
        )
    flags = rms, w is not None, gain, bias
    backward(p, T, N, a.eps, a.offset, *strides, *flags)(
        *(dy, x, mean, rstd, *means, w, dx),
        *(partials[0] if gain else None, partials[-1] if bias else None, tickets),
    )
    if p.finish is not None and tickets is not None:
        grads = [g for g, wanted in zip(results[1:3], (gain, bias)) if wanted]
        p.finish.run(partials, grads, rows, tickets)
    return results
