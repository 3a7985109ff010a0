# SPDX-License-Identifier: Apache-2.0
"""Attention with learned parameters in plain PyTorch: the CPU back-end, and the yardstick for the
kernels. Formulas and legend: ``triton_kernels/attention_tiles.py``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gnsfast.reference.rows import sum_wgrad
from gnsfast.tensors import accumulate_dtype

MAX_HEAD_DIM = 256
"""Of the kernels; ``convert`` has modules with wider heads replayed."""


class Parameters(NamedTuple):
    """What attention may have learned, in the order of its probe's rows."""

    sinks_H: Tensor | None
    logit_scale_H: Tensor | None
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None


class Pattern(NamedTuple):
    """Which keys a query sees, and the constant factor of the logits."""

    mask: Tensor | None  # bool or float, broadcast to [B, H, T, S]
    cu_seqlens: Tensor | None  # where the documents of one packed row begin, and its end
    is_causal: bool
    scale: float
    window: int  # 0: none
    max_seqlen: int  # of a document; 0: not known

    def longest(self, T: int) -> int:
        """As many tokens as a row of the batch, or a document, may have."""
        return T if self.cu_seqlens is None else self.max_seqlen or T

    def programs(self, B: int) -> int:
        """Rows of the batch, or documents."""
        return B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


def new_token_major(like_BHTD: Tensor) -> Tensor:
    """An empty [B, H, T, D] that lies as [B, T, H, D], which projections read without a copy."""
    B, H, T, D = like_BHTD.shape
    return like_BHTD.new_empty((B, T, H, D)).transpose(1, 2)


def token_major(t_BHTD: Tensor) -> Tensor:
    return new_token_major(t_BHTD).copy_(t_BHTD)


def document_of(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T]: the number of each token's document; outside of them all, as many as there are."""
    tokens = torch.arange(T, device=cu_seqlens.device)
    of = torch.bucketize(tokens, cu_seqlens.to(tokens.dtype), right=True) - 1
    return torch.where(of < 0, len(cu_seqlens) - 1, of)


def _seen(pattern: Pattern, T: int, S: int, device: torch.device) -> Tensor:
    """[T, S]: what causality, window and documents let through."""
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
    """[H, 1, 1] or a scalar: what a head's products are multiplied with."""
    if p.logit_scale_H is None:
        return torch.full((), scale, dtype=like.dtype, device=like.device)
    return scale * p.logit_scale_H.to(like.dtype)[:, None, None]


def _logits(q_BHTD: Tensor, k_BHSD: Tensor, p: Parameters, pattern: Pattern) -> Tensor:
    """[B, H, T, S] of gained queries and keys, these repeated for the heads that share them."""
    s = q_BHTD @ k_BHSD.mT * _factor(p, pattern.scale, q_BHTD)
    if pattern.mask is not None:
        if pattern.mask.dtype == torch.bool:
            s = s.masked_fill(~pattern.mask, -torch.inf)
        else:
            s = s + pattern.mask.to(s.dtype)
    return s.masked_fill(~_seen(pattern, s.shape[2], s.shape[3], s.device), -torch.inf)


