# SPDX-License-Identifier: Apache-2.0
"""The end of a linear layer's weight gradient, in one kernel: the tiles that several programs
share, the bias's gradient, and the probe rows.

Legend: B samples, T tokens of a sample, I in_features, O out_features, N the bias's features.

Its programs are of several kinds, told apart by their number:

    a block of 128 columns of dy, of some samples or of a chunk of a sample's tokens: sums over
        tokens, and the squares of whole samples; the last program of some samples adds their
        squares over the columns; the last one of a block of columns makes db there, and squares
        the samples whose chunks it adds;
    a piece of dW: the sum of a shared tile's parts, or of the plain product (the routes whose
        norms do not come from tiles), and its square, which is all that is left of it where nobody
        wants dW;
    a sample: the sum of its tiles' squares, which is its number in the weight's row.

The last program of all adds what the others have found about the sum and about the bias. Sums of
partials are float64, in a fixed order.
"""

import triton
import triton.language as tl

from gnsfast.triton_kernels.finish import arrives_last, column_sums
from gnsfast.triton_kernels.tiles import tile_position

BLOCK_N = 128
"""Columns of dy that a program adds: 256 bytes of each row in half precision."""

ROWS = 32
"""Rows of dy, or of chunks' sums, that a program adds at a time: tokens of one sample or of several
short ones."""

PIECES: tl.constexpr = tl.constexpr(8)
"""Rows of partial sums that a program adds in float64 at a time: with 16 or more it has too many
registers for four programs of a multiprocessor. Each waits for 8 KiB of dy in half precision: two
at 0.9 µs would read 2.4 TB/s on an H200 (counted), four 4.8."""

HEIGHTS = (16, 4, 1)
"""Rows of a tile in a piece, the fewer the more parts there are. A program reads ``ROWS`` rows at a
time, from several parts: a tile of 128 rows that two programs share is added by 8, each in a step;
one that 128 share by 128, each in four steps. One part after the other would take 38 µs (counted).
"""

SPAN = 2048
"""Elements of dW that a program squares at a time."""


WARPS = 8


