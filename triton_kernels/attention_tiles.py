# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels share.

Legend: B samples (or documents of one packed row), H query heads, K key heads, T queries, S keys, D
head dim. With q' = q·q_gain, k' = k·k_gain, and c = scale · logit_scale of the head:

    s = c q'ᵀk' + mask    p = exp(s - m) / l    o = p v    l = Σ exp(s - m) + exp(sink - m)
    δ = Σ_d do·o    ds = p (do vᵀ - δ)    dq' = c ds k'    dk' = c dsᵀ q'    dv = pᵀ do

    d sink = -Σ_t exp(sink - m) / l δ    d logit_scale = scale Σ (ds k')·q'    d gain = Σ dq'·q
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.reference import MAX_HEAD_DIM
from gnsfast.signatures import Parameters, Pattern
from gnsfast.triton_kernels.configs import AMD_STAGES
from gnsfast.triton_kernels.tiles import blackwell, dot, most_registers

AMD_WARPS = 4
"""Of 64 threads each, one for each of a multiprocessor's four parts: a thread then has up to 512
registers."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(blocks, LAST_FIRST: tl.constexpr):
    """The program's block and its sample. Under causality the last block of queries has the most
    work and goes first. Both share one axis of the grid, as the other axes end at 65535.
    """
    block = tl.program_id(0) % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, tl.program_id(0) // blocks


@triton.jit
def sample_of(starts_ptr, b, T, S):
    """Sample ``b``: its row of the batch, its first token, its number of queries and of keys."""
    row, first = b.to(tl.int64), b.to(tl.int64) * 0
    if starts_ptr is not None:
        end = min(tl.load(starts_ptr + b + 1), T)
        row, first = first, min(tl.load(starts_ptr + b), T).to(tl.int64)
        T = (end - first).to(tl.int32)
        S = T
    return row, first, T, S


@triton.jit
def load_rows(at, offs, offs_d, stride, rows, D: tl.constexpr):
    """Rows ``offs`` of a matrix [rows, D]; zero outside it."""
    mask = (offs < rows)[:, None] & (offs_d < D)[None, :]
    return tl.load(at + offs.to(tl.int64)[:, None] * stride + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(at, values, offs, offs_d, stride, rows, D: tl.constexpr):
    mask = (offs < rows)[:, None] & (offs_d < D)[None, :]
    where = at + offs.to(tl.int64)[:, None] * stride + offs_d[None, :]
    tl.store(where, values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def gained(t, gain_ptr, offs_d, D: tl.constexpr):
    """``t`` times its gain, rounded to its dtype as a module before the attention would."""
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        t = (t.to(tl.float32) * gain[None, :]).to(t.dtype)
    return t


@triton.jit
def head_scale(logit_scale_ptr, h):
    factor = 1.0
    if logit_scale_ptr is not None:
        factor = tl.load(logit_scale_ptr + h).to(tl.float32)
    return factor


@triton.jit
def allowed(t, s, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether query ``t`` sees key ``s``; the two broadcast against each other."""
    seen = (t < T) & (s < S)
    if CAUSAL:
        seen &= s <= t
    if WINDOW:
        seen &= t - s < window
        if not CAUSAL:
            seen &= s - t < window
    return seen


@triton.jit
def logits(
    left, right, factor, mask_at, t, s, mask_stride_t, mask_stride_s, seen, PRECISION: tl.constexpr
):
    """The scaled products of two blocks of rows, with the mask added; -inf if not ``seen``."""
    zeros = tl.zeros((left.shape[0], right.shape[0]), tl.float32)
    out = dot(left, right.T, zeros, PRECISION) * factor
    if mask_at is not None:
        at = mask_at + t.to(tl.int64) * mask_stride_t + s.to(tl.int64) * mask_stride_s
        out += tl.load(at, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, out, float("-inf"))


@triton.jit
def exp(x):
    """e^x. Subtract from a logit before: a mask of -3e38 times log2(e) would already be -inf."""
    return tl.exp2(x * LOG2E)


@triton.jit
def key_range(
    start, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The range of keys that a block of queries sees; it begins at a multiple of ``BLOCK_N``."""
    first, last = 0, S
    if CAUSAL:
        last = min(S, start + BLOCK_M)
    elif WINDOW:
        last = min(S, start + BLOCK_M - 1 + window)
    if WINDOW:
        first = max(0, start - window + 1) // BLOCK_N * BLOCK_N
    return first, tl.where(start < T, last, 0)


def config(p: Parameters, pattern: Pattern, q: Tensor) -> dict[str, dict[str, int]]:
    """Block sizes and warps of each kernel, by its name."""
    loaded = pattern.mask is not None or p.q_gain_D is not None or p.k_gain_D is not None
    check_head_dim(q)
    block_d = max(16, triton.next_power_of_2(q.shape[3]))
    table = SINGLE if q.dtype == torch.float32 else LOADED if loaded else HALF
    width = min(d for d in table if d >= block_d)
    sizes = table[width]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    tiles = {
        kernel: dict(zip(names, size), BLOCK_D=block_d)
        for kernel, size in zip(("forward", "queries", "keys"), sizes)
    }
    if torch.version.hip:
        for tile in tiles.values():
            tile["num_warps"] = min(AMD_WARPS, tile["num_warps"] // 2)
            tile["num_stages"] = min(tile["num_stages"], AMD_STAGES)
    elif table is SINGLE:
        for tile in tiles.values():
            tile["maxnreg"] = most_registers(tile["num_warps"])
    elif blackwell():
        for kernel in UNFENCED_LOADED[width] if loaded else UNFENCED_HALF[width]:
            tiles[kernel]["num_stages"] = 1
    return tiles


# By head dim: (queries, keys, warps, stages) of forward, of the queries' gradient, of the keys'.
# With strides that are multiples of 16 elements none spills on sm_80, 90 or 100, but for the
# queries' gradient in float32 with heads of more than 128. There a thread multiplies whole rows,
# 2 x 256. On gfx90a and gfx942 the keys' gradient with a mask and heads of 128 spills 96 bytes.
HALF = {
    64: ((128, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2)),
    128: ((128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    256: ((64, 32, 8, 2), (32, 16, 8, 1), (32, 32, 8, 1)),
}
LOADED = {
    32: ((128, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
    64: ((128, 64, 8, 3), (64, 16, 8, 2), (32, 32, 4, 2)),
    128: ((64, 32, 8, 2), (64, 16, 8, 2), (32, 32, 8, 2)),
    256: ((32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 8, 1)),
}
SINGLE = {
    64: ((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    128: ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    256: ((16, 16, 16, 1), (16, 16, 8, 1), (16, 16, 16, 1)),
}


# Blackwell's tensor cores see what copies (cp.async) have written only after a fence that follows
# the wait for the copies. Triton 3.7.1 and 3.8.0 put it before the wait in some variants of these
# kernels, so that a product may read stale numbers. With one stage there are no copies. Of other
# tiles more than a hundred variants were read, and none lacks a fence; those of fewer than 64 rows
# multiply without that path (benchmarks/fences.py).
UNFENCED_HALF: dict[int, tuple[str, ...]] = {64: ("keys",), 128: (), 256: ("forward",)}
UNFENCED_LOADED: dict[int, tuple[str, ...]] = {
    32: ("forward", "queries", "keys"),
    64: ("queries",),
    128: ("forward", "queries"),
    256: (),
}


def mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.stride()


def check_head_dim(q: Tensor) -> None:
    if q.shape[3] > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"attention has a Triton kernel for head dims of at most {MAX_HEAD_DIM}, not for q "
            f"{list(q.shape)}. GNSFAST_BACKEND=reference runs plain PyTorch instead."
        )
