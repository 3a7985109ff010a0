# SPDX-License-Identifier: Apache-2.0
"""Attention with learned parameters, backward. Each sample's gradients of sinks, logit scales and
gains come from tiles that are in registers anyway. ``attention_tiles.py`` has the formulas.

A program of the first kernel takes a block of queries. One of the second takes a block of keys, and
all query heads that share it. No two programs add to the same number, so two runs give the same
bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnsfast.signatures import AttentionBackward, Parameters, Pattern
from gnsfast.triton_kernels import sums
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
from gnsfast.triton_kernels.finish import clear_tickets
from gnsfast.triton_kernels.tiles import dot, precision, unit_inner


@triton.jit(do_not_specialize=["tickets"])
def attention_queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    highest_ptr,
    inverse_ptr,
    delta_ptr,  # [B, H, T] float32, written
    dq_ptr,
    sinks_ptr,
    logit_scale_ptr,
    q_gain_ptr,
    k_gain_ptr,
    mask_ptr,
    starts_ptr,
    dsinks_ptr,  # [B, blocks, H] float32 partial sums; None without the parameter, as the next two
    dlogit_scale_ptr,
    dq_gain_ptr,  # [B, H, blocks, D]
    tickets_ptr,  # zeroed for the finishing kernel; None without a wanted parameter
    tickets,
    T,
    S,
    H,
    blocks,
    group,
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
    do_stride_b,
    do_stride_h,
    do_stride_t,
    dq_stride_b,
    dq_stride_h,
    dq_stride_t,
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
    o_at = o_ptr + row * o_stride_b + h * o_stride_h + first * o_stride_t
    do_at = do_ptr + row * do_stride_b + h * do_stride_h + first * do_stride_t
    mask_at = mask_ptr
    if mask_ptr is not None:
        mask_at += row * mask_stride_b + h * mask_stride_h
    at = (row * H + h) * tokens + first + offs_m
    # Beyond the queries exp(sink - highest) is zero; a large sink would make it infinite.
    highest = tl.load(highest_ptr + at, mask=offs_m < T, other=float("inf"))
    inverse = tl.load(inverse_ptr + at, mask=offs_m < T, other=0.0)
    do = load_rows(do_at, offs_m, offs_d, do_stride_t, T, D)
    o = load_rows(o_at, offs_m, offs_d, o_stride_t, T, D)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, mask=offs_m < T)

    q = gained(load_rows(q_at, offs_m, offs_d, q_stride_t, T, D), q_gain_ptr, offs_d, D)
    of_head = head_scale(logit_scale_ptr, h)
    factor = scale * of_head
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # Σ ds k', not yet scaled
    begin, end = key_range(start, T, S, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for n in range(begin, end, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        k = gained(load_rows(k_at, offs_n, offs_d, k_stride_t, S, D), k_gain_ptr, offs_d, D)
        v = load_rows(v_at, offs_n, offs_d, v_stride_t, S, D)
        t, n_ = offs_m[:, None], offs_n[None, :]
        seen = allowed(t, n_, T, S, window, CAUSAL, WINDOW)
        s = logits(q, k, factor, mask_at, t, n_, mask_stride_t, mask_stride_s, seen, PRECISION)
        p = exp(s - highest[:, None]) * inverse[:, None]
        dp = dot(do, v.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION)
    dq *= scale
    scalar_part = (b.to(tl.int64) * blocks + block) * H + h
    if dlogit_scale_ptr is not None:
        tl.store(dlogit_scale_ptr + scalar_part, tl.sum(dq * q.to(tl.float32)))
    dq *= of_head
    if dsinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
        tl.store(dsinks_ptr + scalar_part, -tl.sum(exp(sink - highest) * inverse * delta))
    if dq_gain_ptr is not None:
        plain = load_rows(q_at, offs_m, offs_d, q_stride_t, T, D)  # again, to save registers
        sums = tl.sum(dq * plain.to(tl.float32), 0)
        part = (b.to(tl.int64) * H + h) * blocks + block
        tl.store(dq_gain_ptr + part * D + offs_d, sums, mask=offs_d < D)
    if q_gain_ptr is not None:
        gain = tl.load(q_gain_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        dq *= gain[None, :]
    dq_at = dq_ptr + row * dq_stride_b + h * dq_stride_h + first * dq_stride_t
    store_rows(dq_at, dq, offs_m, offs_d, dq_stride_t, T, D)
    if tickets_ptr is not None:
        clear_tickets(tickets_ptr, tickets)


@triton.jit
def attention_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    highest_ptr,
    inverse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    logit_scale_ptr,
    q_gain_ptr,
    k_gain_ptr,
    mask_ptr,
    starts_ptr,
    dk_gain_ptr,  # [B, K, blocks, D] float32 partial sums
    T,
    S,
    H,
    blocks,
    group,
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
    do_stride_b,
    do_stride_h,
    do_stride_t,
    dk_stride_b,
    dk_stride_h,
    dk_stride_t,
    dv_stride_b,
    dv_stride_h,
    dv_stride_t,
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
    block, b = place(blocks, False)
    start, head, tokens = block * BLOCK_N, tl.program_id(1).to(tl.int64), T
    row, first, T, S = sample_of(starts_ptr, b, T, S)
    offs_n, offs_d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_at = k_ptr + row * k_stride_b + head * k_stride_h + first * k_stride_t
    v_at = v_ptr + row * v_stride_b + head * v_stride_h + first * v_stride_t
    k = gained(load_rows(k_at, offs_n, offs_d, k_stride_t, S, D), k_gain_ptr, offs_d, D)
    v = load_rows(v_at, offs_n, offs_d, v_stride_t, S, D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)

    begin, end = 0, T
    if CAUSAL:
        begin = start // BLOCK_M * BLOCK_M
    elif WINDOW:
        begin = max(0, start - window + 1) // BLOCK_M * BLOCK_M
    if WINDOW:
        end = min(T, start + BLOCK_N - 1 + window)
    end = tl.where(start < S, end, 0)
    # Heads of a group are scaled relative to the largest: ds times 100 would overflow float16.
    largest = 1.0
    if logit_scale_ptr is not None:
        for g in range(group):
            largest = tl.maximum(largest, tl.abs(head_scale(logit_scale_ptr, head * group + g)))
    for g in range(group):
        h = head * group + g
        q_at = q_ptr + row * q_stride_b + h * q_stride_h + first * q_stride_t
        do_at = do_ptr + row * do_stride_b + h * do_stride_h + first * do_stride_t
        mask_at = mask_ptr
        if mask_ptr is not None:
            mask_at += row * mask_stride_b + h * mask_stride_h
        of_head = head_scale(logit_scale_ptr, h)
        factor = scale * of_head
        for m in range(begin, end, BLOCK_M):
            offs_m = m + tl.arange(0, BLOCK_M)
            at = (row * H + h) * tokens + first + offs_m
            highest = tl.load(highest_ptr + at, mask=offs_m < T, other=0.0)
            inverse = tl.load(inverse_ptr + at, mask=offs_m < T, other=0.0)
            delta = tl.load(delta_ptr + at, mask=offs_m < T, other=0.0)
            q = gained(load_rows(q_at, offs_m, offs_d, q_stride_t, T, D), q_gain_ptr, offs_d, D)
            do = load_rows(do_at, offs_m, offs_d, do_stride_t, T, D)
            t, n_ = offs_m[None, :], offs_n[:, None]
            seen = allowed(t, n_, T, S, window, CAUSAL, WINDOW)
            s = logits(k, q, factor, mask_at, t, n_, mask_stride_t, mask_stride_s, seen, PRECISION)
            p = exp(s - highest[None, :]) * inverse[None, :]
            dv = dot(p.to(do.dtype), do, dv, PRECISION)
            dp = dot(v, do.T, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), PRECISION)
            ds = p * (dp - delta[None, :]) * (of_head / largest)
            dk = dot(ds.to(q.dtype), q, dk, PRECISION)
    dk *= scale * largest
    if dk_gain_ptr is not None:
        part = (b.to(tl.int64) * (H // group) + head) * blocks + block
        plain = load_rows(k_at, offs_n, offs_d, k_stride_t, S, D)
        sums = tl.sum(dk * plain.to(tl.float32), 0)
        tl.store(dk_gain_ptr + part * D + offs_d, sums, mask=offs_d < D)
    if k_gain_ptr is not None:
        gain = tl.load(k_gain_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        dk *= gain[None, :]
    dk_at = dk_ptr + row * dk_stride_b + head * dk_stride_h + first * dk_stride_t
    dv_at = dv_ptr + row * dv_stride_b + head * dv_stride_h + first * dv_stride_t
    store_rows(dk_at, dk, offs_n, offs_d, dk_stride_t, S, D)
    store_rows(dv_at, dv, offs_n, offs_d, dv_stride_t, S, D)


def attention_backward(
    a: AttentionBackward, q_BHTD: Tensor, k_BKSD: Tensor, p: Parameters, pattern: Pattern
) -> tuple[Tensor, ...]:
    """See ``AttentionBackward``; q, k, parameters and pattern as the kernels take them."""
    dq, dk, dv, *grads, rows = results = a.results()
    do_BHTD, v_BKSD = unit_inner(a.do_BHTD), unit_inner(a.v_BKSD)
    (B, H, T, D), (K, S) = q_BHTD.shape, k_BKSD.shape[1:3]
    programs = pattern.programs(B)
    options = config(p, pattern, q_BHTD)
    delta = torch.empty_like(a.highest_BHT)
    if pattern.cu_seqlens is not None:
        for t in (dq, dk, dv):
            t.zero_()  # tokens of no document
    query_blocks = triton.cdiv(pattern.longest(T), options["queries"]["BLOCK_M"])
    key_blocks = triton.cdiv(pattern.longest(S), options["keys"]["BLOCK_N"])
    k = programs // a.samples  # rows of a sample
    shapes = [(query_blocks, H), (query_blocks, H), (H * query_blocks, D), (K * key_blocks, D)]
    partials = [
        q_BHTD.new_empty((a.samples, k * pieces, N), dtype=torch.float32) if want else None
        for want, (pieces, N) in zip(a.wanted, shapes)
    ]
    found = [t for t in partials if t is not None]
    plan, tickets, count = None, None, 0
    if found:
        sizes = (tuple(t.shape[dim] for t in found) for dim in (1, 2))
        plan = sums.plan(a.samples, *sizes)
        count = plan.tickets
        tickets = q_BHTD.new_empty(count, dtype=torch.int32)
    common = dict(
        CAUSAL=pattern.is_causal,
        WINDOW=pattern.window > 0,
        D=D,
        PRECISION=precision(q_BHTD.dtype),
    )
    more = (H // K, pattern.scale, pattern.window)
    attention_queries_kernel[(query_blocks * programs, H)](
        *(q_BHTD, k_BKSD, v_BKSD, a.o_BHTD, do_BHTD, a.highest_BHT, a.inverse_BHT, delta, dq, *p),
        *(pattern.mask, pattern.cu_seqlens, *partials[:3], tickets, count),
        *(T, S, H, query_blocks, *more),
        *(s for t in (q_BHTD, k_BKSD, v_BKSD, a.o_BHTD, do_BHTD, dq) for s in t.stride()[:3]),
        *mask_strides(pattern.mask),
        **common,
        **options["queries"],
    )
    attention_keys_kernel[(key_blocks * programs, K)](
        *(q_BHTD, k_BKSD, v_BKSD, do_BHTD, a.highest_BHT, a.inverse_BHT, delta, dk, dv, *p[1:]),
        *(pattern.mask, pattern.cu_seqlens, partials[3]),
        *(T, S, H, key_blocks, *more),
        *(s for t in (q_BHTD, k_BKSD, v_BKSD, do_BHTD, dk, dv) for s in t.stride()[:3]),
        *mask_strides(pattern.mask),
        **common,
        **options["keys"],
    )
    if plan is not None and tickets is not None:
        plan.run(found, [g for g, want in zip(grads, a.wanted) if want], rows, tickets)
    return results
