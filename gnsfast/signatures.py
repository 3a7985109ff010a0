# SPDX-License-Identifier: Apache-2.0
"""The arguments and results of every operator, stated once: its schema, its fake kernel and all of
its implementations read them here.

Legend: B samples, T tokens of a sample, N rows of all samples, I in_features, O out_features, D
model width, V vocabulary, F normalised features, P parameters of a module, H heads. A gradient that
nobody wants comes back empty.

The probe rows are float32 [P, B + 2]. Each of the P wanted parameters has one row: the squared
norms of the B samples' gradients, the squared norm of their sum, and 1.0, which counts the calls.
"""

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from gnsfast.tensors import accumulate_dtype

KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    list[int]: "int[]",
    bool: "bool",
    list[bool]: "bool[]",
    float: "float",
    torch.dtype: "ScalarType",
}


def schema(name: str) -> str:
    """An operator's schema for ``torch.library``."""
    hints = get_type_hints(OPERATORS[name])
    arguments = ", ".join(f"{KINDS[kind]} {field}" for field, kind in hints.items())
    return f"{name}({arguments}) -> ({', '.join('Tensor' for _ in RESULTS[name])})"


def empty_rows(like: Tensor, rows: int, samples: int) -> Tensor:
    """Uninitialised probe rows."""
    return like.new_empty((rows, samples + 2), dtype=torch.float32)


class LinearWgrad(NamedTuple):
    """Of y = x Wᵀ + b: dW, db, the probe rows, and with dW rows ``ids_BS`` of every sample's.

    Sample b's gradient is dy_bᵀ x_b. With ``starts`` [S + 1] the samples are segments of one list
    of rows: x is [N, I], dy is [N, O], and sample b owns rows ``starts[b]`` to ``starts[b + 1]``.
    With E ``experts`` segment e B + b holds the rows of sample b that expert e was given, and dW is
    [E, O, I]; 0 experts means one weight without that dimension. Rows after the last segment belong
    to no sample. With ``transposed`` the weight is stored as [I, O].
    """

    x_BTI: Tensor
    dy_BTO: Tensor
    weight: bool
    bias: bool
    transposed: bool
    dtype: torch.dtype
    starts: Tensor | None = None
    experts: int = 0
    ids_BS: Tensor | None = None

    @property
    def samples(self) -> int:
        if self.starts is None:
            return self.x_BTI.shape[0]
        return (self.starts.shape[0] - 1) // max(self.experts, 1)

    def results(self) -> tuple[Tensor, ...]:
        x, I, O = self.x_BTI, self.x_BTI.shape[-1], self.dy_BTO.shape[-1]
        lead = (self.experts,) if self.experts else ()
        dw = x.new_empty(
            ((*lead, *((I, O) if self.transposed else (O, I))) if self.weight else (0,)),
            dtype=self.dtype,
        )
        db = x.new_empty((*lead, O) if self.bias else (0,), dtype=self.dtype)
        rows = empty_rows(x, self.weight + self.bias, self.samples)
        ids = self.ids_BS if self.weight else None
        shape = (0,) if ids is None else (*ids.shape, I)
        return dw, db, rows, x.new_empty(shape, dtype=accumulate_dtype(x.dtype))


class EmbeddingWgrad(NamedTuple):
    """dW [V, D] and the probe row of an embedding. Within a sample the rows of one id are added
    before they are squared.

    ``padding_idx`` takes no gradient; -1 means none. ``starts`` is as in ``LinearWgrad``: dy is
    [N, D], ids are [N], and every row belongs to a sample.
    """

    dy_BTD: Tensor
    ids_BT: Tensor
    num_embeddings: int
    padding_idx: int
    dtype: torch.dtype
    starts: Tensor | None = None

    @property
    def samples(self) -> int:
        return self.dy_BTD.shape[0] if self.starts is None else self.starts.shape[0] - 1

    def results(self) -> tuple[Tensor, ...]:
        dy = self.dy_BTD
        dw = dy.new_empty((self.num_embeddings, dy.shape[-1]), dtype=self.dtype)
        return dw, empty_rows(dy, 1, self.samples)


class NormBackward(NamedTuple):
    """dx, dW, db and the probe rows of y = w (x - mean) rstd + b. Without ``mean_BT1`` they are
    those of y = (offset + w) x rsqrt(mean(x²) + eps). ``starts`` is as in ``EmbeddingWgrad``.
    """

    dy_BTF: Tensor
    x_BTF: Tensor
    mean_BT1: Tensor | None
    rstd_BT1: Tensor | None
    w_F: Tensor | None
    b_F: Tensor | None
    weight: bool
    bias: bool
    eps: float = 0.0
    offset: float = 0.0
    starts: Tensor | None = None

    @property
    def samples(self) -> int:
        return self.x_BTF.shape[0] if self.starts is None else self.starts.shape[0] - 1

    def results(self) -> tuple[Tensor, ...]:
        x, wanted = self.x_BTF, ((self.w_F, self.weight), (self.b_F, self.bias))
        none = x.new_empty(0, dtype=accumulate_dtype(x.dtype))
        grads = (torch.empty_like(p if want and p is not None else none) for p, want in wanted)
        rows = empty_rows(x, self.weight + self.bias, self.samples)
        return x.new_empty(x.shape), *grads, rows