def attention_forward(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *arguments: object
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, H, T, D], and of each query's logits the highest one and the inverse of Σ exp(s -
    highest), both [B, H, T] in the accumulation dtype. A query that sees nothing has an output and
    an inverse of zero. (Their sum, the usual lse, loses the inverse where a mask of large negative
    numbers covers all keys.)
    """
    p, pattern = _split(arguments)
    if pattern.cu_seqlens is not None and pattern.max_seqlen:
        longest = int(pattern.cu_seqlens.diff().max()) if len(pattern.cu_seqlens) > 1 else 0
        if longest > pattern.max_seqlen:
            raise ValueError(f"a document has {longest} tokens, max_seqlen is {pattern.max_seqlen}")
    group = q_BHTD.shape[1] // k_BKSD.shape[1]
    q, k = _gained(q_BHTD, p.q_gain_D), _gained(k_BKSD, p.k_gain_D)
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


def attention_backward(
    do_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    o_BHTD: Tensor,
    highest_BHT: Tensor,
    inverse_BHT: Tensor,
    *arguments: object,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, the gradients of the four parameters (empty where not wanted), and ``sqnorm_PB``
    with a row for each wanted one.
    """
    *flat, samples, wanted = arguments
    p, pattern = _split(tuple(flat))
    assert isinstance(samples, int) and isinstance(wanted, list)
    H, K = q_BHTD.shape[1], k_BKSD.shape[1]
    acc = accumulate_dtype(q_BHTD.dtype)
    do, v = do_BHTD.to(acc), v_BKSD.to(acc).repeat_interleave(H // K, 1)
    q, k = _gained(q_BHTD, p.q_gain_D), _gained(k_BKSD, p.k_gain_D).repeat_interleave(H // K, 1)
    weights = (_logits(q, k, p, pattern) - highest_BHT[..., None]).exp() * inverse_BHT[..., None]
    delta_BHT = (do * o_BHTD).sum(3)
    ds = weights * (do @ v.mT - delta_BHT[..., None])
    of_head = _factor(p, 1.0, q)
    dq_plain = pattern.scale * (ds @ k)
    dq = dq_plain * of_head
    dk = (pattern.scale * ((ds * of_head).mT @ q)).unflatten(1, (K, -1)).sum(2)
    dv = (weights.mT @ do).unflatten(1, (K, -1)).sum(2)

    # What each token gives to a parameter: [B, T, ...]; then what each sample does.
    tokens: list[Tensor | None] = [None] * 4
    if p.sinks_H is not None:
        sink = p.sinks_H.to(acc)[:, None]
        tokens[0] = -((sink - highest_BHT).exp() * inverse_BHT * delta_BHT).mT
    tokens[1] = (dq_plain * q).sum(3).mT
    tokens[2] = (dq * q_BHTD).sum(1)
    tokens[3] = (dk * k_BKSD).sum(1)
    g = [
        sample_sums(t, pattern.cu_seqlens, samples) if t is not None and want else None
        for t, want in zip(tokens, wanted)
    ]
    if p.q_gain_D is not None:
        dq = dq * p.q_gain_D.to(acc)
    if p.k_gain_D is not None:
        dk = dk * p.k_gain_D.to(acc)
    dtype = q_BHTD.dtype
    grads = (token_major(t.to(dtype)) for t in (dq, dk, dv))
    return *grads, *parameter_grads(g, p, q_BHTD, samples)


def sample_sums(t_BTN: Tensor, cu_seqlens: Tensor | None, samples: int) -> Tensor:
    """[samples, N]: the sum over each sample's tokens, of its rows or of its document."""
    if cu_seqlens is None:
        B, T, N = t_BTN.shape
        return t_BTN.reshape(samples, B // max(samples, 1) * T, N).sum(1)
    sums = t_BTN.new_zeros(samples + 1, t_BTN.shape[2])
    return sums.index_add_(0, document_of(cu_seqlens, t_BTN.shape[1]), t_BTN[0])[:-1]


def parameter_grads(
    g_BN: list[Tensor | None], p: Parameters, like: Tensor, samples: int
) -> tuple[Tensor, ...]:
    """The four gradients, empty where a parameter's samples' gradients are None, and the rows."""
    grads, rows = [], []
    for g, parameter in zip(g_BN, p):
        if g is None or parameter is None:
            grads.append(like.new_empty(0))
        else:
            grad, row = sum_wgrad(g, parameter.dtype)
            grads.append(grad)
            rows.append(row)
    none = like.new_empty((0, samples + 2), dtype=torch.float32)
    return *grads, torch.stack(rows) if rows else none


def _split(arguments: tuple[object, ...]) -> tuple[Parameters, Pattern]:
    """The operators' flat arguments after their tensors."""
    return Parameters(*arguments[:4]), Pattern(*arguments[4:])  # type: ignore[arg-type]
