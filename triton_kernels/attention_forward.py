# SPDX-License-Identifier: Apache-2.0
"""Attention with learned parameters, forward; ``attention_tiles.py`` has the formulas.

A program takes a block of queries of one head and goes through the keys that they see.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.signatures import Parameters, Pattern, new_token_major
from gnsfast.triton_kernels.attention_tiles import (
    allowed,
    config,
    exp,
    gained,
    head_scale,
    key_range,
    load_rows,
    logits,
    mask_strides,
    place,
    sample_of,
    store_rows,
)
from gnsfast.triton_kernels.tiles import check_dtypes, dot, precision


@triton.jit
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    highest_ptr,  # [B, H, T] float32: m, and 1 / l
    inverse_ptr,
    sinks_ptr,  # this and the next three: None without the parameter
    logit_scale_ptr,
    q_gain_ptr,
    k_gain_ptr,
    mask_ptr,
    starts_ptr,  # [documents + 1]: where documents begin
    T,
    S,
    H,
    blocks,  # of a sample
    group,  # query heads that share a key head
    scale,
    window,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    o_stride_b,
    o_stride_h,
    o_stride_t,
    mask_stride_b,
    mask_stride_h,
    mask_stride_t,
    mask_stride_s,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, b = place(blocks, CAUSAL)
    start, h, tokens = block * BLOCK_M, tl.program_id(1).to(tl.int64), T
    row, first, T, S = sample_of(starts_ptr, b, T, S)
    offs_m, offs_d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_at = q_ptr + row * q_stride_b + h * q_stride_h + first * q_stride_t
    k_at = k_ptr + row * k_stride_b + h // group * k_stride_h + first * k_stride_t
    v_at = v_ptr + row * v_stride_b + h // group * v_stride_h + first * v_stride_t
    mask_at = mask_ptr
    if mask_ptr is not None:
        mask_at += row * mask_stride_b + h * mask_stride_h
    q = gained(load_rows(q_at, offs_m, offs_d, q_stride_t, T, D), q_gain_ptr, offs_d, D)
    factor = scale * head_scale(logit_scale_ptr, h)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin, end = key_range(start, T, S, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for n in range(begin, end, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        k = gained(load_rows(k_at, offs_n, offs_d, k_stride_t, S, D), k_gain_ptr, offs_d, D)
        v = load_rows(v_at, offs_n, offs_d, v_stride_t, S, D)
        t, n_ = offs_m[:, None], offs_n[None, :]
        seen = allowed(t, n_, T, S, window, CAUSAL, WINDOW)
        s = logits(q, k, factor, mask_at, t, n_, mask_stride_t, mask_stride_s, seen, PRECISION)
        higher = tl.maximum(highest, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = exp(s - base[:, None])
        shrink = exp(highest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        highest = higher
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
        higher = tl.maximum(highest, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = exp(highest - base)
        total = total * shrink + exp(sink - base)
        acc *= shrink[:, None]
        highest = higher
    # A query that sees no key has an output of zero, as in torch, and no weights in backward.
    nothing = total == 0.0
    inverse = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))
    acc *= inverse[:, None]
    if starts_ptr is not None:  # a document that is longer than max_seqlen
        acc = tl.where(T > blocks * BLOCK_M, float("nan"), acc)
    o_at = o_ptr + row * o_stride_b + h * o_stride_h + first * o_stride_t
    store_rows(o_at, acc, offs_m, offs_d, o_stride_t, T, D)
    at = (row * H + h) * tokens + first + offs_m
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(highest_ptr + at, highest, mask=offs_m < T)
    tl.store(inverse_ptr + at, inverse, mask=offs_m < T)


def attention_forward(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, p: Parameters, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, H, T, D], and the highest logit and the inverse sum, [B, H, T] float32. All are zero
    for tokens outside the documents.
    """
    check_dtypes("attention", q_BHTD, k_BKSD, v_BKSD)
    (B, H, T, D), (K, S) = q_BHTD.shape, k_BKSD.shape[1:3]
    o = new_token_major(q_BHTD)
    highest, inverse = (q_BHTD.new_empty((B, H, T), dtype=torch.float32) for _ in range(2))
    if pattern.cu_seqlens is not None:
        for t in (o, highest, inverse):
            t.zero_()
    options = config(p, pattern, q_BHTD)["forward"]
    blocks = triton.cdiv(pattern.longest(T), options["BLOCK_M"])
    attention_forward_kernel[(blocks * pattern.programs(B), H)](
        *(q_BHTD, k_BKSD, v_BKSD, o, highest, inverse, *p, pattern.mask, pattern.cu_seqlens),
        *(T, S, H, blocks, H // K, pattern.scale, pattern.window),
        *(stride for t in (q_BHTD, k_BKSD, v_BKSD, o) for stride in t.stride()[:3]),
        *mask_strides(pattern.mask),
        CAUSAL=pattern.is_causal,
        WINDOW=pattern.window > 0,
        D=D,
        PRECISION=precision(q_BHTD.dtype),
        **options,
    )
    return o, highest, inverse