class ConvWgrad(NamedTuple):
    """dW [O, C / groups, *kernel], db and the probe rows of a 1-d or 2-d convolution.

    x is [n, C, *size] and dy is [n, O, *out_size]; each of the B ``samples`` has n / B rows.
    """

    x: Tensor
    dy: Tensor
    samples: int
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    weight: bool
    bias: bool
    dtype: torch.dtype

    def results(self) -> tuple[Tensor, ...]:
        x, O = self.x, self.dy.shape[1]
        shape = (O, x.shape[1] // self.groups, *self.kernel) if self.weight else (0,)
        dw, db = x.new_empty(shape, dtype=self.dtype), x.new_empty(O if self.bias else 0)
        return dw, db.to(self.dtype), empty_rows(x, self.weight + self.bias, self.samples)


class Parameters(NamedTuple):
    """The parameters that attention may have, in the order of their probe rows."""

    sinks_H: Tensor | None
    logit_scale_H: Tensor | None
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None


class Pattern(NamedTuple):
    """Which keys a query sees, and the constant factor of the logits."""

    mask: Tensor | None  # bool or float, broadcast to [B, H, T, S]
    cu_seqlens: Tensor | None  # the first token of each packed document, then the last one's end
    is_causal: bool
    scale: float
    window: int  # 0: no window
    max_seqlen: int  # the longest document; 0: not known

    def longest(self, T: int) -> int:
        """The most tokens that a row of the batch, or a document, may have."""
        return T if self.cu_seqlens is None else self.max_seqlen or T

    def programs(self, B: int) -> int:
        """The number of batch rows, or of documents."""
        return B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


def new_token_major(like_BHTD: Tensor) -> Tensor:
    """An uninitialised [B, H, T, D], stored as [B, T, H, D]: projections read it without a copy."""
    B, H, T, D = like_BHTD.shape
    return like_BHTD.new_empty((B, T, H, D)).transpose(1, 2)


class AttentionForward(NamedTuple):
    """o [B, H, T, D], and for each query its highest logit and 1 / Σ exp(s - highest), both
    [B, H, T] in the accumulation dtype.

    A query that sees no key has an output and an inverse of zero. (The usual log-sum-exp holds both
    in one number; it loses the sum where a mask of large negative numbers covers all keys.) The
    fields from ``sinks_H`` on are those of ``Parameters`` and ``Pattern``.
    """

    q_BHTD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    sinks_H: Tensor | None
    logit_scale_H: Tensor | None
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    is_causal: bool
    scale: float
    window: int
    max_seqlen: int

    @property
    def parameters(self) -> Parameters:
        return Parameters(*self[3:7])

    @property
    def pattern(self) -> Pattern:
        return Pattern(*self[7:])

    def results(self) -> tuple[Tensor, ...]:
        q = self.q_BHTD
        acc = accumulate_dtype(q.dtype)
        highest, inverse = (q.new_empty(q.shape[:3], dtype=acc) for _ in range(2))
        return new_token_major(q), highest, inverse


class AttentionBackward(NamedTuple):
    """dq, dk, dv, the gradients of the four parameters, and a probe row for each ``wanted`` one.
    The fields between ``do_BHTD`` and ``samples`` are those of ``AttentionForward`` and its
    results.
    """

    do_BHTD: Tensor
    q_BHTD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    o_BHTD: Tensor
    highest_BHT: Tensor
    inverse_BHT: Tensor
    sinks_H: Tensor | None
    logit_scale_H: Tensor | None
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    is_causal: bool
    scale: float
    window: int
    max_seqlen: int
    samples: int
    wanted: list[bool]

    @property
    def parameters(self) -> Parameters:
        return Parameters(*self[7:11])

    @property
    def pattern(self) -> Pattern:
        return Pattern(*self[11:17])

    def results(self) -> tuple[Tensor, ...]:
        q = self.q_BHTD
        grads = (
            torch.empty_like(p) if want and p is not None else q.new_empty(0)
            for p, want in zip(self.parameters, self.wanted)
        )
        inputs = (new_token_major(t) for t in (q, self.k_BKSD, self.v_BKSD))
        return *inputs, *grads, empty_rows(q, sum(self.wanted), self.samples)


OPERATORS = {
    "linear_wgrad": LinearWgrad,
    "embedding_wgrad": EmbeddingWgrad,
    "norm_backward": NormBackward,
    "conv_wgrad": ConvWgrad,
    "attention_forward": AttentionForward,
    "attention_backward": AttentionBackward,
}

RESULTS = {
    "linear_wgrad": ("sum", "sum", "rows", "samples"),
    "embedding_wgrad": ("sum", "rows"),
    "norm_backward": ("samples", "sum", "sum", "rows"),
    "conv_wgrad": ("sum", "sum", "rows"),
    "attention_forward": ("samples",) * 3,
    "attention_backward": (*("samples",) * 3, *("sum",) * 4, "rows"),
}
"""What each result of an operator is: "samples", a part for each sample; "sum", a sum over the
samples; "rows", the probe rows."""

BY_SAMPLE: dict[type, tuple[int, tuple[str, ...]]] = {
    OPERATORS[name]: (inputs, RESULTS[name])
    for name, inputs in (("linear_wgrad", 2), ("embedding_wgrad", 2), ("norm_backward", 4))
}
"""Operators that can run on a subset of the samples -> how many of their first fields have a part
for each sample, and the kinds of their results."""
