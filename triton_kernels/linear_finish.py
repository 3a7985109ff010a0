# SPDX-License-Identifier: Apache-2.0
"""The end of a linear layer's weight gradient, in one kernel: the tiles that several programs
share, the bias's gradient, and the probe rows.

Legend: B samples, T tokens of a sample, I in_features, O out_features, N the bias's features, M
measures.

Its programs are of several kinds, told apart by their number:

    a block of 128 columns of dy, of some samples or of a chunk of a sample's tokens: sums over
        tokens; the last program of a block of columns makes db there and squares each sample's sum;
    a piece of dW: the sum of a shared tile's parts, or of the plain product (the routes whose
        norms do not come from tiles), and its square;
    a sample: the sum of its tiles' squares, which is its number in the weight's row.

The last program of all adds what the others have found about the sum and about the bias. Sums of
partials are float64, in a fixed order.
"""

import triton
import triton.language as tl

from gnsfast.triton_kernels.finish import arrives_last, column_sums
from gnsfast.triton_kernels.tiles import root_metric, tile_position

BLOCK_N = 128
"""Columns of dy that a program adds: 256 bytes of each row in half precision."""

ROWS = 32
"""Rows of partial sums, or of dy, that a program adds at a time."""

HEIGHT = 16
"""Rows of a tile in a piece: a tile of 128 rows that six programs share is added by eight."""

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
    v_ptr,
    constants_ptr,
    sums_ptr,  # [pieces, N]
    norms_ptr,  # [M, columns, B + 1]
    tickets_ptr,  # [columns]
    program,
    pieces,
    columns,
    B,
    T,
    N,
    each,
    length,
    stride_b,
    stride_t,
    CHUNKS: tl.constexpr,
    METRIC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A piece of the bias's gradient. Returns whether it was the last of its columns, which have
    then been added and squared.
    """
    column = program % columns
    piece = program // columns
    offs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < N
    if METRIC:
        v = tl.load(v_ptr + offs, mask=mask, other=1.0)
        root = root_metric(v, constants_ptr)
    else:
        root = 1.0
    row = norms_ptr + column * (B + 1)
    of_metric = row + columns * (B + 1)
    first_t = piece % CHUNKS * length
    first_b = piece // CHUNKS * each
    total = tl.zeros((BLOCK_N,), tl.float32)
    for b in range(first_b, min(first_b + each, B)):
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for t in range(first_t, min(first_t + length, T), BLOCK_T):
            offs_t = t + tl.arange(0, BLOCK_T)
            at = tl.cast(b, tl.int64) * stride_b + offs_t.to(tl.int64)[:, None] * stride_t
            inside = (offs_t < min(first_t + length, T))[:, None] & mask[None, :]
            acc += tl.load(dy_ptr + at + offs[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.sum(acc, 0)
        if CHUNKS == 1:
            tl.store(row + b, tl.sum(g * g))
            if METRIC:
                tl.store(of_metric + b, tl.sum(g * root * g * root))
        total += g
    tl.store(sums_ptr + tl.cast(piece, tl.int64) * N + offs, total, mask=mask)

    last = arrives_last(tickets_ptr + column, pieces)
    if last:
        if CHUNKS == 1:
            whole = column_sums(sums_ptr, pieces, N, offs, mask, ROWS)
        else:
            whole = tl.zeros((BLOCK_N,), tl.float64)
            together: tl.constexpr = ROWS // CHUNKS
            for first in range(0, B, together):
                offs_b = first + tl.arange(0, together)
                rows = offs_b[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
                inside = (offs_b < B)[:, None, None] & mask[None, None, :]
                at = rows.to(tl.int64)[:, :, None] * N + offs[None, None, :]
                found = tl.load(sums_ptr + at, mask=inside, other=0.0).to(tl.float64)
                g = tl.sum(found, 1)
                tl.store(row + offs_b, tl.sum(g * g, 1), mask=offs_b < B)
                if METRIC:
                    g_root = g * root[None, :]
                    tl.store(of_metric + offs_b, tl.sum(g_root * g_root, 1), mask=offs_b < B)
                whole += tl.sum(g, 0)
        tl.store(row + B, tl.sum(whole * whole))
        if METRIC:
            tl.store(of_metric + B, tl.sum(whole * root * whole * root))
        whole_32 = whole.to(tl.float32)
        tl.store(db_ptr + offs, whole_32.to(db_ptr.dtype.element_ty), mask=mask)
    return last


@triton.jit
def merge_piece(
    scratch_ptr,  # [parts, BLOCK_O, BLOCK_I]
    dw_ptr,
    v_ptr,
    constants_ptr,
    sums_ptr,
    sums,
    piece,
    first_tile,
    remaining,
    own,
    B,
    I,
    O,
    ADD: tl.constexpr,
    METRIC: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """dW in some rows of a tile that several programs share (``configs.balance``), from their parts
    in the order of the samples.
    """
    pieces: tl.constexpr = BLOCK_O // HEIGHT
    shared = piece // pieces
    height = piece % pieces * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    within = height * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    total = tl.load(scratch_ptr + tl.cast(shared, tl.int64) * (BLOCK_O * BLOCK_I) + within)
    rest = B - own
    for helper in range(shared * rest // own, ((shared + 1) * rest - 1) // own + 1):
        slot = tl.cast(remaining + shared + helper, tl.int64)
        total += tl.load(scratch_ptr + slot * (BLOCK_O * BLOCK_I) + within)

    tiles_o, tiles_i = tl.cdiv(O, BLOCK_O), tl.cdiv(I, BLOCK_I)
    tile_o, tile_i = tile_position(first_tile + shared, tiles_o, tiles_i, GROUP)
    offs_o = tile_o * BLOCK_O + height
    offs_i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    at = tl.cast(offs_o, tl.int64) * I + offs_i
    mask = (offs_o < O) & (offs_i < I)
    tl.store(sums_ptr + first_tile + piece, tl.sum(total * total))
    if METRIC:
        weighed = total * root_metric(tl.load(v_ptr + at, mask=mask, other=1.0), constants_ptr)
        tl.store(sums_ptr + sums + first_tile + piece, tl.sum(weighed * weighed))
    if ADD:
        total += tl.load(dw_ptr + at, mask=mask, other=0.0)
    tl.store(dw_ptr + at, total.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def square_piece(
    dw_ptr,
    v_ptr,
    constants_ptr,
    sums_ptr,
    sums,
    piece,
    each,
    count,
    METRIC: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The square of ``each`` elements of dW."""
    squares = tl.zeros((SPAN,), tl.float32)
    weighed = tl.zeros((SPAN,), tl.float32)
    start = tl.cast(piece, tl.int64) * each
    for first in range(0, each, SPAN):
        offs = start + first + tl.arange(0, SPAN)
        g = tl.load(dw_ptr + offs, mask=offs < count, other=0.0).to(tl.float32)
        squares += g * g
        if METRIC:
            v = tl.load(v_ptr + offs, mask=offs < count, other=1.0)
            g *= root_metric(v, constants_ptr)
            weighed += g * g
    tl.store(sums_ptr + piece, tl.sum(squares))
    if METRIC:
        tl.store(sums_ptr + sums + piece, tl.sum(weighed))


