# SPDX-License-Identifier: Apache-2.0
"""Σ_b (dy_bᵀ x_b)²: each coordinate of a linear layer's weight, squared sample by sample, then
summed.

Legend: B samples, T tokens of a sample, I in_features, O out_features, S runs of samples.

A program owns a tile [BLOCK_O, BLOCK_I] and a run of samples. It multiplies blocks of tokens as the
kernel of the weight gradient does (``linear_wgrad.py``), and after the last block of a sample
squares += acc², acc = 0. No sample's gradient reaches memory. Where there are fewer tiles than a
device runs programs, several runs share a tile: their sums [S, O, I] are added afterwards, in a
fixed order, so two launches give the same bits.

It is a kernel of its own, which runs on measured updates alone. With two float32 accumulators of
128 x 128 a thread of the weight gradient's kernel takes 170 to 255 of the 255 registers that it may
have. With a third tile of that size (√P, under a metric) it spills 648 to 824 bytes on sm_80 and
sm_90, as Triton 3.7 compiles it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels import configs
from gnsfast.triton_kernels.configs import Config, candidates, multiprocessors
from gnsfast.triton_kernels.launch import known
from gnsfast.triton_kernels.operands import operand, padded, reading, wide
from gnsfast.triton_kernels.tiles import dot, precision, tf32_allowed, tile_position, unit_inner

SIZES = ("B", "T", "each")
"""Arguments whose values the compiler is not to specialise on: they vary with the batch."""


@triton.jit(do_not_specialize=SIZES)
def linear_squares_kernel(
    x_ptr,
    dy_ptr,
    squares_ptr,  # [S, O, I] float32
    B,
    T,
    I,
    O,
    each,  # samples of a run; the last one may have fewer
    x_stride_b,
    x_stride_t,
    dy_stride_b,
    dy_stride_t,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    run = tl.program_id(1)
    blocks = tl.cdiv(T, BLOCK_T)
    tiles_o, tiles_i = tl.cdiv(O, BLOCK_O), tl.cdiv(I, BLOCK_I)
    tile_o, tile_i = tile_position(tl.program_id(0), tiles_o, tiles_i, GROUP)
    offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

    # One loop over the blocks of all samples: the next sample is being loaded while this one is
    # squared.
    b = run * each - 1
    block = -1
    for _ in range(min(each, B - run * each) * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        b += tl.where(block == 0, 1, 0)
        offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < T
        rows_t = offs_t.to(tl.int64)
        dy_OT = tl.load(  # read as [T, O] and transposed it would not be pipelined
            dy_ptr + b.to(tl.int64) * dy_stride_b + rows_t[None, :] * dy_stride_t + offs_o[:, None],
            mask=mask_t[None, :] & (offs_o < O)[:, None],
            other=0.0,
        )
        x_TI = tl.load(
            x_ptr + b.to(tl.int64) * x_stride_b + rows_t[:, None] * x_stride_t + offs_i[None, :],
            mask=mask_t[:, None] & (offs_i < I)[None, :],
            other=0.0,
        )
        acc = dot(dy_OT, x_TI, acc, PRECISION)
        if block == blocks - 1:
            squares += acc * acc
            acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

    at = (run.to(tl.int64) * O + offs_o[:, None]) * I + offs_i[None, :]
    mask = (offs_o < O)[:, None] & (offs_i < I)[None, :]
    tl.store(squares_ptr + at, squares, mask=mask)


def linear_squares(
    x_BTI: Tensor, dy_BTO: Tensor, config: Config | None = None, programs: int | None = None
) -> Tensor:
    """[O, I] float32: ``torch.bmm(dy.mT, x).square().sum(0)``.

    Args:
        x_BTI, dy_BTO: of one dtype.
        config: a tile; by default the fixed one of the weight gradient's kernel.
        programs: how many run at the same time; by default what the device holds.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    if B * T * I * O == 0:
        return x_BTI.new_zeros((O, I), dtype=torch.float32)
    x, dy = unit_inner(x_BTI), unit_inner(dy_BTO)
    how = reading(operand(x), operand(dy), x.dtype == torch.float32 and tf32_allowed())
    x, dy = padded(x) if how.pad_x else x, padded(dy) if how.pad_dy else dy
    aligned = wide(operand(x)) and wide(operand(dy)) and I % 16 == 0
    config = config or candidates(x.dtype, aligned)[0]
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    programs = programs or multiprocessors(x.device) * config.resident
    each = run_length(tiles, B, triton.cdiv(T, config.block_t), programs)
    runs = triton.cdiv(B, each)
    squares_SOI = x.new_empty((runs, O, I), dtype=torch.float32)
    linear_squares_kernel[(tiles, runs)](
        *(x, dy, squares_SOI, B, T, I, O, each),
        *(x.stride(0), x.stride(1), dy.stride(0), dy.stride(1)),
        PRECISION=precision(x.dtype),
        **known(config.options() | {"maxnreg": config.registers()}),
    )
    return squares_SOI[0] if runs == 1 else squares_SOI.sum(0)


@functools.lru_cache(maxsize=4096)
def run_length(tiles: int, B: int, blocks: int, programs: int) -> int:
    """How many of B samples, of ``blocks`` steps each, a program takes, so that the waves of
    programs have the fewest steps. Where runs share tiles each program writes its sums, and they
    are read once: ``configs.MERGE`` steps each.
    """

    def steps(each: int) -> int:
        runs = triton.cdiv(B, each)
        return triton.cdiv(tiles * runs, programs) * (
            each * blocks + 2 * configs.MERGE * (runs > 1)
        )

    return min((triton.cdiv(B, runs) for runs in range(1, min(B, programs) + 1)), key=steps)
