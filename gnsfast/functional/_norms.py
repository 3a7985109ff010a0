# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnsfast import ops
from gnsfast.functional._autocast import without_autocast
from gnsfast.functional.plan import PLAIN, Plan
from gnsfast.signatures import NormBackward
from gnsfast.tensors import accumulate_dtype


class _Norm(torch.autograd.Function):
    """Layer norm, or the RMS norm of a ``variant``, over the last dimensions of ``shape``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        shape: list[int],
        eps: float,
        variant: str | None,
    ) -> Tensor:
        layer = "layer_norm" if variant is None else "rms_norm"
        plan.check(layer, probe, sum(ctx.needs_input_grad[1:3]), w)
        ctx.offset, mean, rstd = 0.0, None, None
        if variant is None:
            y, mean, rstd = torch.native_layer_norm(x, shape, w, b, eps)
        else:
            assert w is not None
            forward, ctx.offset = RMS_NORM_VARIANTS[variant]
            y = forward(x, w, eps)
        ctx.save_for_backward(x, w, b, mean, rstd, *plan.tensors())
        ctx.samples, ctx.plan = plan.samples(probe), plan.without_tensors()
        ctx.shape, ctx.eps = shape, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, mean, rstd, *saved = ctx.saved_tensors
        plan, need = ctx.plan.restored(saved), ctx.needs_input_grad[1:3]

        def rows(t: Tensor) -> Any:
            return plan.rows(t.flatten(-len(ctx.shape)), ctx.samples)

        # torch's kernel assumes that the statistics are contiguous.
        statistics: Any = (None if t is None else rows(t).contiguous() for t in (mean, rstd))
        flat: Any = (None if p is None else p.flatten() for p in (w, b))
        last: Any = *need, ctx.eps, ctx.offset, plan.starts, *plan.metric
        with without_autocast(dy):
            a = NormBackward(rows(dy), rows(x), *statistics, *flat, *last)
            dx, dw, db, probe_rows = plan.run(ops.norm_backward, a, need)
        dx = plan.rows_back(dx, x.flatten(-len(ctx.shape)).shape).reshape(x.shape)
        dw, db = (
            t.reshape(ctx.shape) if wanted and t is not None else None
            for t, wanted in zip((dw, db), need)
        )
        return dx, dw, db, probe_rows, *(None,) * 4


def layer_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)`` whose backward
    fills ``probe``. ``plan`` is that of ``linear``.

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.layer_norm(x, (5,), w, None, probe).sum().backward()
    >>> normed = torch.nn.functional.layer_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1), atol=1e-5)
    True
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as torch's autocast does on CUDA
    if plan.calls is not None:
        probe, weight, bias = plan.calls.enter("layer_norm", plan, (probe, weight, bias))
    shape = list(normalized_shape)
    y: Tensor = _Norm.apply(x, weight, bias, probe, plan, shape, eps, None)
    return y


def rms_norm(
    x: Tensor,
    weight: Tensor,
    probe: Tensor,
    plan: Plan = PLAIN,
    *,
    eps: float | None = None,
    variant: str = "torch",
) -> Tensor:
    """``torch.nn.functional.rms_norm(x, weight.shape, weight, eps)`` whose backward fills
    ``probe``. ``plan`` is that of ``linear``.

    ``variant`` says how the forward rounds and applies the gain: like ``"torch"``, or ``"llama"``
    (normalise in float32, round, then multiply by the weight), ``"olmo"`` (multiply by the weight,
    then round), ``"t5"`` (round only if the weight is half precision), ``"gemma"`` (multiply by
    1 + weight in float32, then round), ``"float32"`` (OLMo-core's: multiply by the weight cast to
    float32, then round), ``"qwen"`` (OLMo-core's Qwen: as ``"llama"``, but cast the weight to the
    dtype of the input), ``"unit"`` (litgpt's Gemma: as ``"float32"``, with 1 + weight in the dtype
    of the weight), ``"as_it_is"`` (no cast), or ``"narrow"`` (cast the weight to the dtype of the
    input, nothing else).

    >>> x, w = torch.randn(3, 7, 5), torch.ones(5, requires_grad=True)
    >>> probe = torch.zeros(1, 3 + 2, requires_grad=True)
    >>> gnsfast.functional.rms_norm(x, w, probe).sum().backward()
    >>> normed = torch.nn.functional.rms_norm(x, (5,))
    >>> torch.allclose(probe.grad[0, :3], normed.sum(1).square().sum(1))
    True
    """
    if eps is None:
        eps = torch.finfo(accumulate_dtype(x.dtype)).eps  # as F.rms_norm does
    if plan.calls is not None:
        probe, weight = plan.calls.enter("rms_norm", plan, (probe, weight))
    y: Tensor = _Norm.apply(x, weight, None, probe, plan, list(weight.shape), eps, variant)
    return y


def _rms_norm_torch(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def _rms_norm_llama(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_olmo(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _rms_norm_t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    narrow = w.dtype in (torch.float16, torch.bfloat16)
    return w * (normed.to(w.dtype) if narrow else normed)


def _rms_norm_gemma(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + w.float())).type_as(x)


def _rms_norm_float32(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (w.float() * normed).to(x.dtype)


def _rms_norm_qwen(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _rms_norm_llama(x, w.to(x.dtype), eps)


def _rms_norm_unit(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1 + w).float()).to(x.dtype)


def _rms_norm_as_it_is(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def _rms_norm_narrow(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _rms_norm_as_it_is(x, w.to(x.dtype), eps)


RMS_NORM_VARIANTS: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], float]] = {
    "torch": (_rms_norm_torch, 0.0),
    "llama": (_rms_norm_llama, 0.0),
    "olmo": (_rms_norm_olmo, 0.0),
    "t5": (_rms_norm_t5, 0.0),
    "gemma": (_rms_norm_gemma, 1.0),
    "float32": (_rms_norm_float32, 0.0),
    "qwen": (_rms_norm_qwen, 0.0),
    "unit": (_rms_norm_unit, 1.0),
    "as_it_is": (_rms_norm_as_it_is, 0.0),
    "narrow": (_rms_norm_narrow, 0.0),
}
