# SPDX-License-Identifier: Apache-2.0
"""Parameters whose gradients are sums of rows (gains, biases, sinks): from partial sums of every
sample to the gradients and the probe rows, in one launch.

Legend: P parameters of N numbers each, B samples. A sample's gradient is the sum of its ``pieces``,
[B, pieces, N] for each parameter.

A program adds the pieces of some samples for a block of columns. It leaves each sample's partial
squared norm and the samples' sum. The last program of these samples adds their norms over the
columns and writes them to the rows. The last of these columns adds the sums over all samples to the
gradient; the last of those adds the squares of the gradient.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels.finish import arrives_last, column_sums
from gnsfast.triton_kernels.launch import Launch
from gnsfast.triton_kernels.tiles import most_registers

TILE = 8192
"""Numbers that a program loads at a time: 32 of a thread, so that most programs wait for memory
once."""

WIDTHS = (32, 128, 512)
"""Columns of a program: a row of 128 bytes, so that a GPT-2 width makes 24 programs for each block
of samples; more where there would be over 64 of them, whose norms one program adds."""

MOST_PARTS = 65535
"""A grid's second axis ends there."""


@triton.jit
def finish_parameter(
    row_ptr,  # [B + 2]: the parameter's probe row
    partial_ptr,  # [B, pieces, N] float32
    grad_ptr,  # [N]
    scratch_ptr,  # [columns, B + 1] squared norms, and [parts, columns BLOCK_N] sums
    tickets_ptr,  # [parts + columns + 1] zeros
    B,
    pieces,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    column, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    part, parts = tl.program_id(1), tl.num_programs(1)
    offs_b, offs_n = (
        part * BLOCK_B + tl.arange(0, BLOCK_B),
        column * BLOCK_N + tl.arange(0, BLOCK_N),
    )
    mask_b, mask_n = offs_b < B, offs_n < N
    g = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for first in range(0, pieces, BLOCK_C):
        offs_c = first + tl.arange(0, BLOCK_C)
        row = offs_b.to(tl.int64)[:, None] * pieces + offs_c[None, :]
        mask = mask_b[:, None] & (offs_c < pieces)[None, :]
        at = partial_ptr + row[:, :, None] * N + offs_n[None, None, :]
        g += tl.sum(tl.load(at, mask=mask[:, :, None] & mask_n[None, None, :], other=0.0), 1)
    sqnorm_ptr = scratch_ptr + column.to(tl.int64) * (B + 1)
    sum_ptr = scratch_ptr + columns.to(tl.int64) * (B + 1)
    width = columns * BLOCK_N
    tl.store(sqnorm_ptr + offs_b, tl.sum(g * g, 1), mask=mask_b)
    tl.store(sum_ptr + part.to(tl.int64) * width + offs_n, tl.sum(g, 0))
    if arrives_last(tickets_ptr + part, columns):
        norms = column_sums(scratch_ptr, columns, B + 1, offs_b, mask_b, BLOCK_P)
        tl.store(row_ptr + offs_b, norms.to(tl.float32), mask=mask_b)
    if arrives_last(tickets_ptr + parts + column, parts):
        total = column_sums(sum_ptr, parts, width, offs_n, mask_n, 16).to(tl.float32)
        tl.store(grad_ptr + offs_n, total.to(grad_ptr.dtype.element_ty), mask=mask_n)
        tl.store(sqnorm_ptr + B, tl.sum(total * total))
        if arrives_last(tickets_ptr + parts + columns, columns):
            one = tl.arange(0, 1)
            norm = column_sums(scratch_ptr + B, columns, B + 1, one, one == 0, 256)
            tl.store(row_ptr + B + one, norm.to(tl.float32))
            tl.store(row_ptr + B + 1, 1.0)


@triton.jit(do_not_specialize=["B", "scratch_stride", "ticket_stride"])
def finish_sums_kernel(
    rows_ptr,  # [P, B + 2]
    partials,  # of each parameter [B, pieces, N] float32
    grads,  # of each [N]
    scratch_ptr,  # [P, scratch_stride] float32
    tickets_ptr,  # [P, ticket_stride] int32 zeros
    pieces,  # of each
    widths,  # of each: N
    B,
    scratch_stride,
    ticket_stride,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    for p in tl.static_range(len(grads)):
        if (tl.program_id(2) == p) & (tl.program_id(0) * BLOCK_N < widths[p]):
            finish_parameter(
                rows_ptr + p * (B + 2).to(tl.int64),
                partials[p],
                grads[p],
                scratch_ptr + p * scratch_stride,
                tickets_ptr + p * ticket_stride,
                B,
                pieces[p],
                widths[p],
                BLOCK_B,
                BLOCK_C,
                BLOCK_N,
                BLOCK_P,
            )


@dataclass(frozen=True)
class Plan:
    """How one call finishes: what depends on sizes alone."""

    grid: tuple[int, int, int]
    scratch_stride: int
    ticket_stride: int
    options: dict[str, Any]
    launch: Launch

    @property
    def tickets(self) -> int:
        """How many there are; an earlier kernel calls ``finish.clear_tickets``."""
        return self.grid[2] * self.ticket_stride

    def run(
        self,
        partials: Sequence[Tensor],
        grads: Sequence[Tensor],
        rows: Tensor,
        tickets: Tensor,
    ) -> None:
        """Fill ``grads`` and the probe ``rows``; tickets are zero."""
        scratch = rows.new_empty(self.grid[2] * self.scratch_stride)
        self.launch(rows, tuple(partials), tuple(grads), scratch, tickets)


@functools.lru_cache(4096)
def plan(B: int, pieces: tuple[int, ...], widths: tuple[int, ...]) -> Plan:
    """For parameters of ``widths`` numbers whose samples have so many ``pieces``."""
    block_n = next((n for n in WIDTHS if max(widths) <= 64 * n), WIDTHS[-1])
    rows, block_c = TILE // block_n, 1
    while block_c < min(rows, max(pieces)):
        block_c *= 4  # few variants to compile
    block_b = rows // block_c
    columns, parts = triton.cdiv(max(widths), block_n), triton.cdiv(B, block_b)
    if parts > MOST_PARTS:
        raise ValueError(
            f"the gradients of {B} samples in pieces {pieces} of widths {widths} would take "
            f"{parts} rows of a grid, and a GPU has {MOST_PARTS}: take smaller micro-batches"
        )
    scratch, tickets = columns * (B + 1 + parts * block_n), parts + columns + 1
    blocks: dict[str, Any] = {"BLOCK_B": block_b, "BLOCK_C": block_c, "BLOCK_N": block_n}
    blocks["BLOCK_P"] = min(128, 2048 // block_b)
    registers = {"num_warps": 8, "maxnreg": most_registers(8)}
    grid, values = (columns, parts, len(widths)), (pieces, widths, B, scratch, tickets)
    launch = Launch(finish_sums_kernel, grid, (*values, *blocks.values()), **registers)
    return Plan(grid, scratch, tickets, blocks | registers, launch)


def finish_sums(partial_BCN: Tensor, grad_N: Tensor, row: Tensor) -> None:
    """``grad_N`` and the probe ``row`` [1, B + 2] of one parameter, after torch's own kernels."""
    (B, pieces, N), like = partial_BCN.shape, partial_BCN
    p = plan(B, (pieces,), (N,))
    p.run([like.contiguous()], [grad_N], row, like.new_zeros(p.tickets, dtype=torch.int32))