SIZES = (
    *("B", "row_stride", "first_tile", "remaining", "own", "tiles", "sums", "span", "elements"),
    *("bias_B", "bias_T", "each", "length", "bias_programs", "piece_programs", "arrivals"),
    *("partial_at", "sums_at", "bias_sums_at", "norms_at"),
)
"""Arguments whose values the compiler is not to specialise on: they vary with the batch."""


@triton.jit(do_not_specialize=SIZES)
def linear_finish_kernel(
    work_ptr,  # float32: the parts of shared tiles, then what begins at the offsets below
    tickets_ptr,  # [1 + columns] int32 zeros
    dw_ptr,
    dy_ptr,
    db_ptr,
    rows_ptr,  # [M P, B + 2] float32: the weight's row, the bias's, both again under the metric
    v_ptr,  # [O, I] second moments, where METRIC
    constants_ptr,  # [2] float64, where METRIC
    bias_v_ptr,
    bias_constants_ptr,
    B,
    I,
    O,
    N,
    row_stride,
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
    partial_at,  # [M, B, tiles]: the samples' squares, where TILES
    sums_at,  # [M, sums]: the squares of the sum
    bias_sums_at,  # [pieces, N]
    norms_at,  # [M, columns, bias_B + 1]
    WEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    METRIC: tl.constexpr,
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
    parameters: tl.constexpr = WEIGHT + BIAS
    sums_ptr = work_ptr + sums_at
    norms_ptr = work_ptr + norms_at
    arrives = program >= bias_programs
    if program < bias_programs:
        if BIAS:
            arrives = add_bias(
                *(dy_ptr, db_ptr, bias_v_ptr, bias_constants_ptr),
                *(work_ptr + bias_sums_at, norms_ptr, tickets_ptr + 1, program),
                *(bias_programs // columns, columns, bias_B, bias_T, N, each, length),
                *(dy_stride_b, dy_stride_t, CHUNKS, METRIC, ROWS, BLOCK_T, BLOCK_N),
            )
    elif program < bias_programs + piece_programs:
        if WEIGHT:
            piece = program - bias_programs
            if TILES:
                merge_piece(
                    *(work_ptr, dw_ptr, v_ptr, constants_ptr, sums_ptr, sums, piece),
                    *(first_tile, remaining, own, B, I, O),
                    *(ADD, METRIC, BLOCK_O, BLOCK_I, GROUP, HEIGHT),
                )
            else:
                square_piece(
                    *(dw_ptr, v_ptr, constants_ptr, sums_ptr, sums, piece, span, elements),
                    *(METRIC, SPAN),
                )
    elif TILES:
        b = program - bias_programs - piece_programs
        for m in tl.static_range(1 + METRIC):
            line = work_ptr + partial_at + (m * B + b).to(tl.int64) * tiles
            at = rows_ptr + m * parameters * row_stride + b
            tl.store(at, line_sum(line, tiles, SPAN).to(tl.float32))

    if arrives:
        if arrives_last(tickets_ptr, arrivals):
            for m in tl.static_range(1 + METRIC):
                row = rows_ptr + m * parameters * row_stride
                if WEIGHT:
                    of_sum = line_sum(sums_ptr + m * sums, sums, SPAN)
                    tl.store(row + B, of_sum.to(tl.float32))
                    tl.store(row + B + 1, 1.0)
                if BIAS:
                    # The bias of one-token samples is a single sum over all rows of dy here: the
                    # samples' own numbers are in their places, and ``bias_B`` is one.
                    row += (parameters - 1) * row_stride
                    skip = tl.where(bias_B == B, 0, bias_B)
                    of_m = norms_ptr + m * columns * (bias_B + 1)
                    for first in range(skip, bias_B + 1, BLOCK_N):
                        offs = first + tl.arange(0, BLOCK_N)
                        mask = offs <= bias_B
                        found = column_sums(of_m, columns, bias_B + 1, offs, mask, ROWS)
                        tl.store(row + (B - bias_B) + offs, found.to(tl.float32), mask=mask)
                    tl.store(row + B + 1, 1.0)
