# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a mixture of experts: rows sorted by expert, one weight for each expert."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast import ops
from gnsfast.functional._autocast import backward_pass, without_autocast
from gnsfast.functional._beside import stand_in
from gnsfast.functional.plan import PLAIN, Plan


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        probe: Tensor,
        plan: Plan,
        dtype: torch.dtype,
    ) -> Tensor:
        need_x, *need = ctx.needs_input_grad[:3]
        starts = plan.starts
        assert starts is not None
        plan.check("experts", probe, sum(need))
        ctx.parameter_dtype, ctx.samples = w.dtype, plan.samples(probe)
        ctx.plan = plan.without_tensors()
        if not plan.norms_alone:
            w, b = w.to(dtype), b if b is None else b.to(dtype)
        ctx.save_for_backward(x if need[0] else None, w if need_x else None, *plan.tensors())
        w_EIO = w if plan.transposed else w.mT
        if plan.norms_alone:
            return stand_in(x, len(x), w_EIO.shape[2])
        with without_autocast(x):
            return _grouped_mm(x, w_EIO, b, starts, ctx.samples)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, tensors: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *saved = tensors
        plan = ctx.plan.restored(saved)
        need_x, *need = ctx.needs_input_grad[:3]
        dx = None
        if need_x:
            w_EOI = w.mT if plan.transposed else w
            dx = _grouped_mm(dy, w_EOI, None, plan.starts, ctx.samples)
        a = plan.linear_wgrad(dy if x is None else x, dy, need, ctx.parameter_dtype)
        dw, db, rows, _ = plan.run(ops.linear_wgrad, a, need)
        return dx, *plan.gradients(need, dw, db), rows, None, None


def _grouped_mm(x_NI: Tensor, w_EIO: Tensor, b_EO: Tensor | None, starts: Tensor, B: int) -> Tensor:
    """Each expert's rows times its matrix, plus its bias; zeros for rows without an expert."""
    E, _, O = w_EIO.shape
    bounds = starts[::B] if B else starts.expand(E + 1)
    if _fits_grouped_mm(x_NI, w_EIO):
        ends = bounds[1:].to(torch.int32).contiguous()
        y = F.grouped_mm(x_NI.contiguous(), w_EIO, offs=ends)
        row_N = torch.arange(len(x_NI), device=x_NI.device)
        if b_EO is not None:
            y = y + b_EO[torch.searchsorted(ends, row_N, right=True).clamp_(max=E - 1)]
        return y.masked_fill((row_N >= bounds[-1])[:, None], 0.0)  # no expert wrote these
    y = x_NI.new_zeros((len(x_NI), O))
    at = bounds.tolist()  # waits for the device
    for e, (start, end) in enumerate(zip(at, at[1:])):
        if start < end:
            torch.mm(x_NI[start:end], w_EIO[e], out=y[start:end])
            if b_EO is not None:
                y[start:end] += b_EO[e]
    return y


def _fits_grouped_mm(x_NI: Tensor, w_EIO: Tensor) -> bool:
    """Whether torch has a kernel that does not wait for the device: for bfloat16 rows of a multiple
    of 16 bytes, on Ampere and later.
    """
    if x_NI.device.type != "cuda" or x_NI.dtype != torch.bfloat16 or torch.version.hip:
        return False
    aligned = all(n % 8 == 0 for n in (*w_EIO.shape[1:], w_EIO.storage_offset()))
    return aligned and torch.cuda.get_device_capability(x_NI.device) >= (8, 0)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    probe: Tensor,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    norms_alone: bool = False,
) -> Tensor:
    """``F.linear(x[rows], weight[e], bias[e])`` for each expert e and its rows, with a backward
    that fills ``probe``.

    Sample b's norm is that of ``autograd.grad`` of its own loss term.

    Args:
        x: [N, in_features], rows sorted by expert and then by sample.
        weight: [experts, out_features, in_features], or [experts, in_features, out_features] when
            ``transposed``.
        bias: [experts, out_features] or None.
        starts: [experts · B + 1] integers that do not decrease: rows ``starts[e * B + b]`` to
            ``starts[e * B + b + 1]`` are sample b's rows of expert e. Rows after the last number
            have no expert: their outputs and gradients are zeros.
        probe: float32 zeros [P, B + 2], where P is the number of trainable ones of (weight, bias).
        dtype: the dtype of the products, by default that of ``weight``.
        norms_alone: as in ``Plan``.

    The squared norms scale with the loss: a mean over B samples scales them by 1 / B².
    Raises ValueError for a probe of another shape, and for ``starts`` of another length.
    Source: Goodfellow 2015 (arXiv 1510.01799), summed over tokens and experts.

    >>> x, w = torch.randn(3, 5), torch.randn(2, 4, 5, requires_grad=True)
    >>> starts = torch.tensor([0, 1, 1, 2, 3])  # sample 0: rows 0 and 1, sample 1: row 2
    >>> probe = torch.zeros(1, 2 + 2, requires_grad=True)
    >>> gnsfast.functional.grouped_linear(x, w, None, starts, probe).sum().backward()
    >>> torch.allclose(probe.grad[0, 1], 4 * x[2].square().sum())
    True
    """
    E, B = len(weight), PLAIN.samples(probe)
    if starts.shape != (E * B + 1,):
        raise ValueError(
            f"starts must have shape [{E * B + 1}], for {E} experts, the {B} samples of the probe "
            f"and the end, not {list(starts.shape)}"
        )
    dtype = dtype or weight.dtype
    plan = Plan(transposed=transposed, starts=starts, experts=E, norms_alone=norms_alone)
    y: Tensor = _GroupedLinear.apply(x.to(dtype), weight, bias, probe, plan, dtype)
    return y
