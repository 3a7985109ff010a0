# SPDX-License-Identifier: Apache-2.0
"""The gradients of linear layers whose samples are segments, of unequal length, of one list of
rows: the documents of a packed sequence (``cu_seqlens``), or the rows of a mixture's experts,
sorted by expert and then by sample. The kernel is that of ``linear_wgrad.py``, but reads the bounds
from memory. They stay on the device, so nothing waits for it.

Legend: N rows, B samples, E experts, I in_features, O out_features. Segment e B + b holds the rows
of sample b that expert e was given.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.tensors import accumulate_dtype
from gnsfast.triton_kernels.configs import SMALL, TF32, Config, candidates
from gnsfast.triton_kernels.tiles import dot, precision, tf32_allowed, tile_position, unit_inner


@triton.jit(do_not_specialize=["B"])
def linear_wgrad_segments_kernel(
    x_ptr,
    dy_ptr,
    dw_ptr,  # [E, O, I]
    partial_ptr,  # [E, tiles, B + 1] float32
    starts_ptr,  # [E B + 1]: the first row of each segment, and the end of the last
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
    at = dw_ptr + (expert * O + offs_o[:, None]) * I + offs_i[None, :]
    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask_o & mask_i)


@triton.jit
def segment_sums_kernel(
    dy_ptr,
    sums_ptr,  # [S, O] in the accumulation dtype
    starts_ptr,  # [S + 1]
    O,
    dy_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
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
    tl.store(sums_ptr + segment * O + offs_o, total, mask=offs_o < O)


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


def aligned(t_NI: Tensor) -> bool:
    """Whether Triton knows that wide loads can read the rows."""
    return t_NI.data_ptr() % 16 == 0 and t_NI.shape[1] % 16 == t_NI.stride(0) % 16 == 0


def outer_wgrad(
    x_NI: Tensor,
    dy_NO: Tensor,
    starts: Tensor,
    experts: int,
    dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dW [E, O, I] and the squared norms [B + 1] of each sample's gradient and of their sum."""
    x, dy = unit_inner(x_NI), unit_inner(dy_NO)
    B, I, O = (len(starts) - 1) // experts, x.shape[1], dy.shape[1]
    config = config or fixed_config(x.dtype, aligned(x) and aligned(dy))
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    dw = x.new_empty((experts, O, I), dtype=dtype)
    partial = x.new_empty((experts * tiles, B + 1), dtype=torch.float32)
    if len(partial):
        linear_wgrad_segments_kernel[(experts * tiles,)](
            *(x, dy, dw, partial, starts.contiguous()),
            *(B, I, O, x.stride(0), dy.stride(0)),
            PRECISION=precision(x.dtype),
            **config.options(),
        )
    return dw, partial.sum(0, dtype=torch.float64)


def segment_sums(dy_NO: Tensor, starts: Tensor) -> Tensor:
    """[S, O]: the sum of each segment's rows, without atomics. float64 rows, which the cross terms
    of tied weights have, are summed in float64.
    """
    dy, S = unit_inner(dy_NO), len(starts) - 1
    sums = dy.new_empty((S, dy.shape[1]), dtype=accumulate_dtype(dy.dtype))
    if sums.numel():
        segment_sums_kernel[(S, triton.cdiv(dy.shape[1], SUMS["BLOCK_O"]))](
            dy, sums, starts.contiguous(), dy.shape[1], dy.stride(0), **SUMS
        )
    return sums
