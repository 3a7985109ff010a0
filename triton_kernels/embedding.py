# SPDX-License-Identifier: Apache-2.0
"""The weight gradient of an embedding with every sample's squared norm.

Legend: B samples, T tokens of a sample, D model width, V vocabulary; N = B T tokens.

Tokens are sorted by (id, sample). The rows of one id are a run, and in it the rows of one sample
are a segment. A sample's squared norm is the sum of ‖Σ dy‖² over its segments; a row of dW is the
sum over a run. There is a program for each token: that of the first token of a segment or run sums
it, and the others return at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.triton_kernels.tiles import most_registers, root_metric


def config(D: int) -> dict[str, Any]:
    """Few and wide programs: most runs have a few rows, and most programs return at once."""
    block_d = min(512, max(16, triton.next_power_of_2(D)))
    most = most_registers(4) if D % 16 else None  # unaligned rows would spill 16 bytes
    return {"BLOCK_R": 8, "BLOCK_D": block_d, "num_warps": 4, "maxnreg": most}


@triton.jit
def run_sum(dy_ptr, order_ptr, key_ptr, first, key, N, D, offs_d, BLOCK_R: tl.constexpr):
    """The sum of the rows of dy from sorted position ``first`` on, while their key is ``key``."""
    total = tl.zeros((offs_d.shape[0],), tl.float32)
    position = first
    going = True
    while going:
        offs_r = position + tl.arange(0, BLOCK_R)
        same = tl.load(key_ptr + offs_r, mask=offs_r < N, other=-1) == key
        rows = tl.load(order_ptr + offs_r, mask=same, other=0)
        dy = tl.load(
            dy_ptr + rows[:, None] * D + offs_d[None, :],
            mask=same[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        total += tl.sum(dy.to(tl.float32), 0)
        position += BLOCK_R
        going = tl.sum(same.to(tl.int32)) == BLOCK_R
    return total


@triton.jit(do_not_specialize=["N"])  # specialized, N = 1 would be a Python int, without .to()
def segment_sqnorms_kernel(
    dy_ptr,  # [N, D]
    order_ptr,  # [N] int64: the token at each sorted position
    key_ptr,  # [N] int64, sorted: id * B + sample
    partial_ptr,  # [N, D blocks] float32 zeros; a segment's number is at its first token
    v_ptr,  # [V, D] second moments, where METRIC; partial_ptr is then [2, N, D blocks]
    constants_ptr,  # [2] float64, where METRIC
    N,
    D,
    B,
    padding_idx,
    METRIC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    key = tl.load(key_ptr + n)
    before = tl.load(key_ptr + n - 1, mask=n > 0, other=-1)
    if (key != before) & (key // B != padding_idx):
        offs_d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        total = run_sum(dy_ptr, order_ptr, key_ptr, n, key, N, D, offs_d, BLOCK_R)
        token = tl.load(order_ptr + n)
        at = partial_ptr + token * tl.num_programs(1) + block
        tl.store(at, tl.sum(total * total))
        if METRIC:
            v = tl.load(v_ptr + key // B * D + offs_d, mask=offs_d < D, other=1.0)
            total *= root_metric(v, constants_ptr)
            tl.store(at + N.to(tl.int64) * tl.num_programs(1), tl.sum(total * total))


@triton.jit(do_not_specialize=["N"])
def run_sums_kernel(
    dy_ptr,  # [N, D]
    order_ptr,  # [N] int64
    id_ptr,  # [N] int64, sorted
    dw_ptr,  # [V, D] zeros
    partial_ptr,  # [N, D blocks] float32 zeros; where METRIC [2, N, D blocks]
    v_ptr,
    constants_ptr,
    N,
    D,
    padding_idx,
    METRIC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(id_ptr + n)
    before = tl.load(id_ptr + n - 1, mask=n > 0, other=-1)
    if (row != before) & (row != padding_idx):
        offs_d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        total = run_sum(dy_ptr, order_ptr, id_ptr, n, row, N, D, offs_d, BLOCK_R)
        tl.store(dw_ptr + row * D + offs_d, total.to(dw_ptr.dtype.element_ty), mask=offs_d < D)
        at = partial_ptr + n * tl.num_programs(1) + block
        tl.store(at, tl.sum(total * total))
        if METRIC:
            v = tl.load(v_ptr + row * D + offs_d, mask=offs_d < D, other=1.0)
            total *= root_metric(v, constants_ptr)
            tl.store(at + N.to(tl.int64) * tl.num_programs(1), tl.sum(total * total))


def embedding_wgrad(
    dy_BTD: Tensor,
    ids_BT: Tensor,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
    metric: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """dW [V, D] and the squared norms [B + 1] of the samples and of their sum. With a ``metric``
    (contiguous second moments [V, D] and their constants) they are [2, B + 1], those under it last.
    """
    B, T, _ = dy_BTD.shape
    sample_BT = torch.arange(B, device=ids_BT.device)[:, None].expand(B, T)
    dw_VD, sqnorm_KN, total_K = rows_wgrad(
        *(dy_BTD.flatten(0, 1), ids_BT.flatten(), sample_BT.flatten(), B),
        *(num_embeddings, padding_idx, dtype, metric),
    )
    sqnorm_KB = sqnorm_KN.unflatten(1, (B, T)).sum(2, dtype=torch.float64)
    sqnorm_KB1 = torch.cat([sqnorm_KB, total_K[:, None]], 1)
    return dw_VD, sqnorm_KB1[0] if metric is None else sqnorm_KB1


def rows_wgrad(
    dy_ND: Tensor,
    ids_N: Tensor,
    sample_N: Tensor,
    B: int,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
    metric: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dW [V, D]; [K, N] float32, whose sum over a sample's tokens is its squared norm; and [K], the
    squared norm of the samples' sum. K is 1, or 2 with a metric.
    """
    N, D = dy_ND.shape
    dy_ND = dy_ND.contiguous()
    dw_VD = dy_ND.new_zeros((num_embeddings, D), dtype=dtype)
    key_N, order_N = (ids_N.long() * B + sample_N).sort(stable=True)
    id_N = key_N // max(B, 1)
    tile = config(D)
    blocks = triton.cdiv(D, tile["BLOCK_D"])
    kinds = 1 if metric is None else 2
    v, constants = metric or (None, None)
    partial, total = dy_ND.new_zeros((2, kinds, N, blocks), dtype=torch.float32)
    if N and D:
        grid, tile = (N, blocks), {**tile, "METRIC": metric is not None}
        last = v, constants, N, D
        segment_sqnorms_kernel[grid](
            *(dy_ND, order_N, key_N, partial, *last, B, padding_idx), **tile
        )
        run_sums_kernel[grid](*(dy_ND, order_N, id_N, dw_VD, total, *last, padding_idx), **tile)
    return dw_VD, partial.sum(2), total.sum((1, 2), dtype=torch.float64)
