# SPDX-License-Identifier: Apache-2.0
"""The weight gradient of an embedding with every sample's squared norm.

Legend: B samples, T tokens of a sample, D model width, V vocabulary; N tokens of all samples.

Tokens are sorted by (id, sample). The rows of one id are a run, and in it the rows of one sample
are a segment. A sample's squared norm is the sum of ‖Σ dy‖² over its segments; a row of dW is the
sum over a run. There is a program for each token: that of the first token of a segment or run sums
it, and the others return at once. A long run, as of padding, is cut where its sorted position is a
multiple of ``PIECE``: the programs there sum a piece each, and the last of them adds the pieces in
their order. A last kernel adds the squares of each sample and those of dW.

Where nobody wants dW no memory is set to zero for it, V D numbers, and no run is stored. The row
has the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.signatures import EmbeddingWgrad
from gnsfast.triton_kernels.finish import arrives_last, clear_tickets, column_sums
from gnsfast.triton_kernels.launch import known
from gnsfast.triton_kernels.tiles import most_registers

SQUARES = 4096
"""Squares of a long sample that a program of the last kernel loads at a time. Of several short
samples it loads half as many, for which registers are left."""

PIECE = 128
"""Sorted tokens that one program sums: 16 steps of 1.5 µs (counted)."""

KEYS = 1024
"""Tokens of a program that makes keys."""


def config(D: int) -> dict[str, Any]:
    """Few and wide programs: most runs have a few rows, and most programs return at once. A
    multiprocessor holds nine: for ten ptxas would spill 8 bytes, with unaligned rows for two 16.
    """
    block_d = min(512, max(16, triton.next_power_of_2(D)))
    most = most_registers(4 if D % 16 else 4 * 9)
    return known({"BLOCK_R": 8, "BLOCK_D": block_d, "num_warps": 4, "maxnreg": most})


def finish_config(squares: int) -> dict[str, int]:
    """For samples of so many squares: a long one, or many short ones in a program."""
    length = next(n for n in (16, 64, 256, 1024, SQUARES) if n >= min(SQUARES, squares))
    samples = max(1, SQUARES // 2 // length)  # of which few programs have all
    most = most_registers(8) if samples > 1 else None  # ptxas would spill for a second program
    return known({"BLOCK_B": samples, "BLOCK_T": length, "num_warps": 8, "maxnreg": most})


@triton.jit(do_not_specialize=["tickets", "N", "T", "B"])
def embedding_keys_kernel(
    ids_ptr,  # [N]
    key_ptr,  # [N]: id * B + sample
    starts_ptr,  # [B + 1], where samples are not all T tokens
    tickets_ptr,
    tickets,
    N,
    T,
    B,
    halvings,  # enough to find one of B
    BLOCK: tl.constexpr,
):
    clear_tickets(tickets_ptr, tickets, MANY=True)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < N
    if starts_ptr is None:
        sample = offs_n // T
    else:
        sample = tl.zeros((BLOCK,), tl.int32)  # the last one that does not start behind the token
        end = sample + B
        for _ in range(halvings):
            middle = (sample + end) // 2
            before = tl.load(starts_ptr + middle, mask=mask, other=0) <= offs_n
            sample = tl.where(before, middle, sample)
            end = tl.where(before, end, middle)
    dtype = key_ptr.dtype.element_ty
    key = tl.load(ids_ptr + offs_n, mask=mask, other=0).to(dtype) * B + sample
    tl.store(key_ptr + offs_n, key.to(dtype), mask=mask)


@triton.jit
def sum_below(dy_ptr, order_ptr, key_ptr, first, last, high, D, offs_d, BLOCK_R: tl.constexpr):
    """The sum of the rows of dy from sorted position ``first`` to ``last``, while keys are below
    ``high``.
    """
    total = tl.zeros((offs_d.shape[0],), tl.float32)
    position = first
    going = True
    while going:
        offs_r = position + tl.arange(0, BLOCK_R)
        inside = offs_r < last
        inside = inside & (tl.load(key_ptr + offs_r, mask=inside, other=0).to(tl.int64) < high)
        rows = tl.load(order_ptr + offs_r, mask=inside, other=0)
        dy = tl.load(
            dy_ptr + rows[:, None] * D + offs_d[None, :],
            mask=inside[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        total += tl.sum(dy.to(tl.float32), 0)
        position += BLOCK_R
        going = tl.sum(inside.to(tl.int32)) == BLOCK_R
    return total


@triton.jit
def sum_piece(
    dy_ptr,
    order_ptr,
    key_ptr,
    pieces_ptr,  # [2 multiples of PIECE, D] float32: of each the piece before it, and that behind
    tickets_ptr,  # [multiples] zeros
    n,
    first,  # whether no key before n is in the range
    low,
    high,
    N,
    D,
    offs_d,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The rows of dy whose keys are from ``low`` to ``high``, from sorted position n to the next
    multiple of ``PIECE``. Returns the sum of all rows of these keys and a position of one of them,
    or -1 where another program has that sum.
    """
    end = (n // PIECE + 1) * PIECE
    total = sum_below(dy_ptr, order_ptr, key_ptr, n, min(end, N), high, D, offs_d, BLOCK_R)
    place = n
    ends = (end >= N) | (tl.load(key_ptr + end, mask=end < N, other=0).to(tl.int64) >= high)
    if not (first & ends):
        mask = offs_d < D
        multiples = tl.cdiv(N, PIECE)
        start = 0  # the multiples before the range, then those before its end
        stop = 0
        for k in range(0, multiples, PROBES):
            offs = k + tl.arange(0, PROBES)
            inside = offs < multiples
            key = tl.load(key_ptr + offs.to(tl.int64) * PIECE, mask=inside, other=0).to(tl.int64)
            start += tl.sum((inside & (key < low)).to(tl.int32))
            stop += tl.sum((inside & (key < high)).to(tl.int32))
        # Whether the range begins before its first multiple.
        before = tl.load(key_ptr + start * PIECE - 1, mask=start > 0, other=-1).to(tl.int64) >= low
        row = 2 * (n // PIECE) + (n % PIECE > 0)
        tl.store(pieces_ptr + row.to(tl.int64) * D + offs_d, total, mask=mask)
        place = -1
        if arrives_last(tickets_ptr + start, stop - start + before.to(tl.int32)):
            place = start * PIECE
            earliest = pieces_ptr + (2 * start - 1).to(tl.int64) * D + offs_d
            total = tl.load(earliest, mask=mask & before, other=0.0)
            for k in range(start, stop, BLOCK_R // 2):
                offs = k + tl.arange(0, BLOCK_R // 2)
                at = pieces_ptr + 2 * offs.to(tl.int64)[:, None] * D + offs_d[None, :]
                inside = (offs < stop)[:, None] & mask[None, :]
                total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    return total, place


@triton.jit(do_not_specialize=["N", "B"])  # specialized, 1 would be a Python int, without .to()
def embedding_wgrad_kernel(
    dy_ptr,  # [N, D]
    order_ptr,  # [N] int64: the token at each sorted position
    key_ptr,  # [N], sorted: id * B + sample
    dw_ptr,  # [V, D] zeros, or None
    square_ptr,  # [2, N, D blocks] float32: of segments by token, of runs by sorted position
    pieces_ptr,  # [2, 2 multiples of PIECE, D] float32: of segments, of runs
    tickets_ptr,  # [2, D blocks, multiples] zeros
    N,
    D,
    B,
    padding_idx,
    PIECE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    multiples = tl.cdiv(N, PIECE)
    offs_d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    key = tl.load(key_ptr + n).to(tl.int64)
    before = tl.load(key_ptr + n - 1, mask=n > 0, other=-1).to(tl.int64)
    row = key // B
    size = N.to(tl.int64) * blocks
    for of_run in tl.static_range(2):
        squares = square_ptr + of_run * size + block
        own = n.to(tl.int64) if of_run else tl.load(order_ptr + n)
        tl.store(squares + own * blocks, 0.0)
        low = row * B if of_run else key
        first = before < low
        if (row != padding_idx) & (first | (n % PIECE == 0)):
            total, place = sum_piece(
                *(dy_ptr, order_ptr, key_ptr, pieces_ptr + 2 * of_run * multiples.to(tl.int64) * D),
                *(tickets_ptr + (of_run * blocks + block) * multiples, n, first),
                *(low, low + (B if of_run else 1), N, D, offs_d, PIECE, BLOCK_R),
            )
            if place >= 0:
                at = place.to(tl.int64) if of_run else tl.load(order_ptr + place)
                tl.store(squares + at * blocks, tl.sum(total * total))
                if of_run and dw_ptr is not None:
                    at_row = dw_ptr + row * D + offs_d
                    tl.store(at_row, total.to(dw_ptr.dtype.element_ty), mask=offs_d < D)


PROBES: tl.constexpr = tl.constexpr(256)
"""Multiples of ``PIECE`` whose keys a program compares at a time, to find where a range begins."""


@triton.jit(do_not_specialize=["N", "T", "B"])
def embedding_finish_kernel(
    square_ptr,  # [2, N, blocks] float32
    starts_ptr,  # [B + 1], where samples are not all T tokens
    sum_ptr,  # [programs] float32
    tickets_ptr,
    row_ptr,  # [B + 2]
    N,
    T,
    B,
    blocks,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program adds the squares of some samples' tokens, and those of the runs that begin at as
    many sorted positions.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs_b = program * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    if starts_ptr is None:
        start = offs_b.to(tl.int64) * T
        end = tl.where(mask_b, start + T, start)
    else:
        start = tl.load(starts_ptr + offs_b, mask=mask_b, other=0).to(tl.int64)
        end = tl.load(starts_ptr + offs_b + 1, mask=mask_b, other=0).to(tl.int64)
    start, end = start * blocks, end * blocks
    longest = tl.max(end - start)
    size = N.to(tl.int64) * blocks
    segments = tl.zeros((BLOCK_B,), tl.float64)
    runs = tl.zeros((BLOCK_B,), tl.float64)
    for first in range(0, longest, BLOCK_T):
        offs = start[:, None] + first + tl.arange(0, BLOCK_T)[None, :]
        at, mask = square_ptr + offs, offs < end[:, None]
        segments += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float64), 1)
        runs += tl.sum(tl.load(at + size, mask=mask, other=0.0).to(tl.float64), 1)
    tl.store(row_ptr + offs_b, segments.to(tl.float32), mask=mask_b)
    tl.store(sum_ptr + program, tl.sum(runs).to(tl.float32))
    if arrives_last(tickets_ptr, programs):
        one = tl.arange(0, 1)
        total = column_sums(sum_ptr, programs, 1, one, one == 0, 256)
        tl.store(row_ptr + B + one, total.to(tl.float32))
        tl.store(row_ptr + B + 1, 1.0)


def embedding_wgrad(a: EmbeddingWgrad, dw: Tensor | None, rows: Tensor) -> None:
    """Fill ``dw``, unless it is None, and the probe ``rows`` [1, B + 2]."""
    if dw is not None:
        dw.zero_()
    ids_N, dy_ND = a.ids_BT.flatten(), a.dy_BTD.flatten(0, -2).contiguous()
    (N, D), B = dy_ND.shape, a.samples
    if not dy_ND.numel():
        rows.zero_()[:, -1] = 1.0
        return
    tile = config(D)
    blocks, T = triton.cdiv(D, tile["BLOCK_D"]), N // B
    # Half as many bits take half of the sort's time.
    narrow = a.num_embeddings * B < 1 << 31
    key_N = dy_ND.new_empty(N, dtype=torch.int32 if narrow else torch.int64)
    multiples = triton.cdiv(N, PIECE)
    tickets = dy_ND.new_empty(1 + 2 * blocks * multiples, dtype=torch.int32)
    starts = None if a.starts is None else a.starts.contiguous()
    embedding_keys_kernel[(triton.cdiv(N, KEYS),)](
        *(ids_N, key_N, starts, tickets, len(tickets), N, T, B, B.bit_length()), BLOCK=KEYS
    )
    key_N, order_N = key_N.sort(stable=True)
    squares = dy_ND.new_empty((2, N, blocks), dtype=torch.float32)
    pieces = dy_ND.new_empty((2, 2 * multiples, D), dtype=torch.float32)
    embedding_wgrad_kernel[(N, blocks)](
        *(dy_ND, order_N, key_N, dw, squares, pieces, tickets[1:]),
        *(N, D, B, a.padding_idx),
        PIECE=PIECE,
        **tile,
    )
    finish = finish_config(T * blocks)
    programs = triton.cdiv(B, finish["BLOCK_B"])
    sums = dy_ND.new_empty(programs, dtype=torch.float32)
    embedding_finish_kernel[(programs,)](
        *(squares, starts, sums, tickets, rows, N, T, B, blocks), **finish
    )
