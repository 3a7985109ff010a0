# SPDX-License-Identifier: Apache-2.0
"""Attention with learned parameters: sinks, logit scales, query and key gains."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gnsfast import ops
from gnsfast.functional._autocast import autocast_dtype, backward_pass
from gnsfast.functional.plan import PLAIN
from gnsfast.signatures import AttentionBackward, AttentionForward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        logit_scale: Tensor | None,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        probe: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *pattern: Any,
    ) -> Tensor:
        ctx.wanted = list(ctx.needs_input_grad[3:7])
        ctx.samples = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        if probe is not None:
            PLAIN.check("attention", probe, sum(ctx.wanted))
            rows, ctx.samples = ctx.samples, PLAIN.samples(probe)
            folded = cu_seqlens is None and ctx.samples and rows % ctx.samples == 0
            if rows != ctx.samples and not folded:
                raise ValueError(f"the probe is for {ctx.samples} samples, but there are {rows}")
        parameters = (sinks, logit_scale, q_gain, k_gain)
        o: Tensor
        a = AttentionForward(q, k, v, *parameters, mask, cu_seqlens, *pattern)
        o, highest, inverse = ops.attention_forward(a)
        ctx.save_for_backward(q, k, v, o, highest, inverse, *parameters, mask, cu_seqlens)
        ctx.pattern = pattern
        return o

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        fields: Any = *tensors, *ctx.pattern, ctx.samples, ctx.wanted
        results = ops.attention_backward(AttentionBackward(do, *fields))
        dq, dk, dv, *grads, rows = results
        wanted = [g if want else None for g, want in zip(grads, ctx.wanted)]
        rows = rows if ctx.needs_input_grad[7] else None
        return dq, dk, dv, *wanted, rows, *(None,) * (2 + len(ctx.pattern))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    logit_scale: Tensor | None = None,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    probe: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention whose own parameters get per-sample norms.

    It equals ``F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale,
    enable_gqa=True)``, and calls it if there is no window, parameter or ``cu_seqlens``.

    Args:
        q: [B, H, T, D]. On a GPU D is at most 256.
        k, v: [B, K, S, D]. Each of the K heads serves H / K neighbouring query heads.
        attn_mask: bool (True: visible) or float (added to the logits), broadcast to [B, H, T, S].
        is_causal: whether query t sees only the keys s <= t.
        scale: the factor of the logits, by default 1 / sqrt(D).
        window: how far a query sees: itself and the ``window - 1`` tokens before it. If attention
            is not causal, also as many tokens after it.
        sinks: [H] logits that take part in the softmax and have no value (gpt-oss).
        logit_scale: [H] a factor for each head's logits.
        q_gain, k_gain: [D] factors of queries and keys, like the gain of a norm before them.
        cu_seqlens: int [documents + 1], for documents packed into one row: the first token of each
            document, then the end of the last. B is then 1, T is S, and each document is a sample.
            Tokens see only their own document.
        max_seqlen: the length of the longest document. Without it a GPU starts a program for every
            block of the row in every document. A longer document is an error on a CPU, and gives
            NaN on a GPU.
        probe: float32 zeros [P, samples + 2], where P is the number of trainable ones of (sinks,
            logit_scale, q_gain, k_gain). If B is k · samples, k consecutive rows are one sample.

    The output of a query that sees nothing is zero. The squared norms scale with the loss.

    Raises:
        ValueError: for shapes that do not fit together, and for a probe of another shape.

    Source: FlashAttention-2 (arXiv 2307.08691); sinks: gpt-oss (arXiv 2508.10925).

    >>> q, k, v = (torch.randn(3, 2, 7, 16) for _ in range(3))
    >>> sinks, probe = torch.zeros(2, requires_grad=True), torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.attention(q, k, v, sinks=sinks, probe=probe).sum().backward()
    >>> torch.allclose(probe.grad[0, 3], sinks.grad.square().sum())
    True
    """
    parameters = sinks, logit_scale, q_gain, k_gain
    if has_torch_function(parameters):  # parameters that are measured
        seen: Tensor = handle_torch_function(
            attention,
            parameters,
            q,
            k,
            v,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            window=window,
            sinks=sinks,
            logit_scale=logit_scale,
            q_gain=q_gain,
            k_gain=k_gain,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        return seen
    _check(q, k, v, attn_mask, window, sinks, logit_scale, q_gain, k_gain, cu_seqlens)
    grouped = q.shape[1] != k.shape[1]
    if max_seqlen is not None and cu_seqlens is None:
        raise ValueError("max_seqlen is the length of the longest document, so it needs cu_seqlens")
    if not window and cu_seqlens is None and all(p is None for p in parameters):
        if probe is not None:
            PLAIN.check("attention", probe, 0)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    window = 0 if window is None or window >= max(q.shape[2:3] + k.shape[2:3]) else window
    pattern = (is_causal, scale, window, max_seqlen or 0)
    y: Tensor = _Attention.apply(q, k, v, *parameters, probe, attn_mask, cu_seqlens, *pattern)
    return y


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    logit_scale: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or len(q) != len(k):
        raise ValueError(f"attention takes q [B, H, T, D], k and v [B, K, S, D], not {shapes}")
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    if k.shape[3] != D or D == 0 or K == 0 or H % K:
        raise ValueError(
            "attention takes the same head dimension for q and k, at least 1, and a number of "
            f"query heads that is a multiple of the key heads, not {shapes}"
        )
    for name, p, size in (
        ("sinks", sinks, H),
        ("logit_scale", logit_scale, H),
        ("q_gain", q_gain, D),
        ("k_gain", k_gain, D),
    ):
        if p is not None and p.shape != (size,):
            raise ValueError(f"{name} must have shape [{size}] for {shapes}, not {list(p.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, which is the token itself, not {window}")
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"attn_mask must be bool (True takes part) or float, not {mask.dtype}")
    if mask is not None and mask.requires_grad:
        raise ValueError(
            "attn_mask must not require a gradient, because attention does not compute one for it"
        )
    if mask is not None:
        fits = mask.ndim <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], (S, T, H, B)))
        if not fits:
            raise ValueError(
                f"attn_mask of shape {list(mask.shape)} cannot be broadcast to {[B, H, T, S]}"
            )
    if cu_seqlens is not None and (B != 1 or T != S or cu_seqlens.ndim != 1 or mask is not None):
        raise ValueError(
            "cu_seqlens [documents + 1] needs one packed row (B = 1 and T = S) and no attn_mask, "
            f"not {shapes}"
        )
    if cu_seqlens is not None and cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, not {cu_seqlens.dtype}")
