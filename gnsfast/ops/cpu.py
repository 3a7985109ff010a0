# SPDX-License-Identifier: Apache-2.0
"""Calls the CPU kernels ``gnsfast._cpu``, which square a sample's gradient while it is in registers
or in the cache, and decides which tensors they take. The reference computes all others.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast import reference
from gnsfast.ops import cpu_product
from gnsfast.signatures import ConvWgrad, EmbeddingWgrad, LinearWgrad, NormBackward

DTYPES = (torch.float32, torch.bfloat16)
LINEAR_DTYPES = (*DTYPES, torch.float16)
"""A linear layer's float16 is copied to float32 first, which takes a tenth of its product."""


@functools.cache
def missing() -> str:
    """Why the kernel cannot run here. Empty if it can."""
    if importlib.util.find_spec("gnsfast._cpu") is None:
        return "gnsfast was installed without its CPU kernel. GNSFAST_CPU=1 pip install . shows why"
    try:
        module = _module()
    except ImportError as error:
        return f"gnsfast._cpu cannot be loaded: {error}"
    if not instructions():
        return (
            "the processor has neither AVX-512 nor AVX2 with FMA, or ATEN_CPU_CAPABILITY turns "
            "them off"
        )
    return "" if module.has_threads() else "torch uses neither GNU OpenMP nor a compatible library"


@functools.cache
def instructions() -> str:
    """The instruction set that the kernel uses, ``avx512`` or ``avx2``. It is the best one of the
    processor that torch uses too, and ``ATEN_CPU_CAPABILITY`` limits it. Empty if there is none.
    """
    limit = torch.backends.cpu.get_cpu_capability().lower()
    allowed = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",)}.get(limit, ())
    return next((name for name in _module().kernels() if name in allowed), "")


@functools.cache
def for_bfloat16() -> str:
    """What linear layers use in bfloat16 alone, ``amx`` or ``avx512_bf16``: processor, system and
    build have to allow it, and so does ``ATEN_CPU_CAPABILITY``. Empty if there is none.
    """
    return next(iter(_module().bfloat16_kernels()), "") if instructions() == "avx512" else ""


def of_linear(dtype: torch.dtype) -> str:
    """The instruction set of linear layers, whose dtype is one of ``DTYPES``."""
    return (dtype == torch.bfloat16 and for_bfloat16()) or instructions()


