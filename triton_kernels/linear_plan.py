# SPDX-License-Identifier: Apache-2.0
"""How the finishing kernel of linear layers is launched, and the memory that it needs."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gnsfast.triton_kernels.configs import GROUP_O, Balance, Config
from gnsfast.triton_kernels.launch import Launch
from gnsfast.triton_kernels.linear_finish import (
    BLOCK_N,
    HEIGHTS,
    ROWS,
    SPAN,
    WARPS,
    linear_finish_kernel,
)
from gnsfast.triton_kernels.tiles import most_registers

TENSORS = 7
"""The kernel's first arguments are tensors; numbers and constants follow."""

CONSTANT = linear_finish_kernel.arg_names.index("WEIGHT")
FIXED = linear_finish_kernel.arg_names[TENSORS:CONSTANT]
CONSTANTS = linear_finish_kernel.arg_names[CONSTANT:]


class Bias(NamedTuple):
    """A bias's gradient: what it sums, and where it goes; None for its norms alone."""

    dy_BTN: Tensor
    db_N: Tensor | None


class Finish(NamedTuple):
    """The launch of the finishing kernel, and the memory that it shares with the one before."""

    launch: Launch
    floats: int  # of the work tensor
    tickets: int
    values: dict[str, int]  # the kernel's arguments after its tensors


class Squares(NamedTuple):
    """Where a weight's norms come from: the tiles of ``config``, shared out by ``balance``; or,
    without them, the finished dW and rows that are already there.
    """

    O: int
    I: int
    config: Config | None = None
    balance: Balance | None = None


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, int],
    weight: Squares | None,
    bias: tuple[int, int, int] | None,
    *,
    add: bool = False,
    one_token: bool = False,
    processors: int,
) -> Finish:
    """Of ``shape`` B, T; ``bias`` is N and the strides of samples and tokens of its dy. With
    ``one_token`` the rows already hold the samples' numbers of the bias too.
    """
    B, T = shape
    sizes = dict.fromkeys(FIXED, 0) | {"B": B}
    options: dict[str, Any] = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    options |= {"CHUNKS": 1, "BLOCK_T": ROWS}
    options |= {"TILES": False, "ADD": add, "BLOCK_O": HEIGHTS[0], "BLOCK_I": 1, "GROUP": GROUP_O}
    options |= {"BLOCK_N": BLOCK_N, "ROWS": ROWS, "HEIGHT": HEIGHTS[0], "SPAN": SPAN}
    floats, samples = 0, 0
    if weight is not None:
        sizes |= {"I": weight.I, "O": weight.O}
        config, balance = weight.config, weight.balance
        if config is None or balance is None:
            elements = weight.I * weight.O
            span = triton.cdiv(elements, 8 * processors * SPAN) * SPAN
            sums = pieces = triton.cdiv(elements, span)
            sizes |= {"span": span, "elements": elements}
        else:
            tiles = triton.cdiv(weight.O, config.block_o) * triton.cdiv(weight.I, config.block_i)
            shared = balance.remaining if balance.unfinished else 0
            parts = triton.cdiv(balance.unfinished, shared or 1)
            height = next((n for n in HEIGHTS if n * parts <= 2 * ROWS), HEIGHTS[-1])
            pieces = shared * (config.block_o // height)
            sums, samples = tiles - shared + pieces, B
            floats = balance.unfinished * config.block_o * config.block_i
            sizes |= {"first_tile": balance.first_tile, "remaining": balance.remaining}
            sizes |= {"own": balance.own, "tiles": tiles, "partial_at": floats}
            options |= {"TILES": True, "BLOCK_O": config.block_o, "BLOCK_I": config.block_i}
            options |= {"HEIGHT": height}
            floats += B * tiles
        sizes |= {"sums": sums, "sums_at": floats, "piece_programs": pieces}
        floats += sums
    arrivals, tickets = samples + sizes["piece_programs"], 1
    if bias is not None:
        N, stride_b, stride_t = bias
        columns = triton.cdiv(N, BLOCK_N)
        bias_B, bias_T = B, T
        if one_token:  # the samples are the tokens of one
            bias_B, bias_T, stride_t = 1, B, stride_b
        sizes |= {"N": N, "dy_stride_b": stride_b, "dy_stride_t": stride_t}
        chunks, each = share(bias_B, bias_T, columns, processors)
        pieces = triton.cdiv(bias_B, each) * chunks
        sizes |= {"bias_B": bias_B, "bias_T": bias_T, "each": each}
        sizes |= {"length": triton.cdiv(bias_T, chunks), "bias_programs": columns * pieces}
        sizes |= {"bias_sums_at": floats, "norms_at": floats + pieces * N}
        floats += pieces * N + columns * (bias_B + 1)
        options |= {"CHUNKS": chunks, "BLOCK_T": min(ROWS, triton.next_power_of_2(bias_T))}
        arrivals += columns
        tickets += columns + (pieces if chunks == 1 else 0)
    programs = sizes["bias_programs"] + sizes["piece_programs"] + samples
    sizes["arrivals"] = arrivals
    values = (*(sizes[name] for name in FIXED), *(options[name] for name in CONSTANTS))
    # Programs of a multiprocessor; without a limit ptxas spills up to 24 bytes for one more. The
    # shortest samples would spill in float32 with any.
    resident = {ROWS: 4, ROWS // 2: 3, ROWS // 4: 3}.get(options["BLOCK_T"], 1)
    registers = most_registers(resident * WARPS) if bias is not None and resident > 1 else None
    launch = Launch(linear_finish_kernel, (programs,), values, num_warps=WARPS, maxnreg=registers)
    return Finish(launch, floats, tickets, sizes)


def share(B: int, T: int, columns: int, processors: int) -> tuple[int, int]:
    """Into how many chunks, a power of two, the tokens of each sample are cut, and how many samples
    each program adds: four programs for a multiprocessor, or a little more.

    A column's last program adds one row from each of the others, so there are at most 128 of them
    unless there are many samples: the last program of some samples adds a block of them at most.
    """
    pieces = min(128, triton.cdiv(4 * processors, columns))
    if B >= pieces:
        return 1, min(BLOCK_N, triton.cdiv(B, pieces))
    chunks = min(pieces // B, triton.cdiv(T, 4 * ROWS), ROWS)
    return 1 << (chunks.bit_length() - 1), 1


def bias_strides(bias: Bias | None) -> tuple[int, int, int] | None:
    """What ``plan`` takes of a bias."""
    if bias is None:
        return None
    dy = bias.dy_BTN
    return dy.shape[2], dy.stride(0), dy.stride(1)


def memory(like: Tensor, ending: Finish) -> tuple[Tensor, Tensor]:
    """The work tensor and the tickets."""
    work = like.new_empty(ending.floats, dtype=torch.float32)
    return work, like.new_empty(ending.tickets, dtype=torch.int32)


def finish(
    ending: Finish,
    work: Tensor,
    tickets: Tensor,
    rows: Tensor,
    dw_OI: Tensor | None,
    bias: Bias | None,
    product_OI: Tensor | None = None,
) -> None:
    """Launch the kernel; ``tickets`` are zeros by then. With ``product_OI`` dW is still to be
    rounded from it.
    """
    dy, db = bias or (None, None)
    ending.launch(work, tickets, dw_OI, product_OI, dy, db, rows)
