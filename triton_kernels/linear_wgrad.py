# SPDX-License-Identifier: Apache-2.0
"""The weight gradient of a linear layer with every sample's squared norm, in one kernel.

Legend: B samples, T tokens of a sample, I in_features, O out_features.

A program owns a tile [BLOCK_O, BLOCK_I] of dW and walks over the samples:

                 x_b [T, BLOCK_I]
                ┌───────────────┐
                │ BLOCK_T rows  │ one step: two loads, one product of blocks
                └───────────────┘
    dy_bᵀ ┌──┐  ┌───────────────┐   after the last block of sample b:
    [     │  │  │  acc = dy_bᵀx_b│     partial[tile, b] = ‖acc‖²,  total += acc,  acc = 0
    BLOCK_O, │  │               │   after the last sample:
    T]    └──┘  └───────────────┘     partial[tile, B] = ‖total‖²,  dW[tile] = total

No sample's gradient reaches memory. The steps of all samples and tiles of a program are one loop,
so the next sample is being loaded while the last one is squared. If there are too few tiles for the
device, each is split by whole samples: the sums go to a scratch tensor, and a second kernel adds
them. The partials are added over the tiles in a fixed order, without atomics, so two runs give the
same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gnsfast.triton_kernels.configs import GROUP_O, Config, multiprocessors, splits
from gnsfast.triton_kernels.tiles import (
    INTERPRETED,
    dot,
    precision,
    root_metric,
    tf32_allowed,
    tile_position,
)


@triton.jit(do_not_specialize=["B", "T", "S", "samples_a_split", "items"])
def linear_wgrad_kernel(
    x,  # pointer, or a descriptor of [1, BLOCK_T, BLOCK_I] where TMA
    dy,
    dw_ptr,
    partial_ptr,  # [tiles, B + 1] float32; where METRIC [2, tiles, B + 1]
    scratch_ptr,  # [splits, tiles, BLOCK_O, BLOCK_I] float32, where SPLIT
    slots_ptr,  # [B, O] int32: where in rows_ptr a row of the sample's gradient goes, or -1
    rows_ptr,  # [B, S, I] float32, where LINKS
    v_ptr,  # [O, I] second moments, where METRIC
    constants_ptr,  # [2] float64, where METRIC
    B,
    T,
    I,
    O,
    S,
    samples_a_split,
    items,  # tiles times splits
    x_stride_b,
    x_stride_t,
    dy_stride_b,
    dy_stride_t,
    TMA: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    LINKS: tl.constexpr,
    METRIC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    programs = tl.num_programs(0)
    blocks = tl.cdiv(T, BLOCK_T)
    tiles_o = tl.cdiv(O, BLOCK_O)
    tiles_i = tl.cdiv(I, BLOCK_I)
    tiles = tiles_o * tiles_i
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    if METRIC:
        root = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

    # Counters replace divisions of the step: seven divisions would take half of a step's issue
    # slots.
    item = tl.program_id(0) - programs
    block = -1
    sample = -1
    b = 0
    tile = 0
    tile_o = 0
    tile_i = 0
    steps = tl.cdiv(items - tl.program_id(0), programs) * samples_a_split * blocks
    for _ in range(steps):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            sample = tl.where(sample == samples_a_split - 1, 0, sample + 1)
            if sample == 0:
                item += programs
                tile = item % tiles
                tile_o, tile_i = tile_position(tile, tiles_o, tiles_i, GROUP)
                if METRIC:
                    root = tile_root(v_ptr, constants_ptr, tile_o, tile_i, O, I, BLOCK_O, BLOCK_I)
            b = item // tiles * samples_a_split + sample

        offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
        offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
        if TMA:  # reads zeros outside [B, T, features]
            dy_OT = dy.load([b, block * BLOCK_T, tile_o * BLOCK_O]).reshape(BLOCK_T, BLOCK_O).T
            x_TI = x.load([b, block * BLOCK_T, tile_i * BLOCK_I]).reshape(BLOCK_T, BLOCK_I)
        else:  # dy is read as [O, T]: read as [T, O] and transposed it would not be pipelined
            offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
            mask_t = (offs_t < T) & (b < B)
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
            row = partial_ptr + tile.to(tl.int64) * (B + 1)
            tl.store(row + b, tl.sum(acc * acc), mask=b < B)
            if METRIC:
                weighed = acc * root
                of_metric = row + tiles.to(tl.int64) * (B + 1)
                tl.store(of_metric + b, tl.sum(weighed * weighed), mask=b < B)
            if LINKS:
                mask_o = (offs_o < O) & (b < B)
                slot = tl.load(slots_ptr + b.to(tl.int64) * O + offs_o, mask=mask_o, other=-1)
                tl.store(
                    rows_ptr + (b.to(tl.int64) * S + slot)[:, None] * I + offs_i[None, :],
                    acc,
                    mask=(slot >= 0)[:, None] & (offs_i < I)[None, :],
                )
            total += acc
            acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            if sample == samples_a_split - 1:
                if SPLIT:
                    within = tl.arange(0, BLOCK_O)[:, None] * BLOCK_I + tl.arange(0, BLOCK_I)
                    tl.store(scratch_ptr + item.to(tl.int64) * (BLOCK_O * BLOCK_I) + within, total)
                else:
                    tl.store(row + B, tl.sum(total * total))
                    if METRIC:
                        weighed = total * root
                        tl.store(of_metric + B, tl.sum(weighed * weighed))
                    at = dw_ptr + offs_o[:, None].to(tl.int64) * I + offs_i[None, :]
                    mask = (offs_o < O)[:, None] & (offs_i < I)[None, :]
                    if ADD:
                        total += tl.load(at, mask=mask, other=0.0)
                    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask)
                total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)


@triton.jit
def tile_root(
    v_ptr, constants_ptr, tile_o, tile_i, O, I, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):
    """√P of a tile of the weight. Its values outside the weight do not matter: dW is zero there."""
    within_o = tl.arange(0, BLOCK_O)[:, None]
    within_i = tl.arange(0, BLOCK_I)[None, :]
    corner = v_ptr + (tile_o * BLOCK_O).to(tl.int64) * I + tile_i * BLOCK_I
    inside = (within_o < O - tile_o * BLOCK_O) & (within_i < I - tile_i * BLOCK_I)
    v = tl.load(corner + (within_o * I + within_i), mask=inside, other=1.0)
    return root_metric(v, constants_ptr)


@triton.jit
def merge_splits_kernel(
    scratch_ptr,  # [splits, tiles, BLOCK_O, BLOCK_I] float32
    dw_ptr,
    partial_ptr,  # [tiles, B + 1] float32; where METRIC [2, tiles, B + 1]
    v_ptr,
    constants_ptr,
    B,
    I,
    O,
    splits,
    ADD: tl.constexpr,
    METRIC: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``dW[tile] = Σ_split scratch[split, tile]`` in the order of the splits; its squared norm."""
    tile = tl.program_id(0)
    tiles_o = tl.cdiv(O, BLOCK_O)
    tiles_i = tl.cdiv(I, BLOCK_I)
    tile_o, tile_i = tile_position(tile, tiles_o, tiles_i, GROUP)
    within = tl.arange(0, BLOCK_O)[:, None] * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for split in range(splits):
        item = split * tl.num_programs(0) + tile
        total += tl.load(scratch_ptr + item.to(tl.int64) * (BLOCK_O * BLOCK_I) + within)
    row = partial_ptr + tile.to(tl.int64) * (B + 1)
    tl.store(row + B, tl.sum(total * total))
    if METRIC:
        weighed = total * tile_root(v_ptr, constants_ptr, tile_o, tile_i, O, I, BLOCK_O, BLOCK_I)
        of_metric = row + tl.num_programs(0).to(tl.int64) * (B + 1)
        tl.store(of_metric + B, tl.sum(weighed * weighed))
    offs_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    at = dw_ptr + offs_o[:, None].to(tl.int64) * I + offs_i[None, :]
    mask = (offs_o < O)[:, None] & (offs_i < I)[None, :]
    if ADD:
        total += tl.load(at, mask=mask, other=0.0)
    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask)