def linear_wgrad(a: LinearWgrad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``LinearWgrad``."""
    x, dy = a.x_BTI, a.dy_BTO
    segments = 0 if a.starts is None else len(a.starts) - 1
    if not (a.weight and takes(x, dy, a.samples, segments)):
        return reference.linear_wgrad(a)
    if x.dtype == torch.float16:
        x, dy = x.float(), dy.float()
    left, right = (x, dy) if a.transposed else (dy, x)
    lead = (a.experts,) if a.experts else ()
    dw = _empty_dw(x, a.dtype, *lead, left.shape[-1], right.shape[-1])
    db = _empty(x, *lead, dy.shape[-1]) if a.bias else _empty(x, 0)
    rows = _empty(x, 1 + a.bias, a.samples + 2)
    wgrad = _Wgrad(left, right, dw, db if a.bias else None, rows, a.transposed)
    if a.starts is None:
        _fill(wgrad)
    else:
        _segments_wgrad(wgrad, a)
    return _as(dw, a.dtype), _as(db, a.dtype), rows, reference.linked_rows(a)


def linear_norms(a: LinearWgrad) -> Tensor:
    """The probe rows of ``linear_wgrad``. Of plain samples one block of dW after the other is made
    in memory that stays in the cache.
    """
    if a.starts is not None:
        return linear_wgrad(a)[2]
    x, dy = a.x_BTI, a.dy_BTO
    if not (a.weight and takes(x, dy, a.samples)):
        return reference.linear_norms(a)
    if x.dtype == torch.float16:
        x, dy = x.float(), dy.float()
    left, right = (x, dy) if a.transposed else (dy, x)
    (B, T, M), N = left.shape, right.shape[2]
    sqnorm_B = None
    if takes_gram(of_linear(x.dtype), B, T, M, N):
        left, right = left.contiguous(), right.contiguous()
        sqnorm_B = _gram_sqnorms(of_linear(x.dtype), left, right)
    parts = left.split(reference.even_block(M, max(1, BLOCK // N)), 2)
    dw = _empty(x, parts[0].shape[2], N)
    db = _empty(x, max(dw.shape)) if a.bias else None
    rows_KPB = _empty(x, len(parts), 1 + a.bias, B + 2)
    for k, (part, rows) in enumerate(zip(parts, rows_KPB)):
        m = part.shape[2]
        own = _Wgrad(part, right, dw[:m], None, rows, a.transposed, None, sqnorm_B)
        if db is not None and (k == 0 or not a.transposed):
            own = own._replace(db=db[: N if a.transposed else m])
        _fill(own)
    if a.bias and a.transposed:
        rows_KPB[1:, 1] = 0.0
    rows = rows_KPB.sum(0, dtype=torch.float64).to(torch.float32)
    if sqnorm_B is not None:  # each block has written those of the whole
        rows[0, :B] = sqnorm_B
    rows[:, -1] = 1.0
    return rows


def conv_wgrad(a: ConvWgrad) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ConvWgrad``. The kernel of linear layers multiplies patches."""
    return reference.conv_wgrad(a, linear_wgrad, channels_last)


def conv_norms(a: ConvWgrad) -> Tensor:
    """The probe rows of ``conv_wgrad``, which makes dW."""
    return conv_wgrad(a)[2]


def channels_last(to: Tensor, t: Tensor) -> None:
    """Copy ``t`` [n, C, *size] to [n, *size, C]. Torch takes five to ten times as long."""
    if t.ndim == 5:
        for to_d, t_d in zip(to.unbind(1), t.unbind(2)):
            channels_last(to_d, t_d)
        return
    if t.ndim == 3:
        to, t = to[:, None], t[:, :, None]
    strides, to_strides = t.stride(), to.stride()
    if strides[3] != 1 or to_strides[3] != 1 or t.dtype not in LINEAR_DTYPES or _lazy(t):
        to.copy_(t.movedim(1, -1))
        return
    _module().transpose(
        t.data_ptr(),
        strides[:3],
        to.data_ptr(),
        to_strides[:3],
        t.itemsize,
        t.shape,
        torch.get_num_threads(),
    )


BLOCK = 1 << 18
"""The numbers of dW that are made at a time where nobody wants them: 1 MiB."""


def norm_backward(a: NormBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``NormBackward``. Documents are left to the reference."""
    x, dy, mean, rstd, w, b = a.x_BTF, a.dy_BTF, a.mean_BT1, a.rstd_BT1, a.w_F, a.b_F
    shape = x.shape
    fits = dy.shape == shape and (w is None or w.numel() == shape[-1])
    if a.starts is not None or not (fits and _same(x, dy)):
        return reference.norm_backward(a)
    for t in (mean, rstd, w):
        if t is not None and _lazy(t):
            return reference.norm_backward(a)
    if mean is not None and rstd is not None:
        mean, rstd = _laid_out(mean), _laid_out(rstd)
    else:  # an RMS norm, whose statistics the kernel computes
        mean = rstd = None
    gain = w if w is None else _laid_out(w)
    dx = x.new_empty(*shape)
    dw = _empty(x, shape[2] if a.weight and w is not None else 0)
    db = _empty(x, shape[2] if a.bias and b is not None else 0)
    rows = _empty(x, a.weight + a.bias, shape[0] + 2)
    _module().norm_backward(
        instructions(),
        dy.data_ptr(),
        dy.stride(),
        x.data_ptr(),
        x.stride(),
        x.dtype == torch.bfloat16,
        shape,
        _address(mean),
        _address(rstd),
        _address(gain),
        a.eps,
        a.offset,
        dx.data_ptr(),
        _address(dw if a.weight else None),
        _address(db if a.bias else None),
        rows.data_ptr(),
        rows.stride(0),
        torch.get_num_threads(),
    )
    if a.weight and w is not None:
        dw = _as(dw, w.dtype)
    if a.bias and b is not None:
        db = _as(db, b.dtype)
    return dx, dw, db, rows


def embedding_wgrad(a: EmbeddingWgrad) -> tuple[Tensor, Tensor]:
    """See ``EmbeddingWgrad``. Documents are left to the reference."""
    dy, ids = a.dy_BTD, a.ids_BT
    shape = dy.shape
    fits = ids.shape == shape[:2] and _same(dy)
    if a.starts is not None or not fits:
        return reference.embedding_wgrad(a)
    ids = ids.to(torch.int64)
    dw = dy.new_zeros((a.num_embeddings, shape[2]), dtype=torch.float32)
    rows = _empty(dy, 1, shape[0] + 2)
    _module().embedding_wgrad(
        instructions(),
        dy.data_ptr(),
        dy.stride(),
        dy.dtype == torch.bfloat16,
        ids.data_ptr(),
        ids.stride(),
        (*shape, a.num_embeddings),
        a.padding_idx,
        dw.data_ptr(),
        rows.data_ptr(),
        torch.get_num_threads(),
    )
    return _as(dw, a.dtype), rows


def embedding_norms(a: EmbeddingWgrad) -> Tensor:
    """The probe row of ``embedding_wgrad``, which makes dW."""
    return embedding_wgrad(a)[1]


def _same(*tensors: Tensor) -> bool:
    """Whether a kernel takes these tensors: of one dtype that it knows, and none is empty."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    for t in tensors:  # a generator takes a microsecond
        if t.dtype != dtype or not t.numel() or _lazy(t):
            return False
    return True


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def takes(x: Tensor, dy: Tensor, samples: int, segments: int = 0) -> bool:
    """Whether the kernel computes this weight gradient.

    It takes float32, bfloat16 and float16 tensors of any strides, if none is empty. The reference
    is faster for one-token samples of a thin weight, and for short segments.
    """
    if x.dtype != dy.dtype or x.dtype not in LINEAR_DTYPES or _lazy(x) or _lazy(dy):
        return False
    if x.numel() * dy.numel() == 0 or samples == 0:
        return False
    if segments:
        return x.shape[0] >= SHORT[of_linear(x.dtype)] * segments
    return x.shape[1] > 1 or min(x.shape[2], dy.shape[2]) > THIN


SHORT = {"amx": 4, "avx512_bf16": 4, "avx512": 4, "avx2": 8}
"""The smallest average number of rows in a segment for which the kernel is faster."""

THIN = 4
"""A few products for each number of the wide side cost less than copying that side."""


def _lazy(t: Tensor) -> bool:
    """Whether the numbers of ``t``, which is not empty, are not those in its memory: it has a lazy
    minus sign, or no memory, as lazy zeros and tensors that consist of others.
    """
    return t.is_neg() or t.data_ptr() == 0


def takes_gram(kernel: str, B: int, T: int, M: int, N: int) -> bool:
    """Whether Gram matrices give the norms of short samples, and the kernel multiplies all tokens
    at once. Counted in multiply-adds, with crossovers measured on a CPU: the matrices cost
    ``CALLS`` and T² (M + N) for a sample. Without them each sample's tile is squared and added,
    which costs as much as a number of ``TILE`` for each element, in whole vectors.
    """
    small, large, columns = TILE[kernel]
    elements = M * -(-N // columns) * columns
    cost = large if elements > CACHED else small
    return T > 1 and B > 1 and CALLS + B * T * T * (M + N) < cost * B * elements


TILE = {
    "amx": (50, 50, 32),
    "avx512_bf16": (2.2, 7, 32),
    "avx512": (2, 5, 32),
    "avx2": (1.5, 3, 16),
}
"""What an element of a small dW and of a large one costs in each sample, and a tile's columns."""
CALLS, CACHED = 1 << 19, 1 << 20


class _Wgrad(NamedTuple):
    """The operands of a weight gradient dW = Σ_b left_bᵀ right_b, and what is filled: dW, db, which
    is the sum of one side's rows, and the probe rows of both. With ``starts`` B is 1, and the
    samples are segments of T rows. ``sqnorm_B`` are norms that are known already.
    """

    left_BTM: Tensor
    right_BTN: Tensor
    dw_MN: Tensor
    db: Tensor | None
    rows: Tensor
    bias_of_right: bool = False
    starts: Tensor | None = None
    sqnorm_B: Tensor | None = None


def _gram_sqnorms(kernel: str, left_BTM: Tensor, right_BTN: Tensor) -> Tensor:
    """[B]: short samples' squared norms in float64, by the products of each sample's tokens."""
    (B, T, M), N = left_BTM.shape, right_BTN.shape[2]
    sqnorm_B = left_BTM.new_empty(B, dtype=torch.float64)
    terms_B = torch.empty_like(sqnorm_B)
    _module().gram_sqnorms(
        kernel,
        left_BTM.data_ptr(),
        left_BTM.stride(),
        right_BTN.data_ptr(),
        right_BTN.stride(),
        left_BTM.dtype == torch.bfloat16,
        (B, T, M, N),
        sqnorm_B.data_ptr(),
        terms_B.data_ptr(),
        torch.get_num_threads(),
    )
    cancelled_B = sqnorm_B < reference.CANCELLED * terms_B
    if cancelled_B.any():
        left, right = left_BTM[cancelled_B], right_BTN[cancelled_B]
        dw_MN, rows = _empty(left, M, N), _empty(left, 1, len(left) + 2)
        _tiles(kernel, _Wgrad(left, right, dw_MN, None, rows))
        sqnorm_B[cancelled_B] = rows[0, :-2].double()
    return sqnorm_B


def _segments_wgrad(wgrad: _Wgrad, a: LinearWgrad) -> None:
    """Fill them where samples are segments of a list. The probe rows of experts add up."""
    assert a.starts is not None
    E, B = max(a.experts, 1), a.samples
    starts = a.starts.to(torch.int64).contiguous()
    rows_EPB = wgrad.rows.new_empty((E, *wgrad.rows.shape))
    segments = wgrad._replace(left_BTM=wgrad.left_BTM[None], right_BTN=wgrad.right_BTN[None])
    for e in range(E):
        segments = segments._replace(rows=rows_EPB[e], starts=starts[e * B : (e + 1) * B + 1])
        if a.experts:
            db = None if wgrad.db is None else wgrad.db[e]
            segments = segments._replace(dw_MN=wgrad.dw_MN[e], db=db)
        _fill(segments)
    wgrad.rows.copy_(rows_EPB.sum(0, dtype=torch.float64))
    wgrad.rows[:, -1] = 1.0


def _fill(wgrad: _Wgrad) -> None:
    """Fill them by the way that is fastest for the shape."""
    left_BTM, right_BTN = wgrad.left_BTM, wgrad.right_BTN
    (B, T, M), N = left_BTM.shape, right_BTN.shape[2]
    kernel = of_linear(left_BTM.dtype)
    plain = wgrad.starts is None
    if plain and wgrad.sqnorm_B is None and takes_gram(kernel, B, T, M, N):
        left_BTM, right_BTN = left_BTM.contiguous(), right_BTN.contiguous()
        sqnorm_B = _gram_sqnorms(kernel, left_BTM, right_BTN)
        wgrad = _Wgrad(left_BTM, right_BTN, *wgrad[2:-1], sqnorm_B)  # _replace takes a microsecond
    known = plain and (T == 1 or wgrad.sqnorm_B is not None)
    large = left_BTM.dtype == torch.float32 and B * T * M * N >= cpu_product.LARGE
    if known and large and product().name == "torch":
        _by_torch(wgrad)
    else:
        _tiles(kernel, wgrad)


def _tiles(kernel: str, wgrad: _Wgrad) -> None:
    """Fill them by an instruction set's kernel."""
    left_BTM, right_BTN, dw_MN, db, rows = wgrad[:5]
    starts = wgrad.starts
    (B, T, M), N = left_BTM.shape, right_BTN.shape[2]
    _module().linear_wgrad(
        kernel,
        left_BTM.data_ptr(),
        left_BTM.stride(),
        right_BTN.data_ptr(),
        right_BTN.stride(),
        (left_BTM.dtype == torch.bfloat16, dw_MN.dtype == torch.bfloat16),
        (B if starts is None else len(starts) - 1, T, M, N),
        _address(starts),
        _address(wgrad.sqnorm_B),
        dw_MN.data_ptr(),
        _address(db),
        wgrad.bias_of_right,
        rows.data_ptr(),
        rows.stride(0),
        torch.get_num_threads(),
    )


def product() -> cpu_product.Choice:
    """Who multiplies all tokens of short samples in float32."""
    kernel, known = instructions(), torch.zeros(1, dtype=torch.float64)

    def way(run: Callable[[_Wgrad], None]) -> cpu_product.Way:
        def product_of(left_1TM: Tensor, right_1TN: Tensor) -> None:
            dw_MN = _empty(left_1TM, left_1TM.shape[2], right_1TN.shape[2])
            rows = _empty(left_1TM, 1, 3)
            run(_Wgrad(left_1TM, right_1TN, dw_MN, None, rows, sqnorm_B=known))

        return product_of

    ways = {"gnsfast": way(functools.partial(_tiles, kernel)), "torch": way(_by_torch)}
    return cpu_product.chosen(kernel, ways)


def _by_torch(wgrad: _Wgrad) -> None:
    """Fill them by torch's product, for samples of one token or with norms that are known."""
    left_BTM, right_BTN, dw_MN, db, rows = wgrad[:5]
    left_RM, right_RN = left_BTM.flatten(0, 1), right_BTN.flatten(0, 1)
    torch.mm(left_RM.T, right_RN, out=dw_MN)
    sqnorm_B = wgrad.sqnorm_B
    if sqnorm_B is None:
        sqnorm_B = (reference.norm_rows(left_RM) * reference.norm_rows(right_RN)).double().square_()
    rows[0, :-2], rows[0, -2], rows[:, -1] = sqnorm_B, reference.sqnorm(dw_MN), 1.0
    if db is not None:
        sum_BN = reference.sum_tokens(right_BTN if wgrad.bias_of_right else left_BTM)
        torch.sum(sum_BN, 0, out=db)
        rows[1, :-2], rows[1, -2] = (
            reference.norm_rows(sum_BN).double().square_(),
            reference.sqnorm(db),
        )


def _laid_out(t: Tensor) -> Tensor:
    """Float32 numbers side by side. Three calls that change nothing take a microsecond each."""
    as_is = t.dtype == torch.float32 and t.is_contiguous()
    return t if as_is else t.float().contiguous()


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)  # torch reads a tuple slowly


def _empty_dw(x: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """A weight's gradient for a kernel to fill: in float32, unless the kernel writes ``dtype``."""
    written = dtype == torch.bfloat16 and of_linear(x.dtype) == "amx"
    return x.new_empty(*shape, dtype=dtype if written else torch.float32)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


@functools.cache
def _module() -> Any:
    return importlib.import_module("gnsfast._cpu")