@triton.jit
def line_sum(line_ptr, count, BLOCK: tl.constexpr):
    """The sum of ``count`` numbers in a row, in float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        total += tl.load(line_ptr + offs, mask=offs < count, other=0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def add_bias(
    dy_ptr,
    db_ptr,
    sums_ptr,  # [pieces, N]
    norms_ptr,  # [columns, B + 1]
    row_ptr,  # the bias's probe row
    tickets_ptr,  # [columns], and [pieces] without chunks
    program,
    pieces,
    columns,
    samples,  # of the probe row: more than B where the samples are the tokens of one
    B,
    T,
    N,
    each,
    length,
    stride_b,
    stride_t,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A piece of the bias's gradient. Returns whether it was the last of its columns, which have
    then been added and squared.
    """
    BLOCK_B: tl.constexpr = ROWS // BLOCK_T
    column = program % columns
    piece = program // columns
    offs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < N
    square_ptr = norms_ptr + column * (B + 1)
    first_t = piece % CHUNKS * length
    last_t = min(first_t + length, T)
    first_b = piece // CHUNKS * each
    last_b = min(first_b + each, B)
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for b in range(first_b, last_b, BLOCK_B):
        offs_b = b + tl.arange(0, BLOCK_B)
        rows = tl.zeros((BLOCK_B, BLOCK_T, BLOCK_N), tl.float32)
        for t in range(first_t, last_t, BLOCK_T):
            offs_t = t + tl.arange(0, BLOCK_T)
            at = offs_b.to(tl.int64)[:, None] * stride_b + offs_t.to(tl.int64)[None, :] * stride_t
            inside = (offs_b < last_b)[:, None] & (offs_t < last_t)[None, :]
            inside = inside[:, :, None] & mask[None, None, :]
            at = dy_ptr + at[:, :, None] + offs[None, None, :]
            rows += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        g = tl.sum(rows, 1)
        if CHUNKS == 1:
            tl.store(square_ptr + offs_b, tl.sum(g * g, 1), mask=offs_b < last_b)
        total += g
    tl.store(sums_ptr + tl.cast(piece, tl.int64) * N + offs, tl.sum(total, 0), mask=mask)

    if CHUNKS == 1:
        if samples == B:
            if arrives_last(tickets_ptr + columns + piece, columns):
                offs_b = first_b + tl.arange(0, BLOCK_N)
                own = offs_b < last_b
                found = column_sums(norms_ptr, columns, B + 1, offs_b, own, PIECES)
                tl.store(row_ptr + offs_b, found.to(tl.float32), mask=own)

    last = arrives_last(tickets_ptr + column, pieces)
    if last:
        if CHUNKS == 1:
            whole = column_sums(sums_ptr, pieces, N, offs, mask, PIECES)
        else:
            whole = tl.zeros((BLOCK_N,), tl.float64)
            together: tl.constexpr = min(4, ROWS // CHUNKS)  # 16 float64 rows would spill
            for first in range(0, B, together):
                offs_b = first + tl.arange(0, together)
                parts = offs_b[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
                inside = (offs_b < B)[:, None, None] & mask[None, None, :]
                at = parts.to(tl.int64)[:, :, None] * N + offs[None, None, :]
                found = tl.load(sums_ptr + at, mask=inside, other=0.0).to(tl.float64)
                g = tl.sum(found, 1)
                tl.store(square_ptr + offs_b, tl.sum(g * g, 1), mask=offs_b < B)
                whole += tl.sum(g, 0)
        tl.store(square_ptr + B, tl.sum(whole * whole))
        if db_ptr is not None:
            whole_32 = whole.to(tl.float32)
            tl.store(db_ptr + offs, whole_32.to(db_ptr.dtype.element_ty), mask=mask)
    return last


@triton.jit
def merge_piece(
    scratch_ptr,  # [parts, BLOCK_O, BLOCK_I]
    dw_ptr,
    sums_ptr,
    piece,
    first_tile,
    remaining,
    own,
    B,
    I,
    O,
    ADD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """dW in some rows of a tile that several programs share (``configs.balance``), from their parts
    in the order of the samples, up to blocks.
    """
    pieces: tl.constexpr = BLOCK_O // HEIGHT
    together: tl.constexpr = ROWS // HEIGHT
    shared = piece // pieces
    height = piece % pieces * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    within = height * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    rest = B - own
    helper = shared * rest // own  # the first, which takes the samples after the tile's owner
    slot = remaining + shared + helper
    end = remaining + shared + ((shared + 1) * rest - 1) // own + 1
    total = tl.load(scratch_ptr + tl.cast(shared, tl.int64) * (BLOCK_O * BLOCK_I) + within)
    for first in range(slot, end, together):
        parts = first + tl.arange(0, together)
        at = parts.to(tl.int64)[:, None, None] * (BLOCK_O * BLOCK_I) + within[None, :, :]
        found = tl.load(scratch_ptr + at, mask=(parts < end)[:, None, None], other=0.0)
        total += tl.sum(found, 0)

    tiles_o, tiles_i = tl.cdiv(O, BLOCK_O), tl.cdiv(I, BLOCK_I)
    tile_o, tile_i = tile_position(first_tile + shared, tiles_o, tiles_i, GROUP)
    offs_o = tile_o * BLOCK_O + height
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    at = tl.cast(offs_o, tl.int64) * I + offs_i
    mask = (offs_o < O) & (offs_i < I)
    tl.store(sums_ptr + first_tile + piece, tl.sum(total * total))
    if dw_ptr is not None:
        if ADD:
            total += tl.load(dw_ptr + at, mask=mask, other=0.0)
        tl.store(dw_ptr + at, total.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def square_piece(
    dw_ptr,
    product_ptr,  # None where it is dW itself
    sums_ptr,
    piece,
    each,
    count,
    SPAN: tl.constexpr,
):
    """The square of ``each`` elements of dW, which are rounded after that."""
    squares = tl.zeros((SPAN,), tl.float32)
    start = tl.cast(piece, tl.int64) * each
    for first in range(0, each, SPAN):
        offs = start + first + tl.arange(0, SPAN)
        if product_ptr is None:
            g = tl.load(dw_ptr + offs, mask=offs < count, other=0.0).to(tl.float32)
        else:
            g = tl.load(product_ptr + offs, mask=offs < count, other=0.0)
            tl.store(dw_ptr + offs, g.to(dw_ptr.dtype.element_ty), mask=offs < count)
        squares += g * g
    tl.store(sums_ptr + piece, tl.sum(squares))


SIZES = (
    *("B", "first_tile", "remaining", "own", "tiles", "sums", "span", "elements"),
    *("bias_B", "bias_T", "each", "length", "bias_programs", "piece_programs", "arrivals"),
    *("partial_at", "sums_at", "bias_sums_at", "norms_at"),
)
"""Arguments whose values the compiler is not to specialise on: they vary with the batch."""


@triton.jit(do_not_specialize=SIZES)
def linear_finish_kernel(
    work_ptr,  # float32: the parts of shared tiles, then what begins at the offsets below
    tickets_ptr,  # [1 + columns] int32 zeros, and [pieces] more without chunks
    dw_ptr,  # and db_ptr: None for the rows alone
    product_ptr,  # [O, I] float32, from which dW is rounded; or None
    dy_ptr,
    db_ptr,
    rows_ptr,  # [P, B + 2] float32: the weight's row, the bias's
    B,
    I,
    O,
    N,
    first_tile,
    remaining,
    own,
    tiles,
    sums,
    span,
    elements,
    bias_B,
    bias_T,
    each,
    length,
    dy_stride_b,
    dy_stride_t,
    bias_programs,
    piece_programs,
    arrivals,
    partial_at,  # [B, tiles]: the samples' squares, where TILES
    sums_at,  # [sums]: the squares of the sum
    bias_sums_at,  # [pieces, N]
    norms_at,  # [columns, bias_B + 1]
    WEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    SPAN: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    bias_row_ptr = rows_ptr + WEIGHT * (B + 2)
    sums_ptr = work_ptr + sums_at
    norms_ptr = work_ptr + norms_at
    arrives = program >= bias_programs
    if program < bias_programs:
        if BIAS:
            arrives = add_bias(
                *(dy_ptr, db_ptr, work_ptr + bias_sums_at, norms_ptr, bias_row_ptr),
                *(tickets_ptr + 1, program, bias_programs // columns, columns),
                *(B, bias_B, bias_T, N, each, length),
                *(dy_stride_b, dy_stride_t, CHUNKS, ROWS, BLOCK_T, BLOCK_N),
            )
    elif program < bias_programs + piece_programs:
        if WEIGHT:
            piece = program - bias_programs
            if TILES:
                merge_piece(
                    *(work_ptr, dw_ptr, sums_ptr, piece, first_tile, remaining, own, B, I, O),
                    *(ADD, BLOCK_O, BLOCK_I, GROUP, ROWS, HEIGHT),
                )
            else:
                square_piece(dw_ptr, product_ptr, sums_ptr, piece, span, elements, SPAN)
    elif TILES:
        b = program - bias_programs - piece_programs
        line = work_ptr + partial_at + b.to(tl.int64) * tiles
        tl.store(rows_ptr + b, line_sum(line, tiles, SPAN).to(tl.float32))

    if arrives:
        if arrives_last(tickets_ptr, arrivals):
            if WEIGHT:
                tl.store(rows_ptr + B, line_sum(sums_ptr, sums, SPAN).to(tl.float32))
                tl.store(rows_ptr + B + 1, 1.0)
            if BIAS:
                # Without chunks the samples' own numbers are in their places. So are they where
                # the samples have one token: the bias is a single sum over all rows of dy here.
                skip = tl.where((CHUNKS > 1) & (bias_B == B), 0, bias_B)
                for first in range(skip, bias_B + 1, BLOCK_N):
                    offs = first + tl.arange(0, BLOCK_N)
                    mask = offs <= bias_B
                    found = column_sums(norms_ptr, columns, bias_B + 1, offs, mask, PIECES)
                    tl.store(bias_row_ptr + (B - bias_B) + offs, found.to(tl.float32), mask=mask)
                tl.store(bias_row_ptr + B + 1, 1.0)
