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
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gnsfast.signatures import Metric
from gnsfast.triton_kernels import configs, linear_finish
from gnsfast.triton_kernels.configs import Config, multiprocessors
from gnsfast.triton_kernels.finish import clear_tickets
from gnsfast.triton_kernels.linear_finish import Bias
from gnsfast.triton_kernels.tiles import (
    INTERPRETED,
    dot,
    precision,
    root_metric,
    tf32_allowed,
    tile_position,
)

SIZES = ("B", "T", "waves", "remaining", "own", "partial_at", "sums_at", "sums", "tickets")
"""Arguments whose values the compiler is not to specialise on: they vary with the batch."""


@triton.jit(do_not_specialize=SIZES)
def linear_wgrad_kernel(
    x,  # pointer, or a descriptor of [1, BLOCK_T, BLOCK_I] where TMA
    dy,
    dw_ptr,
    work_ptr,  # float32: parts of tiles [parts, BLOCK_O, BLOCK_I], then what begins at the offsets
    tickets_ptr,  # [tickets] int32, which the finishing kernel finds at zero
    v_ptr,  # [O, I] second moments, where METRIC
    constants_ptr,  # [2] float64, where METRIC
    B,
    T,
    I,
    O,
    waves,
    remaining,
    own,
    partial_at,  # [M, B, tiles]; M is 2 where METRIC
    sums_at,  # [M, sums], of which the first are those of whole tiles
    sums,
    tickets,
    x_stride_b,
    x_stride_t,
    dy_stride_b,
    dy_stride_t,
    TMA: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,  # whether any tile is one program's
    SHARED: tl.constexpr,  # whether any is not
    METRIC: tl.constexpr,
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
    if METRIC:
        root = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)

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
                last = B - 1
                if wave >= waves:
                    tile = waves * programs + remainder
                    b = first
                    last = min(B, first + count) - 1
                    if SHARED:
                        slot = remainder + tl.where(program < remaining, 0, program)
                        count -= last + 1 - first
                        first = own
                        remainder += 1
                tile_o, tile_i = tile_position(tile, tiles_o, tiles_i, GROUP)
                if METRIC:
                    root = tile_root(v_ptr, constants_ptr, tile_o, tile_i, O, I, BLOCK_O, BLOCK_I)

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
            if METRIC:
                weighed = acc * root
                tl.store(square + B.to(tl.int64) * tiles, tl.sum(weighed * weighed))
            total += acc
            acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            if b == last:
                whole = WHOLE
                if WHOLE and SHARED:
                    whole = wave < waves
                if whole:
                    sums_ptr = work_ptr + sums_at
                    tl.store(sums_ptr + tile, tl.sum(total * total))
                    if METRIC:
                        weighed = total * root
                        tl.store(sums_ptr + sums + tile, tl.sum(weighed * weighed))
                    at = dw_ptr + offs_o[:, None].to(tl.int64) * I + offs_i[None, :]
                    mask = (offs_o < O)[:, None] & (offs_i < I)[None, :]
                    if ADD:
                        total += tl.load(at, mask=mask, other=0.0)
                    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=mask)
                else:
                    within = tl.arange(0, BLOCK_O)[:, None] * BLOCK_I + tl.arange(0, BLOCK_I)
                    tl.store(work_ptr + slot.to(tl.int64) * (BLOCK_O * BLOCK_I) + within, total)
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


def fused(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    dw_OI: Tensor,
    rows: Tensor,
    config: Config,
    *,
    bias: Bias | None = None,
    add: bool = False,
    metric: Metric | None = None,
    programs: int | None = None,
) -> None:
    """Fill ``dw_OI`` with ``dy.flatten(0, 1).T @ x.flatten(0, 1)``, the bias's gradient, and the
    probe rows of both.

    Args:
        x_BTI, dy_BTO: not empty, of one dtype, with a unit inner stride.
        dw_OI: contiguous. With ``add`` it is float32 and added to; the norms are those of what is
            added.
        rows: [M P, B + 2] float32 of any row stride.
        bias: its dy has as many samples and tokens, and a unit inner stride.
        metric: contiguous second moments [O, I] and their ``constants`` [2]; M is then 2.
        programs: how many run at the same time; by default what the device holds.
    """
    (B, T, I), O = x_BTI.shape, dy_BTO.shape[2]
    processors = multiprocessors(x_BTI.device)
    tiles = triton.cdiv(O, config.block_o) * triton.cdiv(I, config.block_i)
    programs = programs or processors * config.resident
    blocks = triton.cdiv(T, config.block_t)
    balance = configs.balance(tiles, B, programs, blocks, mixed=metric is None)
    ending = linear_finish.plan(
        (B, T, 0 if bias is None else bias.dy_BTN.shape[2]),
        linear_finish.Squares(O, I, config, balance),
        bias is not None,
        metric=metric is not None,
        add=add,
        processors=processors,
    )
    work = x_BTI.new_empty(ending.floats, dtype=torch.float32)
    tickets = x_BTI.new_empty(ending.tickets, dtype=torch.int32)
    x, dy = x_BTI, dy_BTO
    tma = fits_tma(x) and fits_tma(dy)
    if tma:
        x = descriptor(x, config.block_t, config.block_i)
        dy = descriptor(dy, config.block_t, config.block_o)
    v, constants = metric or (None, None)
    sizes = ending.sizes
    linear_wgrad_kernel[(balance.programs,)](
        *(x, dy, dw_OI, work, tickets, v, constants, B, T, I, O),
        *(balance.waves, balance.remaining, balance.own),
        *(sizes["partial_at"], sizes["sums_at"], sizes["sums"], ending.tickets),
        *(x_BTI.stride(0), x_BTI.stride(1), dy_BTO.stride(0), dy_BTO.stride(1)),
        TMA=tma,
        ADD=add,
        WHOLE=balance.waves > 0 or not balance.unfinished,
        SHARED=balance.unfinished > 0,
        METRIC=metric is not None,
        PRECISION=precision(x_BTI.dtype),
        **config.options(),
    )
    linear_finish.finish(ending, work, tickets, rows, dw_OI, bias, metric)


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