MERGE_WARPS = 16
"""Each warp holds a part of a tile, its sum and its pointers: eight warps spill up to 56 bytes."""


def fused(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor,
    config: Config,
    *,
    add: bool = False,
    parts: int | None = None,
    links: tuple[Tensor, Tensor] | None = None,
    metric: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Fill ``dw_OI`` with ``dy.flatten(0, 1).T @ x.flatten(0, 1)``. Returns partial squared norms
    [tiles, B + 1] of each sample's product; the last column is that of their sum.

    Args:
        x_BTI, dy_BTO: not empty, of one dtype, with a unit inner stride.
        dw_OI: contiguous. With ``add`` it is float32 and added to; the norms are those of what is
            added.
        parts: how many parts of whole samples the tiles are split into; by default the rule of
            ``configs.py``.
        links: ``slots`` [B, O] int32 and ``rows`` [B, S, I] float32. Row o of sample b's gradient
            is also written to ``rows[b, slots[b, o]]``, where that slot is not negative.
        metric: contiguous second moments [O, I] and their ``constants`` [2]. The partials are then
            [2, tiles, B + 1], those under the metric last.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    programs = multiprocessors(x_BTI.device) * config.resident
    if parts is None:
        parts = splits(tiles, B, triton.cdiv(T, config.block_t), programs)
    samples_a_split = triton.cdiv(B, parts)
    parts = triton.cdiv(B, samples_a_split)
    kinds = () if metric is None else (2,)
    partial = x_BTI.new_empty((*kinds, tiles, B + 1), dtype=torch.float32)
    scratch = None
    if parts > 1:
        shape = (parts * tiles, config.block_o, config.block_i)
        scratch = x_BTI.new_empty(shape, dtype=torch.float32)
    x, dy = x_BTI, dy_BTO
    tma = fits_tma(x) and fits_tma(dy)
    if tma:
        x = descriptor(x, config.block_t, config.block_i)
        dy = descriptor(dy, config.block_t, config.block_o)
    slots, rows = links or (None, None)
    v, constants = metric or (None, None)
    linear_wgrad_kernel[(min(programs, tiles * parts),)](
        *(x, dy, dw_OI, partial, scratch, slots, rows, v, constants),
        *(B, T, I, O, 0 if rows is None else rows.shape[1]),
        *(samples_a_split, tiles * parts),
        *(x_BTI.stride(0), x_BTI.stride(1), dy_BTO.stride(0), dy_BTO.stride(1)),
        TMA=tma,
        ADD=add,
        SPLIT=parts > 1,
        LINKS=links is not None,
        METRIC=metric is not None,
        PRECISION=precision(x_BTI.dtype),
        **config.options(),
    )
    if parts > 1:
        merge_splits_kernel[(tiles,)](
            *(scratch, dw_OI, partial, v, constants, B, I, O, parts),
            ADD=add,
            METRIC=metric is not None,
            BLOCK_O=config.block_o,
            BLOCK_I=config.block_i,
            GROUP=GROUP_O,
            num_warps=MERGE_WARPS,
        )
    return partial


def aligned(t_BTN: Tensor) -> bool:
    """Whether wide loads can read blocks of ``t_BTN``: by the tensor memory accelerator, or by
    pointers whose row strides Triton knows to be multiples of 16 elements.
    """
    wide = t_BTN.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in _row_strides(t_BTN))
    return wide or fits_tma(t_BTN)


