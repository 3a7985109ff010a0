# SPDX-License-Identifier: Apache-2.0
"""Attention with learned parameters. Formulas: ``triton_kernels/attention_tiles.py``."""

import torch
from torch import Tensor

from gnsfast.reference.rows import probe_rows, sum_wgrad
from gnsfast.signatures import (
    AttentionBackward,
    AttentionForward,
    Parameters,
    Pattern,
    new_token_major,
)
from gnsfast.tensors import accumulate_dtype

MAX_HEAD_DIM = 256
"""The largest head width that the kernels take."""


def token_major(t_BHTD: Tensor) -> Tensor:
    return new_token_major(t_BHTD).copy_(t_BHTD)


def document_of(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: the index of each token's document. Tokens outside all documents get the number of
    documents, which is one more than the last index.
    """
    tokens = torch.arange(T, device=cu_seqlens.device)
    of = torch.bucketize(tokens, cu_seqlens.to(tokens.dtype), right=True) - 1
    return torch.where(of < 0, len(cu_seqlens) - 1, of)


def _seen(pattern: Pattern, T: int, S: int, device: torch.device) -> Tensor:
    """[T, S]: the keys that causality, window and documents let a query see."""
    t, s = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)[None]
    seen = torch.ones(T, S, dtype=torch.bool, device=device)
    if pattern.is_causal:
        seen &= s <= t
    if pattern.window:
        seen &= (t - s < pattern.window) & (s - t < pattern.window)
    if pattern.cu_seqlens is not None:
        of = document_of(pattern.cu_seqlens, T)
        seen &= (of[:, None] == of[None]) & (of[:, None] < len(pattern.cu_seqlens) - 1)
    return seen


def _gained(t: Tensor, gain_D: Tensor | None) -> Tensor:
    acc = accumulate_dtype(t.dtype)
    return t.to(acc) if gain_D is None else (t.to(acc) * gain_D.to(acc)).to(t.dtype).to(acc)


def _factor(p: Parameters, scale: float, like: Tensor) -> Tensor:
    """[H, 1, 1] or a scalar: the factor of each head's logits."""
    if p.logit_scale_H is None:
        return torch.full((), scale, dtype=like.dtype, device=like.device)
    return scale * p.logit_scale_H.to(like.dtype)[:, None, None]


def _logits(q_BHTD: Tensor, k_BHSD: Tensor, p: Parameters, pattern: Pattern) -> Tensor:
    """[B, H, T, S]: the logits of queries and keys, which already have their gains. Keys are
    repeated for the query heads that share them.
    """
    s = q_BHTD @ k_BHSD.mT * _factor(p, pattern.scale, q_BHTD)
    if pattern.mask is not None:
        if pattern.mask.dtype == torch.bool:
            s = s.masked_fill(~pattern.mask, -torch.inf)
        else:
            s = s + pattern.mask.to(s.dtype)
    return s.masked_fill(~_seen(pattern, s.shape[2], s.shape[3], s.device), -torch.inf)


def attention_forward(a: AttentionForward) -> tuple[Tensor, Tensor, Tensor]:
    """See ``AttentionForward``."""
    p, pattern, v_BKSD = a.parameters, a.pattern, a.v_BKSD
    if pattern.cu_seqlens is not None and pattern.max_seqlen:
        longest = int(pattern.cu_seqlens.diff().max()) if len(pattern.cu_seqlens) > 1 else 0
        if longest > pattern.max_seqlen:
            raise ValueError(
                f"a document has {longest} tokens, but max_seqlen is {pattern.max_seqlen}"
            )
    group = a.q_BHTD.shape[1] // a.k_BKSD.shape[1]
    q, k = _gained(a.q_BHTD, p.q_gain_D), _gained(a.k_BKSD, p.k_gain_D)
    s = _logits(q, k.repeat_interleave(group, 1), p, pattern)
    highest = s.amax(3) if s.shape[3] else s.new_full(s.shape[:3], -torch.inf)
    if p.sinks_H is not None:
        highest = torch.maximum(highest, p.sinks_H.to(s.dtype)[:, None])
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (s - highest[..., None]).exp()
    total = weights.sum(3)
    if p.sinks_H is not None:
        total = total + (p.sinks_H.to(s.dtype)[:, None] - highest).exp()
    inverse = torch.where(total == 0.0, 0.0, total.reciprocal())
    weights = (weights * inverse[..., None]).to(v_BKSD.dtype)
    return token_major(weights @ v_BKSD.repeat_interleave(group, 1)), highest, inverse


def attention_backward(a: AttentionBackward) -> tuple[Tensor, ...]:
    """See ``AttentionBackward``."""
    p, pattern, samples = a.parameters, a.pattern, a.samples
    q_BHTD, k_BKSD = a.q_BHTD, a.k_BKSD
    H, K = q_BHTD.shape[1], k_BKSD.shape[1]
    acc = accumulate_dtype(q_BHTD.dtype)
    do, v = a.do_BHTD.to(acc), a.v_BKSD.to(acc).repeat_interleave(H // K, 1)
    q, k = _gained(q_BHTD, p.q_gain_D), _gained(k_BKSD, p.k_gain_D).repeat_interleave(H // K, 1)
    weights = (_logits(q, k, p, pattern) - a.highest_BHT[..., None]).exp() * a.inverse_BHT[
        ..., None
    ]
    delta_BHT = (do * a.o_BHTD).sum(3)
    ds = weights * (do @ v.mT - delta_BHT[..., None])
    of_head = _factor(p, 1.0, q)
    dq_plain = pattern.scale * (ds @ k)
    dq = dq_plain * of_head
    dk = (pattern.scale * ((ds * of_head).mT @ q)).unflatten(1, (K, -1)).sum(2)
    dv = (weights.mT @ do).unflatten(1, (K, -1)).sum(2)

    # Each token's gradient of a parameter, [B, T, ...]; then its sum over a sample's tokens.
    tokens: list[Tensor | None] = [None] * 4
    if p.sinks_H is not None:
        sink = p.sinks_H.to(acc)[:, None]
        tokens[0] = -((sink - a.highest_BHT).exp() * a.inverse_BHT * delta_BHT).mT
    tokens[1] = (dq_plain * q).sum(3).mT
    tokens[2] = (dq * q_BHTD).sum(1)
    tokens[3] = (dk * k_BKSD).sum(1)
    g = [
        sample_sums(t, pattern.cu_seqlens, samples) if t is not None and want else None
        for t, want in zip(tokens, a.wanted)
    ]
    if p.q_gain_D is not None:
        dq = dq * p.q_gain_D.to(acc)
    if p.k_gain_D is not None:
        dk = dk * p.k_gain_D.to(acc)
    dtype = q_BHTD.dtype
    grads = (token_major(t.to(dtype)) for t in (dq, dk, dv))
    return *grads, *parameter_grads(g, p, q_BHTD, samples)


def sample_sums(t_BTN: Tensor, cu_seqlens: Tensor | None, samples: int) -> Tensor:
    """[samples, N]: the sum over each sample's tokens, which are batch rows or a document."""
    if cu_seqlens is None:
        B, T, N = t_BTN.shape
        return t_BTN.reshape(samples, B // max(samples, 1) * T, N).sum(1)
    sums = t_BTN.new_zeros(samples + 1, t_BTN.shape[2])
    return sums.index_add_(0, document_of(cu_seqlens, t_BTN.shape[1]), t_BTN[0])[:-1]


def parameter_grads(
    g_BN: list[Tensor | None], p: Parameters, like: Tensor, samples: int
) -> tuple[Tensor, ...]:
    """The four parameters' gradients and the probe rows, from the samples' gradients ``g_BN``. If
    one of these is None, the parameter's gradient is empty.
    """
    grads, norms = [], []
    for g, parameter in zip(g_BN, p):
        if g is None or parameter is None:
            grads.append(like.new_empty(0))
        else:
            grad, found = sum_wgrad(g, parameter.dtype)
            grads.append(grad)
            norms.append(found)
    return *grads, probe_rows(norms, samples, like)
