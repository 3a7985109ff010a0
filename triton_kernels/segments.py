# SPDX-License-Identifier: Apache-2.0
"""The linear weight gradient for samples of unequal length in one row (``cu_seqlens``): documents
of a packed sequence. The kernel of ``linear_wgrad.py`` with the samples' bounds read from memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels.configs import Config, candidates
from gnsfast.triton_kernels.linear_wgrad import aligned
from gnsfast.triton_kernels.tiles import check_dtypes, dot, precision, tile_position, unit_inner


@triton.jit(do_not_specialize=["B"])
def linear_wgrad_segments_kernel(
    x_ptr,
    dy_ptr,
    dw_ptr,
    partial_ptr,  # [tiles, B + 1] float32
    starts_ptr,  # [B + 1]: the first row of each sample, and the end of the last
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
    tile = tl.program_id(0)
    tile_o, tile_i = tile_position(tile, tl.cdiv(O, BLOCK_O), tl.cdiv(I, BLOCK_I), GROUP)
    offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_o = (offs_o < O)[:, None]
    mask_i = (offs_i < I)[None, :]
    row = partial_ptr + tile.to(tl.int64) * (B + 1)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for b in range(B):
        start = tl.load(starts_ptr + b).to(tl.int64)
        end = tl.load(starts_ptr + b + 1).to(tl.int64)
        acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for first in range(start, end, BLOCK_T):
            offs_t = first + tl.arange(0, BLOCK_T)  # int64, and never of the next sample
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
    at = dw_ptr + offs_o[:, None].to(tl.int64) * I + offs_i[None, :]
    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask_o & mask_i)


def linear_wgrad_segments(
    x_NI: Tensor,
    dy_NO: Tensor,
    starts: Tensor,
    dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """dW and the probe row of ``y = x Wᵀ`` where sample b is rows ``starts[b]`` to ``starts[b+1]``.

    Equals ``dy.T @ x``, and its norms document by document; an empty document has norm zero.
    Nothing waits for the device: ``starts`` (``cu_seqlens``, [B + 1] integers) stays there.
    """
    check_dtypes("linear_wgrad_segments", x_NI, dy_NO)
    x, dy = unit_inner(x_NI), unit_inner(dy_NO)
    B, I, O = len(starts) - 1, x.shape[1], dy.shape[1]
    config = config or candidates(x.dtype, aligned(x[None]) and aligned(dy[None]))[0]
    starts = starts.contiguous()
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    dw = x.new_empty((O, I), dtype=dtype)
    partial = x.new_empty((tiles, B + 1), dtype=torch.float32)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        linear_wgrad_segments_kernel[(tiles,)](
            *(x, dy, dw, partial, starts, B, I, O, x.stride(0), dy.stride(0)),
            PRECISION=precision(x.dtype),
            **config.options(),
        )
    return dw, partial.sum(0, dtype=torch.float64)
