# SPDX-License-Identifier: Apache-2.0
"""The one dispatch table: schema and fake of every operator, and its implementation for each device
(``backends.py``).

All run in the backward pass and are not differentiable themselves. Shapes and meanings are those of
``reference.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnsfast.ops import backends
from gnsfast.reference import new_token_major
from gnsfast.tensors import accumulate_dtype

_library = torch.library.Library("gnsfast", "DEF")


def _define(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operator by its schema; the decorated function is its fake. Returns the callable
    operator.
    """
    name = schema.partition("(")[0]

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        # Library.define + impl costs 5 µs a call, torch.library.custom_op 12 µs.
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, backends.implementation(name, "cpu"), "CPU")
        _library.impl(name, backends.implementation(name, "cuda"), "CUDA")
        torch.library.register_fake(f"gnsfast::{name}", fake, lib=_library)
        overload: Callable[..., Any] = getattr(torch.ops.gnsfast, name).default
        return overload

    return register


def _fake_rows(like: Tensor, rows: int, B: int) -> Tensor:
    return like.new_empty((rows, B + 2), dtype=torch.float32)


@_define(
    "linear_wgrad(Tensor x_BTI, Tensor dy_BTO, bool weight, bool bias, bool transposed, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
def linear_wgrad(
    x_BTI: Tensor, dy_BTO: Tensor, weight: bool, bias: bool, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    shape = ((I, O) if transposed else (O, I)) if weight else (0,)
    dw = x_BTI.new_empty(shape, dtype=dtype)
    db = x_BTI.new_empty(O if bias else 0, dtype=dtype)
    return dw, db, _fake_rows(x_BTI, weight + bias, B)


@_define(
    "in_projection_wgrad(Tensor[] x_BTI, Tensor[] dy_BTO, bool weight, bool bias, ScalarType "
    "dtype) -> (Tensor, Tensor, Tensor)"
)
def in_projection_wgrad(
    x_BTI: list[Tensor], dy_BTO: list[Tensor], weight: bool, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, O = x_BTI[0], sum(dy.shape[2] for dy in dy_BTO)
    dw = x.new_empty((O, x.shape[2]) if weight else (0,), dtype=dtype)
    rows = _fake_rows(x, (weight + bias) * len(dy_BTO), len(x))
    return dw, x.new_empty(O if bias else 0, dtype=dtype), rows


@_define(
    "linear_wgrad_tied(Tensor x_BTI, Tensor dy_BTO, Tensor ids_BS, bool bias, ScalarType dtype) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
def linear_wgrad_tied(
    x_BTI: Tensor, dy_BTO: Tensor, ids_BS: Tensor, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, _, I), O = x_BTI.shape, dy_BTO.shape[2]
    dw, db = x_BTI.new_empty((O, I), dtype=dtype), x_BTI.new_empty(O if bias else 0, dtype=dtype)
    rows = x_BTI.new_empty((*ids_BS.shape, I), dtype=accumulate_dtype(x_BTI.dtype))
    return dw, db, _fake_rows(x_BTI, 1 + bias, B), rows


@_define(
    "linear_wgrad_segments(Tensor x_NI, Tensor dy_NO, Tensor starts, SymInt experts, bool weight, "
    "bool bias, bool transposed, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
def linear_wgrad_segments(
    x_NI: Tensor,
    dy_NO: Tensor,
    starts: Tensor,
    experts: int,
    weight: bool,
    bias: bool,
    transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    I, O, B = x_NI.shape[1], dy_NO.shape[1], (starts.shape[0] - 1) // experts
    shape = (experts, *((I, O) if transposed else (O, I))) if weight else (0,)
    dw = x_NI.new_empty(shape, dtype=dtype)
    db = x_NI.new_empty((experts, O) if bias else (0,), dtype=dtype)
    return dw, db, _fake_rows(x_NI, weight + bias, B)


@_define(
    "embedding_wgrad(Tensor dy_BTD, Tensor ids_BT, SymInt num_embeddings, int padding_idx, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)
def embedding_wgrad(
    dy_BTD: Tensor, ids_BT: Tensor, num_embeddings: int, padding_idx: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    B, _, D = dy_BTD.shape
    return dy_BTD.new_empty((num_embeddings, D), dtype=dtype), _fake_rows(dy_BTD, 1, B)


@_define(
    "embedding_wgrad_segments(Tensor dy_ND, Tensor ids_N, Tensor starts, SymInt num_embeddings, "
    "int padding_idx, ScalarType dtype) -> (Tensor, Tensor)"
)
def embedding_wgrad_segments(
    dy_ND: Tensor,
    ids_N: Tensor,
    starts: Tensor,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    dw = dy_ND.new_empty((num_embeddings, dy_ND.shape[1]), dtype=dtype)
    return dw, _fake_rows(dy_ND, 1, starts.shape[0] - 1)


@_define("segment_sums(Tensor t_NF, Tensor starts) -> Tensor")
def segment_sums(t_NF: Tensor, starts: Tensor) -> Tensor:
    acc = accumulate_dtype(t_NF.dtype)
    return t_NF.new_empty((starts.shape[0] - 1, t_NF.shape[1]), dtype=acc)


@_define(
    "layer_norm_backward(Tensor dy_BTN, Tensor x_BTN, Tensor mean_BT1, Tensor rstd_BT1, Tensor? "
    "w_N, Tensor? b_N, bool weight, bool bias) -> (Tensor, Tensor, Tensor, Tensor)"
)
def layer_norm_backward(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    w_N: Tensor | None,
    b_N: Tensor | None,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(x_BTN.dtype)
    dw = torch.empty_like(w_N) if weight and w_N is not None else x_BTN.new_empty(0, dtype=acc)
    db = torch.empty_like(b_N) if bias and b_N is not None else x_BTN.new_empty(0, dtype=acc)
    return x_BTN.new_empty(x_BTN.shape), dw, db, _fake_rows(x_BTN, weight + bias, len(x_BTN))


@_define(
    "rms_norm_backward(Tensor dy_BTN, Tensor x_BTN, Tensor w_N, float eps, float offset) -> "
    "(Tensor, Tensor, Tensor)"
)
def rms_norm_backward(
    dy_BTN: Tensor, x_BTN: Tensor, w_N: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x_BTN.new_empty(x_BTN.shape), torch.empty_like(w_N), _fake_rows(x_BTN, 1, len(x_BTN))


_ATTENTION = (
    "Tensor? sinks_H, Tensor? logit_scale_H, Tensor? q_gain_D, Tensor? k_gain_D, Tensor? mask, "
    "Tensor? cu_seqlens, bool is_causal, float scale, SymInt window, SymInt max_seqlen"
)


@_define(
    f"attention_forward(Tensor q_BHTD, Tensor k_BKSD, Tensor v_BKSD, {_ATTENTION}) -> (Tensor, "
    "Tensor, Tensor)"
)
def attention_forward(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(q_BHTD.dtype)
    highest, inverse = (q_BHTD.new_empty(q_BHTD.shape[:3], dtype=acc) for _ in range(2))
    return new_token_major(q_BHTD), highest, inverse


@_define(
    "attention_backward(Tensor do_BHTD, Tensor q_BHTD, Tensor k_BKSD, Tensor v_BKSD, Tensor "
    f"o_BHTD, Tensor highest_BHT, Tensor inverse_BHT, {_ATTENTION}, SymInt samples, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def attention_backward(
    do_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    o_BHTD: Tensor,
    highest_BHT: Tensor,
    inverse_BHT: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    samples, wanted = arguments[-2:]
    grads = [
        torch.empty_like(p) if want and p is not None else q_BHTD.new_empty(0)
        for p, want in zip(arguments[:4], wanted)
    ]
    rows = q_BHTD.new_empty((sum(wanted), samples + 2), dtype=torch.float32)
    return *(new_token_major(t) for t in (q_BHTD, k_BKSD, v_BKSD)), *grads, rows


@_define(
    "conv_wgrad(Tensor x, Tensor dy, SymInt samples, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, int groups, bool weight, bool bias, ScalarType dtype) -> (Tensor, Tensor, "
    "Tensor)"
)
def conv_wgrad(
    x: Tensor,
    dy: Tensor,
    samples: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    weight: bool,
    bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    O = dy.shape[1]
    dw = x.new_empty((O, x.shape[1] // groups, *kernel) if weight else (0,), dtype=dtype)
    return dw, x.new_empty(O if bias else 0, dtype=dtype), _fake_rows(x, weight + bias, samples)


@_define(
    "linear_wgrad_metric(Tensor x_BTI, Tensor dy_BTO, Tensor? v, Tensor? v_O, Tensor constants_P2, "
    "Tensor? ids_BS, bool transposed, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
def linear_wgrad_metric(
    x_BTI: Tensor,
    dy_BTO: Tensor,
    v: Tensor | None,
    v_O: Tensor | None,
    constants_P2: Tensor,
    ids_BS: Tensor | None,
    transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dw, db = (x_BTI.new_empty(0 if t is None else t.shape, dtype=dtype) for t in (v, v_O))
    rows = x_BTI.new_empty(0, dtype=dtype)
    if ids_BS is not None:
        acc = accumulate_dtype(x_BTI.dtype)
        rows = x_BTI.new_empty((*ids_BS.shape, x_BTI.shape[2]), dtype=acc)
    return dw, db, _fake_rows(x_BTI, 2 * len(constants_P2), len(x_BTI)), rows


@_define(
    "embedding_wgrad_metric(Tensor dy_BTD, Tensor ids_BT, Tensor v_VD, Tensor constants_12, int "
    "padding_idx, ScalarType dtype) -> (Tensor, Tensor)"
)
def embedding_wgrad_metric(
    dy_BTD: Tensor,
    ids_BT: Tensor,
    v_VD: Tensor,
    constants_12: Tensor,
    padding_idx: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return dy_BTD.new_empty(v_VD.shape, dtype=dtype), _fake_rows(dy_BTD, 2, len(dy_BTD))


@_define(
    "norm_backward_metric(Tensor dy_BTN, Tensor x_BTN, Tensor? mean_BT1, Tensor? rstd_BT1, Tensor? "
    "w_N, Tensor? b_N, Tensor? v_w, Tensor? v_b, Tensor constants_P2, float eps, float offset) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
def norm_backward_metric(
    dy_BTN: Tensor,
    x_BTN: Tensor,
    mean_BT1: Tensor | None,
    rstd_BT1: Tensor | None,
    w_N: Tensor | None,
    b_N: Tensor | None,
    v_w: Tensor | None,
    v_b: Tensor | None,
    constants_P2: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = x_BTN.new_empty(0, dtype=torch.float32)
    dw, db = (
        torch.empty_like(none if p is None or v is None else p) for p, v in ((w_N, v_w), (b_N, v_b))
    )
    rows = _fake_rows(x_BTN, 2 * len(constants_P2), len(x_BTN))
    return x_BTN.new_empty(x_BTN.shape), dw, db, rows