PADDING_PAYS = 3.5
"""How often an element must be loaded, for each of its bytes, so that a copy with aligned rows
costs less (counted for an H200). A copy reads and writes the byte: 0.47 ps at 4.3 TB/s. A load
takes 0.13 ps, if each of 132 multiprocessors loads a warp of single elements every cycle."""


def padded(t_BTN: Tensor, loads: float) -> Tensor:
    """``t_BTN``, or a copy with aligned rows if that costs less than ``loads`` loads of each
    element. A vocabulary of 50257 words makes rows that no wide load and no descriptor can read.

    The copy is as large as ``t_BTN``: 1.65 GB for 16k tokens of that vocabulary in bfloat16. It
    lives while the kernel runs, after the loss has freed what it keeps of the logits.
    """
    if t_BTN.dtype == torch.float32 and not tf32_allowed():
        return t_BTN  # the product takes longer than its loads
    if aligned(t_BTN) or loads < PADDING_PAYS * t_BTN.element_size():
        return t_BTN
    B, T, N = t_BTN.shape
    return t_BTN.new_empty((B, T, triton.cdiv(N, 16) * 16))[..., :N].copy_(t_BTN)


def _row_strides(t_BTN: Tensor) -> list[int]:
    """The strides of samples and tokens; a dimension of one is left out."""
    return [stride for n, stride in zip(t_BTN.shape[:2], t_BTN.stride()) if n > 1]


def fits_tma(t_BTN: Tensor) -> bool:
    """Whether the tensor memory accelerator reads ``t_BTN``: aligned rows that are not expanded, on
    Hopper and later and in the interpreter. float32 without tf32 takes pointers: with blocks from
    shared memory it spills 440 bytes a thread.
    """
    if not INTERPRETED:
        if torch.version.hip or torch.cuda.get_device_capability(t_BTN.device) < (9, 0):
            return False
        if t_BTN.dtype == torch.float32 and not tf32_allowed():
            return False
    size = t_BTN.element_size()
    rows = all(stride > 0 and stride * size % 16 == 0 for stride in _row_strides(t_BTN))
    return rows and t_BTN.data_ptr() % 16 == 0 and t_BTN.shape[2] * size >= 16


def descriptor(t_BTN: Tensor, block_t: int, block_n: int) -> TensorDescriptor:
    """A descriptor of blocks [1, block_t, block_n]; a dimension of one gets a valid stride."""
    row = triton.cdiv(t_BTN.shape[2], 16) * 16
    strides = [s if n > 1 else row for n, s in zip(t_BTN.shape[:2], t_BTN.stride())]
    return TensorDescriptor(t_BTN, list(t_BTN.shape), [*strides, 1], [1, block_t, block_n])
